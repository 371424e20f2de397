"""The oracle of the memory tests: what torch's CPU allocator really gave out, by the profiler's memory events."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from autopart.runtime.process import Process
from autopart.verification.worker import imported


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes held at once while `run` runs, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    assert watched.profiler is not None
    held = most = 0
    for event in sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def package_peak(rank: int, folder: str, schedule: str, microbatches: int) -> int:
    """That of the second step of a package's process, from where its gradients are gone."""
    with imported(folder) as module:
        train = importlib.import_module("runtime.train")
        table = module.PIPELINE
        options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches, "seed": 0, "dtype": table.dtype}
        process = Process(rank, dist.get_world_size(), torch.device("cpu"))
        engine = train.build(table, process=process, **options)
        optimizer = train.make_optimizer("adamw", 1e-3, engine)
        batch = train.random_batch(table, microbatches, torch.Generator().manual_seed(0))

        def step() -> None:
            engine.step(batch)
            optimizer.step()

        step()
        optimizer.zero_grad()
        return peak_bytes(step)
