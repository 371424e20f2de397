"""One device, checked: what is predicted of a whole training step against what it takes, in time and in memory.

For each model and dtype: every distinct operator is measured (`autopart profile`), and the step is predicted in three
ways, as the sum of the measured operators, by the catalogue's formulas, and by formulas whose efficiency curves were
fitted to the operators of the other models. Then the model is trained for some steps on the device. Times are ratios to
those of the real step (`graph` is the captured graph, which lacks the model's own Python); gradients are added to those
of the step before, as in all but the first microbatch. Memory is the plan's for one stage against the allocator's peak.
The profile of all operators is what `autopart calibrate` reads.

    python -m benchmarks.gpu_check --json gpu.json --profile gpu-profile.json
    autopart calibrate gpu-profile.json --out calibrated.yaml

`--device cpu` does the same on the CPU with small models, in float32, without memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

import autopart
from autopart import Cluster, Profile
from autopart.cluster import Device
from autopart.graph import Graph
from autopart.model_spec import load
from autopart.profiler import known_of
from autopart.profiler import profile as costs_of
from autopart.profiler.calibration import calibrate, samples_of
from autopart.tracer import find_batch
from autopart.tracer.interpreter import run_capture
from benchmarks.output import parser, show

LARGE = {
    "GPT-2 small, 4 layers": "hf:gpt2?n_layer=4&batch=8&seq=1024",
    "ResNet-50": "torchvision:resnet50?batch=32",
    "ViT-B/16": "timm:vit_base_patch16_224?batch=32",
}
SMALL = {
    "GPT-2, 2 layers of 256": "hf:gpt2?n_layer=2&n_embd=256&n_head=4&vocab_size=2000&n_positions=128&batch=4&seq=128",
    "ResNet-18": "torchvision:resnet18?num_classes=10&image=96&batch=4",
    "ViT, 2 layers of 192": "timm:vit_tiny_patch16_224?depth=2&num_classes=10&batch=4",
}
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-6)


@dataclass(frozen=True)
class Case:
    """A model in one dtype, and what its operators take."""

    name: str
    spec: str
    dtype: torch.dtype
    graph: Graph
    operators: Profile


@dataclass(frozen=True)
class Step:
    """Seconds of a step's parts, and the most bytes that were allocated (None on a CPU).

    Attributes:
        graph_s: Forward and backward of the captured graph: the model without its own Python.
    """

    forward_s: float
    backward_s: float
    update_s: float
    graph_s: float
    peak_bytes: int | None


def main() -> None:
    """Measure, fit, predict, run, show."""
    chosen = _options()
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    specs = SMALL if chosen.device == "cpu" else LARGE
    dtypes = [torch.float32] if chosen.device == "cpu" else [torch.float32, torch.bfloat16]
    cases = [
        captured(name, spec, dtype, chosen.device, chosen.budget)
        for name, spec in specs.items()
        for dtype in dtypes
        if chosen.only in name
    ]
    joined = cases[0].operators
    for case in cases[1:]:
        joined = joined.joined(case.operators)
    if chosen.profile is not None:
        joined.save(chosen.profile)
    rows = [row(case, cases, chosen.device, chosen.steps) for case in cases]
    show(rows, chosen.json, {"device": joined.device, "operators": len(joined.entries), "notes": list(joined.notes)})


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--profile", type=Path, metavar="FILE", help="write the profile of all operators there")
    options.add_argument("--budget", type=float, default=0.1, help="seconds for each part of an operator, at most")
    options.add_argument("--steps", type=int, default=20, help="measured steps of each model")
    options.add_argument("--only", default="", metavar="NAME", help="models whose names contain this")
    return options.parse_args()


def captured(name: str, spec: str, dtype: torch.dtype, device: str, budget_s: float) -> Case:
    """The graph of a model for its whole batch, and its operators measured."""
    loaded = load(spec, meta=False)
    args, kwargs = loaded.args, dict(loaded.kwargs)
    batch = find_batch(loaded.model, args, kwargs)
    graph = autopart.trace(loaded.model, args, kwargs, batch_dims=batch.dims, dtype=dtype)
    operators = autopart.profile(graph, device, "measured", budget_s=budget_s)
    short = str(dtype).removeprefix("torch.")
    return Case(name, spec, dtype, graph, replace(operators, model=f"{name}, {short}"))


def row(case: Case, cases: list[Case], device: str, steps: int) -> dict[str, Any]:
    """Predicted against real."""
    real = trained(case, torch.device(device), steps)
    cluster = Cluster.parse([case.operators.device.name])
    fitted = _fitted([other.operators for other in cases if other.name != case.name], cluster.devices[0])
    ways = {
        "operators": predicted(case.graph, cluster, case.operators),
        "formulas": predicted(case.graph, cluster, None),
        "fitted": predicted(case.graph, replace(cluster, devices=(fitted,)), None) if fitted else None,
    }
    found: dict[str, Any] = {"model": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
    parts: Mapping[str, Callable[[tuple[float, float]], float]] = {
        "forward": lambda seconds: seconds[0],
        "backward": lambda seconds: seconds[1],
        "both": sum,
    }
    for part, of in parts.items():
        whole = of((real.forward_s, real.backward_s))
        found[f"{part}, ms"] = 1e3 * whole
        found |= {f"{part}: {way}": of(seconds) / whole if seconds else None for way, seconds in ways.items()}
    found["both: graph"] = real.graph_s / (real.forward_s + real.backward_s)
    found["update, ms"] = 1e3 * real.update_s
    if real.peak_bytes is not None:
        found["peak, MiB"] = real.peak_bytes / 2**20
        found["peak: plan"] = planned_bytes(case) / real.peak_bytes
    return found


def _fitted(profiles: list[Profile], device: Device) -> Device | None:
    """The device with efficiency curves of these profiles."""
    if not profiles:
        return None
    return calibrate(samples_of(profiles), device, f"{device.name}-fitted", "the other models").device


def predicted(graph: Graph, cluster: Cluster, operators: Profile | None) -> tuple[float, float]:
    """Seconds forward and backward."""
    known = None if operators is None else known_of(operators, cluster)
    times = costs_of(graph, cluster, known=known).times[cluster.devices[0].name].values()
    return sum(time.forward_s for time in times), sum(time.backward_s for time in times)


def planned_bytes(case: Case) -> int:
    """Peak of a plan with one stage and one microbatch."""
    loaded = load(case.spec)
    plan = autopart.partition(
        loaded.model,
        [case.operators.device.name],
        example_inputs=loaded.args,
        example_kwargs=loaded.kwargs,
        stages=1,
        tensor=1,
        microbatches=1,
        schedule="gpipe",
        recompute="none",
        dtype=case.dtype,
    )
    return plan.per_stage[0].peak_memory_bytes


def trained(case: Case, device: torch.device, steps: int) -> Step:
    """Real steps; the first ones, which allocate, are not counted in time."""
    loaded = load(case.spec, meta=False)

    def placed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device, case.dtype) if x.is_floating_point() else x.to(device)

    model = loaded.model.to(device, case.dtype).train()
    args, kwargs = pytree.tree_map(placed, (loaded.args, dict(loaded.kwargs)))
    optimizer = OPTIMIZER(model.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def loss() -> torch.Tensor:
        result = model(*args, **kwargs)
        own = getattr(result, "loss", None)
        # The stand-in of the tracer for models without a loss.
        return own if own is not None else result.square().mean()

    times = [one_step(loss, optimizer.step, device) for _ in range(steps + 3)][3:]
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    forward, backward, update = (median(part) for part in zip(*times, strict=True))
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return Step(forward, backward, update, graph_seconds(case.graph, inputs, device, steps), peak_bytes)


def graph_seconds(graph: Graph, inputs: list[torch.Tensor], device: torch.device, steps: int) -> float:
    """Forward and backward of the captured graph, operator by operator."""
    state = {
        key: entry.tensor.detach().to(device).requires_grad_(entry.requires_grad) for key, entry in graph.state.items()
    }
    # Captured where the weights were, on the CPU: that device stands among the arguments.
    for node in graph.primary.graph.nodes:
        given = map_aggregate((node.args, node.kwargs), lambda x: device if isinstance(x, torch.device) else x)
        node.args, node.kwargs = given
    assert graph.loss is not None
    place = graph.loss

    def loss() -> torch.Tensor:
        return run_capture(graph, graph.primary, inputs, state)[place]

    return median(sum(one_step(loss, lambda: None, device)) for _ in range(steps + 3))


def one_step(forward: Callable[[], torch.Tensor], update: Callable[[], Any], device: torch.device) -> tuple[float, ...]:
    """Seconds forward, backward, and of the optimizer."""
    marks = [_mark(device)]
    loss = forward()
    marks.append(_mark(device))
    loss.backward()
    marks.append(_mark(device))
    update()
    marks.append(_mark(device))
    if device.type != "cuda":
        return tuple(b - a for a, b in pairwise(marks))
    torch.cuda.synchronize()
    return tuple(1e-3 * a.elapsed_time(b) for a, b in pairwise(marks))


def _mark(device: torch.device) -> Any:
    """An event, or the thread's own time: a single thread computes, and others may be busy beside it."""
    if device.type != "cuda":
        return time.thread_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


if __name__ == "__main__":
    main()
