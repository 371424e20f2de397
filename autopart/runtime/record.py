"""Record: what the steps of a run took, by process, stage and microbatch, in one file that process 0 writes.

The first step is a warm-up and left out, the last one runs under the profiler (`profiled`), those between are timed
(`marks`). None of it touches a tensor: the training is what it would be without.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from .engine import Engine
from .errors import INPUT_FILE, PackageError
from .marks import Marks, Piece
from .process import Process
from .profiled import ProfiledStep

SCHEMA = "autopart-record/1"
LEAST_STEPS = 3
MOST_TIMED = 100
"""Steps of a long run that are timed; after them comes the one under the profiler, and the rest run as ever."""
PLAN = Path(__file__).resolve().parents[1] / "plan.json"

Durations = list[tuple[Piece | None, float]]


def prepare(path: Path, steps: int, process: Process) -> dict[str, Any]:
    """Look whether a run can be recorded to a file, before anything else is done, and make its folder.

    What would be found only at the end would cost the run.

    Returns:
        The plan of this package, which the record will hold.

    Raises:
        PackageError: Too few steps, the file is there already, none can be made there, or there is no plan.
    """
    if steps < LEAST_STEPS:
        raise PackageError(
            f"--record needs at least --steps {LEAST_STEPS}, not {steps}: the first step is a warm-up, the last one "
            "runs under the profiler, and those between are timed"
        )
    if os.path.lexists(path):
        raise PackageError(f"--record {path}: the file is there already; choose another name")
    try:
        plan = json.loads(PLAN.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackageError(f"--record needs the package's plan.json: {error}", INPUT_FILE) from error
    try:
        if process.number == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = _beside(path)
            temporary.touch(exist_ok=False)
            temporary.unlink()
    except OSError as error:
        raise PackageError(f"--record {path}: {error.strerror}", INPUT_FILE) from error
    return dict(plan)


class Recorder:
    """Records one process of a run.

    Args:
        steps: How many there will be.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, process: Process, steps: int) -> None:
        self._engine, self._optimizer, self._process = engine, optimizer, process
        self._last = min(steps - 2, MOST_TIMED) + 1
        self._marks = Marks(engine, optimizer)
        self._timed: list[Durations] = []
        self._on_gpu = process.device.type == "cuda"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step of training. Processes begin it together: a step is as long as the slowest takes."""
        if number == 0 or number > self._last:
            yield
            return
        if self._process.count > 1:
            dist.barrier()
        if number < self._last:
            with self._marks.of_step(self._clock) as made:
                yield
            self._timed.append(self._durations(made))
            return
        self._optimizer.zero_grad()
        for adapter in self._engine.adapters.values():
            del adapter.work  # it holds the tensors of the last step
        self._profiled = ProfiledStep(self._process.device)
        with self._profiled.run(), self._marks.of_step(self._profiled.clock) as made:
            yield
        self._lasted, self._operators = self._profiled.operators(made)

    def write(self, path: Path, run: Mapping[str, Any]) -> str:
        """Collect the records of all processes; process 0 writes them, with what it is told of the run.

        Returns:
            A summary for people; "" on other processes.

        Raises:
            PackageError: The file has come to be, or cannot be written.
        """
        processes: list[Any] = [self._figures()]
        if self._process.count > 1:
            parts: list[Any] | None = [None] * self._process.count if self._process.number == 0 else None
            dist.gather_object(processes[0], parts)
            processes = parts or []
        if self._process.number != 0:
            return ""
        steps = [max(taken) for taken in zip(*(p.pop("step_s") for p in processes), strict=True)]
        for figures in processes:
            busy = figures.pop("busy_s")
            figures["wait_s"] = [_rounded(max(0.0, step - own)) for step, own in zip(steps, busy, strict=True)]
        record = {"schema": SCHEMA, **run, "torch": torch.__version__, "step_s": steps, "processes": processes}
        _write_new(path, json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n")
        return f"wrote {path}: {len(steps)} steps measured after a warm-up, median {median(steps):.4g} s"

    def _figures(self) -> dict[str, Any]:
        """What this process measured."""
        mesh = self._engine.mesh
        return {
            "number": self._process.number,
            "place": mesh.place,
            "rank": mesh.rank,
            "device": _name(self._process.device),
            "kind": self._process.device.type,
            "threads": torch.get_num_threads(),
            "step_s": [_rounded(sum(seconds for _, seconds in step)) for step in self._timed],
            "busy_s": [sum(seconds for piece, seconds in step if piece is not None) for step in self._timed],
            "optimizer_s": [_rounded(sum(_of(step, "optimizer", -1))) for step in self._timed],
            "resident_bytes": self._profiled.resident_bytes,
            "peak_bytes": self._profiled.peak_bytes,
            "stages": [self._stage(index) for index in sorted(self._engine.modules)],
        }

    def _stage(self, stage: int) -> dict[str, Any]:
        """One stage: for every step, seconds by microbatch; of the profiled step, seconds by operator."""
        directions = ("forward", "backward")
        return {
            "stage": stage,
            **{
                name: [list(map(_rounded, _of(step, kind, stage))) for step in self._timed]
                for name, kind in (("forward_s", "forward"), ("backward_s", "backward"), ("weights_s", "weights"))
            },
            "profiled_s": {d: _rounded(self._lasted.get((stage, d), 0.0)) for d in directions},
            "operators": {
                d: {
                    name: {"count": count, "seconds": _rounded(seconds)}
                    for name, (count, seconds) in self._operators.get((stage, d), {}).items()
                }
                for d in directions
            },
        }

    def _clock(self) -> Any:
        """Now: seconds on a CPU; on a GPU an event, which does not wait for the kernels before it."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _durations(self, made: list[tuple[Piece | None, Any]]) -> Durations:
        if self._on_gpu:
            torch.cuda.synchronize(self._process.device)
        return [
            (piece, start.elapsed_time(end) / 1e3 if self._on_gpu else end - start)
            for (piece, start), (_, end) in pairwise(made)
        ]


def _of(step: Durations, kind: str, stage: int) -> list[float]:
    """Seconds of each microbatch (or of the one optimizer step), in the order of their numbers."""
    found = [(piece.microbatch, seconds) for piece, seconds in step if piece and piece[:2] == (kind, stage)]
    return [seconds for _, seconds in sorted(found)]


def _rounded(seconds: float) -> float:
    """To nanoseconds, which is what clocks tell."""
    return round(seconds, 9)


def _name(device: torch.device) -> str:
    """As its vendor calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _beside(path: Path) -> Path:
    """The name of the file before it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _write_new(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, and never in place of another."""
    temporary = _beside(path)
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except OSError as error:
        raise PackageError(f"--record {path}: {error.strerror}", INPUT_FILE) from error
    finally:
        temporary.unlink(missing_ok=True)
