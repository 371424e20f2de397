"""Does counting the language-model head pay? GPT-2 small on two devices: the solver's split against 6 + 6 layers.

Both splits are predicted for two CPU threads and, at a size that fills them, for two H100. Then both are emitted and
trained on two processes of one thread each: in the same two processes, one step of the one and one step of the other in
turn, so that whatever else the machine does meets both alike. `worst stage` is measured as CPU seconds of the busier
process for a microbatch, which waiting for the other process or for the machine does not change; `step` is wall time.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

LAYERS = 12
SPLITS = ("ours", "6 + 6 layers")


@dataclass(frozen=True)
class Size:
    """What a step trains on."""

    microbatches: int
    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.microbatches} x {self.rows} x {self.length}"


SIZES = {"2xCPU": Size(8, 1, 64), "2xH100-80G": Size(8, 8, 1024)}


def main() -> None:
    """Plan, predict, emit, measure, show."""
    from benchmarks.output import parser, show

    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=8, help="measured steps of each split")
    options.add_argument("--no-measurement", action="store_true", help="predict only")
    chosen = options.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        packages = [Path(directory) / "ours", Path(directory) / "by_layers"]
        for gpus, size in SIZES.items():
            rows += predicted(gpus, size, packages if gpus == "2xCPU" else [])
        if not chosen.no_measurement:
            rows += measured(packages, SIZES["2xCPU"], chosen.rounds)
    show(rows, chosen.json)


def predicted(gpus: str, size: Size, packages: list[Path]) -> list[dict[str, Any]]:
    """Both splits under the catalogue's figures for `gpus`; emitted to `packages` if there are any."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import autopart
    from autopart.cluster import Cluster
    from autopart.solver.describe import Choice, describe
    from autopart.solver.lowering import lower
    from autopart.solver.score import score
    from autopart.workload import Workload

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    tokens = torch.zeros(size.microbatches * size.rows, size.length, dtype=torch.long, device="meta")
    ours = autopart.partition(
        model,
        gpus,
        example_kwargs={"input_ids": tokens, "labels": tokens},
        microbatches=size.microbatches,
        schedule="1f1b",
        stages=2,
        optimizer="sgd",
    )
    cluster = Cluster.parse(gpus)
    workload = Workload("training", size.microbatches, size.rows, "1f1b", "sgd")
    lowered = lower(ours.graph, ours.costs, cluster, workload, 2)
    assignment = by_layers(lowered.calls)
    value = score(lowered.problem, assignment).step_s
    choice = Choice(lowered, tuple(assignment), value, 0.0, "proof", "block", {}, 0.0, "by hand")
    hand = describe(choice, ours.graph, ours.costs, cluster, workload, None, 0.0, 0.0)
    plans = [ours.plan, hand]
    for package, plan in zip(packages, plans, strict=False):
        autopart.emit(ours.graph, plan, package)
    return compared(
        f"{gpus}, predicted",
        [[stage.forward_s + stage.backward_s for stage in plan.per_stage] for plan in plans],
        [plan.step_time_s for plan in plans],
        size,
    )


def by_layers(calls: tuple[torch.fx.Node, ...]) -> list[int]:
    """The stage of each call when each of two stages has half of the layers; the head is with the second half."""
    stage: dict[torch.fx.Node, int] = {}
    for node in calls:
        paths = [path.split(".") for path, _ in node.meta["nn_module_stack"].values()]
        layer = next((int(path[2]) for path in paths if path[:2] == ["transformer", "h"] and len(path) > 2), None)
        asked = 0 if layer is None else layer // (LAYERS // 2)
        stage[node] = max([asked, *(stage[source] for source in node.all_input_nodes if source in stage)])
    return [stage[node] for node in calls]


def measured(packages: list[Path], size: Size, rounds: int) -> list[dict[str, Any]]:
    """Both packages trained in turn by two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOPART_BALANCE_ROUNDS": str(rounds)}
    output = subprocess.run(
        [*command, *map(str, packages)], env=environment, check=True, capture_output=True, text=True
    ).stdout
    result = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return compared("2 processes, measured", result["cpu_s"], result["wall_s"], size)


def compared(where: str, stages_s: list[list[float]], steps_s: list[float], size: Size) -> list[dict[str, Any]]:
    """A row for each split; the ratios are to ours."""
    worst = [max(stages) for stages in stages_s]
    return [
        {
            "where": where,
            "batch": str(size),
            "split": split,
            "stages, ms": " / ".join(f"{1e3 * seconds:.4g}" for seconds in stages_s[i]),
            "worst stage, ms": 1e3 * worst[i],
            "worst / ours": worst[i] / worst[0],
            "step, ms": 1e3 * steps_s[i],
            "step / ours": steps_s[i] / steps_s[0],
        }
        for i, split in enumerate(SPLITS)
    ]


def worker(packages: list[str], rounds: int) -> None:
    """One of two processes: trains the packages in turn, and process 0 prints the medians."""
    loaded = [load(package) for package in packages]
    _, first = loaded[0]
    with first.joined(timeout_s=600.0) as process:
        runs = []
        for pipeline, train in loaded:
            options = {"schedule": "1f1b", "microbatches": pipeline.microbatches, "seed": 0, "dtype": pipeline.dtype}
            engine = train.build(pipeline, process=process, **options)
            batch = train.random_batch(pipeline, pipeline.microbatches, torch.Generator().manual_seed(0))
            runs.append((engine, train.make_optimizer("sgd", 1e-3, engine), batch, train))
        wall: list[list[float]] = [[] for _ in runs]
        cpu: list[list[float]] = [[] for _ in runs]
        for round_number in range(rounds + 1):
            for index, (engine, optimizer, batch, train) in enumerate(runs):
                dist.barrier()
                wall_start, cpu_start = time.perf_counter(), time.process_time()
                train._one(engine, optimizer, batch)
                busy = time.process_time() - cpu_start
                dist.barrier()
                if round_number:  # the first step also allocates
                    wall[index].append(time.perf_counter() - wall_start)
                    cpu[index].append(busy)
        microbatches = loaded[0][0].microbatches
        mine = torch.tensor([median(seconds) / microbatches for seconds in cpu], dtype=torch.float64)
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        if process.number == 0:
            cpu_s = [[float(process_s[index]) for process_s in both] for index in range(len(runs))]
            print(json.dumps({"cpu_s": cpu_s, "wall_s": [median(s) for s in wall]}))


def load(package: str) -> tuple[Any, Any]:
    """The table and the runtime of a package, imported under names that the next package is free to use again."""
    before = set(sys.modules)
    sys.path.insert(0, package)
    pipeline = importlib.import_module("pipeline").PIPELINE
    train = importlib.import_module("runtime.train")
    for info in pipeline.stages:
        info.module()
    sys.path.remove(package)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(package):
            del sys.modules[name]
    return pipeline, train


if __name__ == "__main__":
    if "AUTOPART_BALANCE_ROUNDS" in os.environ:
        worker(sys.argv[1:], int(os.environ["AUTOPART_BALANCE_ROUNDS"]))
    else:
        main()
