"""One process of a package's training step, with every allocation counted: prints the most bytes held at once.

    RANK=0 WORLD_SIZE=1 python -m benchmarks.step_memory PACKAGE --schedule 1f1b --microbatches 4

The bytes are the running sum of the memory events of torch's profiler (every block of its CPU allocator, those that
kernels take inside included). No dispatch mode is on: the engine adds gradients in place only where none is. Two steps
are run, because the optimizer makes its state in the first; the second is reported, parameters and all included.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MEASURED_STEP = 1


def main() -> None:
    """Run two steps as this process of the package, and print the peak of the second as JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("package", type=Path)
    options.add_argument("--schedule", default="1f1b")
    options.add_argument("--microbatches", type=int, required=True)
    options.add_argument("--optimizer", default="adamw")
    options.add_argument("--events", type=Path, help="also write every event of the measured step to this file")
    chosen = options.parse_args()
    pipeline, train = load(chosen.package)
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with train.joined(timeout_s=600.0) as process, watched as run:
        engine = train.build(
            pipeline,
            process=process,
            schedule=chosen.schedule,
            microbatches=chosen.microbatches,
            seed=0,
            dtype=pipeline.dtype,
        )
        optimizer = train.make_optimizer(chosen.optimizer, 1e-3, engine)
        batch = train.random_batch(pipeline, chosen.microbatches, torch.Generator().manual_seed(0))
        for step in range(MEASURED_STEP + 1):
            gc.collect()  # cycles that building left behind hold tensors
            with torch.profiler.record_function(f"step {step}"):
                train._one(engine, optimizer, batch)
    print(json.dumps({"process": process.number, **measured(run, chosen.events)}))


def load(package: Path) -> tuple[Any, Any]:
    """The table of a package and its own copy of the runtime."""
    sys.path.insert(0, str(package))
    pipeline = importlib.import_module("pipeline").PIPELINE
    return pipeline, importlib.import_module("runtime.train")


def measured(run: profile, file: Path | None) -> dict[str, int]:
    """The most bytes held during the measured step, and those held when it begins."""
    assert run.profiler is not None
    events = sorted(run.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == f"step {MEASURED_STEP}")
    held = before = peak = 0
    written = []
    for event in events:
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            if event.start_ns() < start:
                before = held
            peak = max(peak, held) if event.start_ns() >= start else held
        if file is not None and event.start_ns() >= start:
            size = event.nbytes() if event.name() == "[memory]" else 0
            written.append([event.name(), event.start_ns(), event.end_ns(), size, held])
    if file is not None:
        file.write_text(json.dumps(written))
    return {"peak_bytes": peak, "before_bytes": before}


if __name__ == "__main__":
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1")
    main()
