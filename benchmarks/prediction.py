"""Predicted and measured step time of whole models in two stages on two processes of one thread each.

    python -m benchmarks.prediction [--only gpt2] [--rounds 3] [--steps 4] [--json FILE]

Each model is planned for two CPUs from a profile measured here, its package is emitted, and trains with `--record`. In
every round the operators are measured anew and the package runs, so that drift of the machine hits both; what is
compared are medians over rounds. A profile is measured in two processes at once, each of which takes every call, since
the two stages share memory and cache too. The links are measured first. Predicted is the simulation of the plan.

A machine that does something else shows in the figures: the load is looked at first, and printed.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import autopart
from autopart.api import Partition
from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.model_spec import load
from autopart.plan import Plan
from autopart.profiler import known_of, profile
from autopart.profiler.measurement import Measurement
from autopart.profiler.profile_file import Entry, Profile
from autopart.records import Record
from benchmarks.output import parser, show

MODELS = {
    "gpt2": "hf:gpt2?batch=4&seq=128",
    "bert-base": "hf:bert?batch=4&seq=128",
    "t5-small": "hf:t5?batch=4&seq=128",
    "resnet50": "torchvision:resnet50?batch=8",
    "densenet121": "torchvision:densenet121?batch=8",
    "vit-b16": "timm:vit_base_patch16_224?batch=4",
    "unet": "zoo:unet?image=128&batch=8",
    "moe": "zoo:moe?seq=128&batch=8",
}
MICROBATCHES, STAGES, BESIDE = 4, 2, 2
BUDGET_S = 0.1
IDLE = 0.3
"""Load above which a machine does something else."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4, help="measured in a round, the first left out")
    chosen = options.parse_args()
    load_before = os.getloadavg()[0]
    if load_before > IDLE:
        print(f"the load of this machine is {load_before:.2f}: it does something else, and figures will suffer")
    with tempfile.TemporaryDirectory() as directory:
        cluster = measured_links(Path(directory) / "cluster.yaml")
        rows = []
        for name in chosen.only:
            rows.append(compared(name, cluster, Path(directory) / name, chosen.rounds, chosen.steps))
            print(f"{name}: predicted / measured {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    errors = [abs(row["ratio"] - 1) for row in rows]
    summary = {"median error": f"{median(errors):.1%}", "worst error": f"{max(errors):.1%}", "load before": load_before}
    show(rows, chosen.json, summary)


def measured_links(file: Path) -> Cluster:
    """Two CPUs of this machine, as `autopart profile --links` finds them."""
    command = [sys.executable, "-m", "autopart.cli", "profile", "--links", "--out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return Cluster.parse(str(file))


def compared(name: str, cluster: Cluster, package: Path, rounds: int, steps: int) -> dict[str, Any]:
    """One row: medians over rounds."""
    spec = MODELS[name]
    loaded = load(spec, meta=True)
    planned = autopart.partition(
        loaded.model,
        cluster,
        example_inputs=loaded.args or None,
        example_kwargs=loaded.kwargs or None,
        stages=STAGES,
        tensor=1,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        recompute="none",
        name=spec,
        profile=measured_profile(spec),
    )
    planned.emit(package)
    predicted, records = [], []
    for number in range(rounds):
        predicted.append(priced(planned, cluster, measured_profile(spec)))
        records.append(recorded(package, package.with_name(f"{name}.{number}.json"), steps))
    steps_s = [autopart.simulate(plan).step_s for plan in predicted]
    measured_s = [median(record.step_s) for record in records]
    row: dict[str, Any] = {
        "model": name,
        "predicted, ms": 1e3 * median(steps_s),
        "measured, ms": 1e3 * median(measured_s),
        "ratio": median(steps_s) / median(measured_s),
        "rounds": " ".join(f"{p / m:.2f}" for p, m in zip(steps_s, measured_s, strict=True)),
    }
    for stage in range(STAGES):
        held = [found for record in records for _, found in record.of_stage(stage)]
        for what in ("forward", "backward"):
            said = median(getattr(plan.per_stage[stage], f"{what}_s") for plan in predicted)
            row[f"{what} {stage}"] = said / median(getattr(found, what).median for found in held)
    return row


def measured_profile(spec: str) -> Profile:
    """Every call measured anew by as many processes at once as will train side by side; the mean of their times."""
    context = get_context("spawn")
    with ProcessPoolExecutor(BESIDE, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return mean_of([*pool.map(measure, [spec] * BESIDE)])


def measure(spec: str) -> Profile:
    """The profile of one microbatch of a model on this machine's CPU."""
    loaded = load(spec, meta=True)
    planned = autopart.trace(
        loaded.model,
        loaded.args,
        dict(loaded.kwargs),
        microbatches=MICROBATCHES,
        check=False,
    )
    return autopart.profile(planned, "cpu", how="measured", cache=False, budget_s=BUDGET_S)


def mean_of(profiles: Sequence[Profile]) -> Profile:
    """Calls that all profiles have, with their mean times."""
    first = profiles[0]
    shared = [key for key in first.entries if all(key in other.entries for other in profiles)]
    entries = {key: _mean([other.entries[key] for other in profiles]) for key in shared}
    return dataclasses.replace(first, entries=entries)


def _mean(entries: Sequence[Entry]) -> Entry:
    times = [entry.time for entry in entries]

    def mean(name: str) -> float:
        return sum(getattr(time, name) for time in times) / len(times)

    time = Measurement(
        mean("forward_s"),
        mean("backward_input_s"),
        mean("backward_weight_s"),
        max(time.spread for time in times),
        min(time.repeats for time in times),
    )
    return dataclasses.replace(entries[0], time=time)


def priced(planned: Partition, cluster: Cluster, found: Profile) -> Plan:
    """The same stages at other costs."""
    costs: Costs = profile(planned.graph, cluster, known=known_of(found, cluster))
    per_stage = []
    for number, stage in enumerate(planned.per_stage):
        (device,) = stage.devices
        own = [node for node, at in planned.assignment.items() if at == number]
        times = [costs.times[cluster.devices[device].name][node] for node in own]
        per_stage.append(
            dataclasses.replace(
                stage,
                forward_s=sum(time.forward_s for time in times),
                backward_s=sum(time.backward_s for time in times),
                backward_weight_s=sum(time.backward_weight_s for time in times),
            )
        )
    return dataclasses.replace(planned.plan, per_stage=tuple(per_stage))


def recorded(package: Path, file: Path, steps: int) -> Record:
    """A run of the package on two processes of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES)]
    command += [str(package / "train.py"), "--steps", str(steps + 2), "--record", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return Record.load(file)


if __name__ == "__main__":
    main()
