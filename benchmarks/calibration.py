"""Do curves fitted to some models predict others? Calibration on this machine, with models held out.

Operators of all models are measured (`autopart profile`; the cache on disk makes a second run quick), the curves of
`--device` are fitted to those of `--fit`, and the residuals of `--test`, which the fit never saw, are printed before
and after, by family and as one sum for each model. On an otherwise idle machine, with one thread:

    OMP_NUM_THREADS=1 python -m benchmarks.calibration --device cpu --out cpu.yaml --json calibration.json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from autopart.catalogue import find
from autopart.clusterfile import write_cluster_file
from autopart.hardware import fitted_fields
from autopart.inputs import find_inputs
from autopart.model_spec import load
from autopart.profiler.calibration import calibrate, residuals, same_device, samples_of
from autopart.profiler.operators import profile
from autopart.profiler.profile_file import Profile
from autopart.tracer import trace
from benchmarks.output import parser, show

FIT = ["torchvision:resnet50?batch=2", "hf:gpt2?n_layer=2&batch=2&seq=128", "torchvision:vit_b_16?batch=2"]
TEST = ["torchvision:densenet121?batch=2", "hf:t5?batch=2&seq=128", "hf:bert?batch=2&seq=128"]


def measured(model: str, device: str, dtype: torch.dtype | None) -> Profile:
    """A model's operators, on this machine."""
    loaded = load(model, meta=True)
    args, kwargs = loaded.args, loaded.kwargs
    if not args and not kwargs:
        args, kwargs = find_inputs(loaded.model)
    graph = trace(loaded.model, args, kwargs, dtype=dtype)
    found = profile(graph, device, "measured", progress=lambda done, all_: print(f"\r{model}: {done}/{all_}", end=""))
    print()
    return replace(found, model=model)


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Residuals of the held-out models by family, and the sum of each."""
    dtype = getattr(torch, options.dtype) if options.dtype else None
    fit, test = ([measured(name, options.device, dtype) for name in names] for names in (options.fit, options.test))
    device = same_device(fit)
    base = find(device.name)[0].device
    source = f"fitted by benchmarks.calibration to {', '.join(options.fit)} on {device.model}, torch {device.torch}"
    found = calibrate(samples_of(fit), base, f"{base.name}-calibrated", source)
    if options.out is not None:
        fields = {found.device.name: {"base": base.name, **fitted_fields(found.device)}}
        write_cluster_file(options.out, fields, [{"gpus": [found.device.name]}], {}, "Fitted efficiency curves.")
    rows = []
    groups = {"fitted": samples_of(fit), "held out": samples_of(test)}
    groups |= {profile.model: samples_of([profile]) for profile in (*fit, *test)}
    for name, samples in groups.items():
        before, after = residuals(samples, base, base), residuals(samples, found.device, base)
        for old, new in zip(before, after, strict=True):
            if old.family == "all" or name in ("fitted", "held out"):
                rows.append({"calls of": name, **_side_by_side(asdict(old), asdict(new))})
    curves = {family: asdict(curve) for family, curve in found.device.efficiency.items()}
    return rows, {"cache, bytes": found.device.cache_bytes, **curves}


def _side_by_side(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    found = {"family": before["family"], "parts": before["parts"]}
    for name, column in (("median", "median error"), ("ninety", "90 %"), ("total", "sum / measured")):
        found |= {f"{column} before": before[name], f"{column} after": after[name]}
    return found


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments.add_argument("--dtype", default="", help="convert the models first")
    arguments.add_argument("--fit", nargs="+", default=FIT, metavar="MODEL")
    arguments.add_argument("--test", nargs="+", default=TEST, metavar="MODEL")
    arguments.add_argument("--out", type=Path, metavar="FILE", help="write the fitted device there, as a cluster file")
    chosen = arguments.parse_args()
    table, curves_of = run(chosen)
    show(table, chosen.json, curves_of)
