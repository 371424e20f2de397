"""Predicted and measured peak memory of whole training steps: parameters, gradients, Adam, activations, temporaries.

    python -m benchmarks.memory_prediction [--only gpt2] [--dtype float32] [--mode "1f1b"] [--json FILE]

Each model of the zoo, at full depth and few rows, in float32 and under autocast to bfloat16, with every block kept and
with every block recomputed that can be: in one process, and per process of a pipeline of two processes. Packages are
emitted and run (`benchmarks.step_memory`); the prediction (`autopart.simulator.memory`) knows the graph alone. `error`
is of the whole peak, `error beyond` of what lies beyond parameters, optimizer state and batch. The rules were fitted on
the models that are marked so.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import autopart
from autopart.api import Partition
from autopart.blocks import find_blocks
from autopart.codegen import emit, recomputable
from autopart.model_spec import load
from autopart.plan import Plan
from autopart.simulator.memory import ProcessMemory, plan_memory
from benchmarks.output import parser, show

# Name -> spec; the number of rows of a step is filled in.
MODELS = {
    "gpt2": "hf:gpt2?seq=64&batch={}",
    "unet": "zoo:unet?image=64&batch={}",
    "resnet50": "torchvision:resnet50?image=128&batch={}",
    "bert-base": "hf:bert?seq=128&batch={}",
    "t5-small": "hf:t5?seq=64&batch={}",
    "densenet121": "torchvision:densenet121?image=128&batch={}",
    "vit-b16": "timm:vit_base_patch16_224?batch={}",
    "moe": "zoo:moe?seq=64&batch={}",
}
FITTED = ("gpt2", "unet", "resnet50")
DTYPES = ("float32", "autocast")

# Mode -> (schedule, stages, processes).
MODES = {
    "alone": ("1f1b", 1, 1),
    "gpipe": ("gpipe", 2, 2),
    "1f1b": ("1f1b", 2, 2),
    "interleaved1f1b": ("interleaved1f1b", 4, 2),
    "interleavedzerobubble": ("interleavedzerobubble", 4, 2),
    "zbv": ("zbv", 4, 2),
    "dualpipev": ("dualpipev", 4, 2),
}
MICROBATCHES = 4
OPTIMIZER = "adamw"


class Autocast(nn.Module):
    """A model under autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(*args, **kwargs)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    options.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    options.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    options.add_argument("--recomputed", nargs="+", choices=("none", "all"), default=("none", "all"))
    options.add_argument("--rows", type=int, default=1, help="of a microbatch (%(default)s)")
    chosen = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name, dtype in product(chosen.only, chosen.dtype):
        planned = whole(MODELS[name], dtype, chosen.rows)
        for mode, recomputed in product(chosen.mode, chosen.recomputed):
            case = {"model": name + " (fitted)" * (name in FITTED), "dtype": dtype, "mode": mode, "again": recomputed}
            for row in compared(planned, mode, recomputed == "all"):
                rows.append({**case, **row})
                print(rows[-1], flush=True)
    show(rows, chosen.json, summary(rows))


def whole(spec: str, dtype: str, rows: int) -> Partition:
    """The plan of a model on one process."""
    # Autocast of the CPU leaves tensors on `meta` alone: what crosses a boundary would be captured as float32.
    loaded = load(spec.format(rows * MICROBATCHES), meta=dtype == "float32")
    return autopart.partition(
        loaded.model if dtype == "float32" else Autocast(loaded.model),
        ["CPU"],
        example_inputs=loaded.args,
        example_kwargs=loaded.kwargs,
        microbatches=MICROBATCHES,
        optimizer=OPTIMIZER,
        stages=1,
        recompute="none",
        check=False,
        time_limit_s=1.0,
    )


def compared(planned: Partition, mode: str, recomputed: bool) -> Iterator[dict[str, Any]]:
    """A row for each process."""
    schedule, stages, processes = MODES[mode]
    plan = cut(planned, schedule, stages, recomputed)
    again = [label for stage in plan.per_stage for label in stage.recomputed]
    predicted = plan_memory(planned.graph, planned.costs, plan.assignment, plan.strategy, again, OPTIMIZER)
    with tempfile.TemporaryDirectory() as directory:
        emit(planned.graph, plan, Path(directory) / "package")
        measured = launch(Path(directory) / "package", schedule, processes)
    for process, (ours, peak) in enumerate(zip(predicted, measured, strict=True)):
        yield {
            "process": process,
            "predicted, MB": ours.peak_bytes / 1e6,
            "measured, MB": peak / 1e6,
            "error, %": 100 * (ours.peak_bytes / peak - 1),
            "error beyond, %": 100 * ((ours.peak_bytes - lasting(ours)) / (peak - lasting(ours)) - 1),
        }


def lasting(process: ProcessMemory) -> int:
    """What is there before a step begins."""
    return process.trace[0].before_bytes


def cut(planned: Partition, schedule: str, stages: int, recomputed: bool) -> Plan:
    """The model in stages of about equal predicted time, cut between blocks."""
    graph, times = planned.graph, next(iter(planned.costs.times.values()))
    blocks = find_blocks(graph, graph.primary)
    seconds = {name: times[name].forward_s + times[name].backward_s for name in blocks}
    total, done = sum(seconds.values()), 0.0
    first: dict[str, int] = {}
    for name, label in blocks.items():
        first.setdefault(label, min(stages - 1, int(stages * done / total)))
        done += seconds[name]
    assignment = {name: first[label] for name, label in blocks.items()}
    changed = True
    while changed:  # no value flows back
        changed = False
        for node in graph.primary.calls:
            least = max(
                (assignment[source.name] for source in node.all_input_nodes if source.name in assignment), default=0
            )
            if assignment[node.name] < least:
                changed = True
                assignment.update(
                    dict.fromkeys((n for n, label in blocks.items() if label == blocks[node.name]), least)
                )
    again = [label for label, why in recomputable(graph, schedule).items() if why is None] if recomputed else []
    home = {label: assignment[name] for name, label in blocks.items()}
    stage = planned.per_stage[0]
    per_stage = tuple(
        dataclasses.replace(stage, recomputed=tuple(label for label in again if home[label] == s))
        for s in range(stages)
    )
    strategy = dataclasses.replace(planned.strategy, stages=stages, schedule=schedule)
    return dataclasses.replace(planned.plan, assignment=assignment, per_stage=per_stage, strategy=strategy)


def launch(package: Path, schedule: str, processes: int) -> list[int]:
    """Run the package's processes; the peak of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.step_memory", str(package), "--schedule", schedule]
    command += ["--microbatches", str(MICROBATCHES), "--optimizer", OPTIMIZER]
    running = []
    for rank in range(processes):
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        variables |= {key: str(value) for key, value in torchrun.items()}
        running.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    results = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"{package}: a process failed")
    return [json.loads(text.splitlines()[-1])["peak_bytes"] for text in results]


def summary(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Largest and median error of each dtype, of the models that no rule was fitted on and of the others."""
    found = {}
    for dtype, fitted in product(DTYPES, (True, False)):
        errors = [abs(r["error, %"]) for r in rows if r["dtype"] == dtype and r["model"].endswith("(fitted)") == fitted]
        if errors:
            name = f"{dtype}, {'fitted' if fitted else 'blind'}"
            found[name] = f"worst {max(errors):.2f} %, median {median(errors):.2f} %, {len(errors)} peaks"
    return found


if __name__ == "__main__":
    main()
