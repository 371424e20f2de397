"""The oracle of the memory tests: what torch's CPU allocator really gave out, by the profiler's memory events."""

from __future__ import annotations

import gc
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


def _training(module: Any, rank: int, schedule: str, microbatches: int) -> tuple[Any, Any, Any]:
    """The engine, the optimizer and one batch of a package's process."""
    train = importlib.import_module("runtime.train")
    table = module.PIPELINE
    options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches, "seed": 0, "dtype": table.dtype}
    process = Process(rank, dist.get_world_size(), torch.device("cpu"))
    engine = train.build(table, process=process, **options)
    batch = train.random_batch(table, microbatches, torch.Generator().manual_seed(0))
    return engine, train.make_optimizer("adamw", 1e-3, engine), batch


def package_peak(rank: int, folder: str, schedule: str, microbatches: int) -> int:
    """That of the second step of a package's process, from where its gradients are gone."""
    with imported(folder) as module:
        engine, optimizer, batch = _training(module, rank, schedule, microbatches)

        def step() -> None:
            engine.step(batch)
            optimizer.step()

        step()
        optimizer.zero_grad()
        return peak_bytes(step)


def package_actions(rank: int, folder: str, schedule: str, microbatches: int) -> dict[str, tuple[int, int]]:
    """Every action of the second step of a package's process, by all bytes that the process holds.

    Returns:
        Name of the action -> (most bytes while it runs, bytes after it); "update" is the optimizer's.
    """
    with imported(folder) as module, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        engine, optimizer, batch = _training(module, rank, schedule, microbatches)
        for number in range(2):
            optimizer.zero_grad()
            gc.collect()  # cycles that building left behind hold tensors
            with torch.profiler.record_function(f"step {number}"):
                engine.step(batch)
                optimizer.step()
        del engine, optimizer, batch
    assert watched.profiler is not None
    events = sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begun = next(event.start_ns() for event in events if event.name() == "step 1")
    held, levels = 0, []
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            levels.append((event.start_ns(), held))
    found = {}
    for event in events:
        name = event.name().removeprefix("PP:")
        if event.start_ns() >= begun and (name != event.name() or name.startswith("Optimizer.step")):
            before = [level for time, level in levels if time < event.start_ns()][-1:]
            within = [level for time, level in levels if event.start_ns() <= time <= event.end_ns()]
            found[name if name != event.name() else "update"] = max(before + within), (before + within)[-1]
    return found
