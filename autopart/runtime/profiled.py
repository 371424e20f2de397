"""One step under torch's profiler: seconds by operator and stage, and the most memory that was held."""

from __future__ import annotations

import gc
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .marks import Mark

MARK = "autopart mark "
DIRECTIONS = {"forward": "forward", "backward": "backward", "weights": "backward"}
"""Kind of a piece -> direction that its operators are counted under."""

Operators = dict[str, tuple[int, float]]
"""Name -> how often it ran, seconds of all runs."""


class ProfiledStep:
    """A step that is run once, and what the profiler saw of it.

    Attributes:
        resident_bytes: Of the tensors that were there when the step began.
        peak_bytes: The most bytes that were held at once during the step, with those.
    """

    resident_bytes = 0
    peak_bytes = 0

    def __init__(self, device: torch.device) -> None:
        # The profiler's library tells about itself on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
        self._profile = profile(activities=activities, profile_memory=not self._on_gpu, acc_events=True)
        self._device = device
        self._marks = 0

    def clock(self) -> int:
        """A moment, to be found again among the profiler's events by its number."""
        with record_function(f"{MARK}{self._marks}"):
            self._marks += 1
        return self._marks - 1

    @contextmanager
    def run(self) -> Iterator[None]:
        """Profile what runs in this context. What the step will free must be made in it: its end is not seen else."""
        self.resident_bytes = _held_bytes(self._device)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        with self._profile:
            yield
        if self._on_gpu:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self.peak_bytes = self.resident_bytes + self._most_allocated()

    def operators(self, made: Sequence[Mark]) -> tuple[dict[tuple[int, str], float], dict[tuple[int, str], Operators]]:
        """(Stage, direction) -> seconds under the profiler, and the same -> its operators.

        Args:
            made: The marks of the step, by `clock`.

        An operator is what runs below autograd, whatever it is made of itself: convolution, not the library's kernel.
        On a CPU its seconds are those of the call, on a GPU those of the kernels that it started.
        """
        events = [e for e in self._profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
        starts = {int(e.name.removeprefix(MARK)): e.time_range.start for e in events if e.name.startswith(MARK)}
        times = [starts[number] for _, number in made]
        lasted: dict[tuple[int, str], float] = {}
        found: dict[tuple[int, str], Operators] = {}
        for (piece, _), start, end in zip(made, times, times[1:], strict=False):
            if piece is not None and piece.kind in DIRECTIONS:
                key = piece.stage, DIRECTIONS[piece.kind]
                lasted[key] = lasted.get(key, 0.0) + (end - start) / 1e6
        for event in _below_autograd(e for e in events if e.cpu_parent is None):
            here = bisect_right(times, event.time_range.start) - 1
            piece = made[here][0] if here >= 0 else None
            if piece is None or piece.kind not in DIRECTIONS:
                continue
            of_stage = found.setdefault((piece.stage, DIRECTIONS[piece.kind]), {})
            name = event.name.rpartition("::")[2]
            count, seconds = of_stage.get(name, (0, 0.0))
            time_us = event.device_time_total if self._on_gpu else event.cpu_time_total
            of_stage[name] = count + 1, seconds + time_us / 1e6
        return lasted, found

    def _most_allocated(self) -> int:
        """The highest running sum of the CPU allocator's events; only the profiler's own list has every one of them."""
        profiler = self._profile.profiler
        assert profiler is not None and profiler.kineto_results is not None
        held = most = 0
        for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                held += event.nbytes()  # type: ignore[attr-defined]
                most = max(most, held)
        return most


def _held_bytes(device: torch.device) -> int:
    """Of every tensor of this process; between two steps Python knows them all."""
    tensors = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.layout == torch.strided)
    storages = [storage for t in tensors if (storage := t.untyped_storage()).device == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _below_autograd(events: Any) -> Iterator[Any]:
    """Of each call tree, the outermost operators that are not composed of others above autograd."""
    for event in events:
        if _is_composite(event.name):
            yield from _below_autograd(event.cpu_children)
        else:
            yield event


@cache
def _is_composite(name: str) -> bool:
    """Whether something that the profiler saw is no operator, or one that autograd sees through.

    torch tells what an operator is composed of through these functions alone.
    """
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None) if operator.isidentifier() else None
    if packet is None:
        return True
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    names = [o.name() for o in overloads if not any(argument.is_out for argument in o._schema.arguments)]
    known = [name for name in names if torch._C._dispatch_has_kernel(name)]
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd") for name in known)
