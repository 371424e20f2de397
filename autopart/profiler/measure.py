"""Measure: one call run for real, forward and backward, often enough to be sure of its median.

A call runs on several copies of its inputs in turn, more than the last cache holds: in a model, hundreds of other
operators run between two uses of a weight or of a saved activation. Operators that write their inputs get fresh ones
each time. What `autograd.grad` itself costs is measured on a tensor without operators, and subtracted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopart.effects import named
from autopart.profiler.clocks import Run, clock_for
from autopart.profiler.isolated import Call, contexts
from autopart.profiler.measurement import STANDARD_ERROR, Measurement
from autopart.profiler.ranks import recording
from autopart.profiler.real_inputs import Inputs, real_inputs

BUDGET_S = 0.3
"""Seconds that a part of a call may take, unless fewer repeats than `FEWEST` fit."""
FEWEST, MOST = 5, 200
MOST_COPIES = 16
MOST_BYTES = 1 << 30
"""Of all copies of a call's inputs, unless one alone is larger."""


class Meter:
    """Measures calls on a device of this machine."""

    def __init__(self, device: torch.device, budget_s: float = BUDGET_S) -> None:
        self._device = device
        self._budget_s = budget_s
        self._clock = clock_for(device)
        self._cache_bytes = cache_bytes(device)
        self._backward_s = self._backward_overhead_s()

    def measure(self, call: Call, ranks: int = 1) -> Measurement:
        """Times of a call, as one of `ranks` that hold a model together.

        Raises:
            Exception: Whatever the call raises.
        """
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), recording(ranks), contexts(call, self._device.type):
            return self._measure(call)

    def _measure(self, call: Call) -> Measurement:
        size = max(1, sum(spec.bytes for spec in call.tensors))
        wanted = min(MOST_COPIES, math.ceil(self._cache_bytes / size), max(1, MOST_BYTES // size))
        copies = [real_inputs(call, self._device, seed) for seed in range(wanted)]
        peak_bytes, made_bytes = self._peak_bytes(call, copies[0])
        del copies[max(1, MOST_BYTES // made_bytes) :]
        forward = self._repeat(lambda: [partial(_run, call, arguments(call, copy)) for copy in copies], 0.0)
        graphs = [_Backward(call, copy) for copy in copies] if call.grad else []
        whole = only = [0.0]
        if graphs and graphs[0].outputs and graphs[0].every:
            backward = partial(self._repeat, overhead_s=self._backward_s)
            whole = backward(lambda: [partial(graph.gradients, graph.every) for graph in graphs])
            if len(graphs[0].activations) == len(graphs[0].every):
                only = whole
            elif graphs[0].activations:
                only = backward(lambda: [partial(graph.gradients, graph.activations) for graph in graphs])
        parts = [part for part in (forward, whole, only) if len(part) > 1]
        whole_s = median(whole)
        backward_input_s = min(whole_s, median(only))
        return Measurement(
            forward_s=median(forward),
            backward_input_s=backward_input_s,
            backward_weight_s=whole_s - backward_input_s,
            spread=max(map(spread, parts)),
            repeats=min(map(len, parts)),
            peak_bytes=peak_bytes,
            error=max(map(error, parts)),
        )

    def _repeat(self, prepare: Callable[[], Sequence[Run]], overhead_s: float) -> list[float]:
        """Seconds of runs, until they are known well enough or the budget is spent; the first pass warms up."""
        self._clock.samples(prepare(), overhead_s)
        end = time.perf_counter() + self._budget_s
        found: list[float] = []
        while len(found) < FEWEST or (len(found) < MOST and time.perf_counter() < end and not known(found)):
            found += self._clock.samples(prepare(), overhead_s)
        return found

    def _backward_overhead_s(self) -> float:
        x = torch.ones((), device=self._device, requires_grad=True)
        run = partial(torch.autograd.grad, [x], [x], [torch.ones_like(x)], retain_graph=True, allow_unused=True)
        return median(self._repeat(lambda: [run] * MOST_COPIES, 0.0))

    def _peak_bytes(self, call: Call, copy: Inputs) -> tuple[int | None, int]:
        """The most bytes beyond the inputs, where the device tells, and the bytes of the result, one at least."""
        if on_gpu := self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
        run = _Backward(call, copy)
        if on_gpu and call.grad and run.outputs and run.every:
            run.gradients(run.every)
        peak_bytes = max(0, torch.cuda.max_memory_allocated(self._device) - before) if on_gpu else None
        return peak_bytes, max(1, run.made_bytes)


class _Backward:
    """A call that has run forward, and can run backward any number of times."""

    def __init__(self, call: Call, copy: Inputs) -> None:
        result = _run(call, arguments(call, copy))
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.made_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        self.outputs = [tensor for tensor in tensors if tensor.requires_grad]
        self.every = [x for x in copy.leaves if x.requires_grad]
        pairs = zip(copy.leaves, call.tensors, strict=True)
        self.activations = [x for x, spec in pairs if x.requires_grad and not spec.weight]
        self._incoming = [torch.ones_like(output) for output in self.outputs]

    def gradients(self, wanted: list[torch.Tensor]) -> Any:
        return torch.autograd.grad(self.outputs, wanted, self._incoming, retain_graph=True, allow_unused=True)


def arguments(call: Call, copy: Inputs) -> Any:
    """Arguments to run a call on: those of the copy, and fresh tensors for what the call writes."""
    schema = getattr(call.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return copy.arguments
    args, kwargs = copy.arguments
    given = named(schema, args, kwargs)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    # A clone is tracked by autograd, and its gradient passes through without a kernel.
    fresh = {name: pytree.tree_map_only(torch.Tensor, torch.clone, given[name]) for name in written & given.keys()}
    positions = [argument.name for argument in schema.arguments]
    args = tuple(fresh.get(positions[i], value) for i, value in enumerate(args))
    return args, {name: fresh.get(name, value) for name, value in kwargs.items()}


def _run(call: Call, given: Any) -> Any:
    args, kwargs = given
    return call.target(*args, **kwargs)


def spread(samples: list[float]) -> float:
    """Interquartile range over the median."""
    middle = median(samples)
    low, _, high = quantiles(samples, n=4)
    return (high - low) / middle if middle else 0.0


def error(samples: list[float]) -> float:
    """How far the median is known: the spread over the root of the number of samples."""
    return spread(samples) / math.sqrt(len(samples))


def known(samples: list[float]) -> bool:
    """Whether the median is known to `STANDARD_ERROR`."""
    return error(samples) <= STANDARD_ERROR


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=32 << 20)


def _size(path: Path) -> int:
    """Linux writes "32768K"."""
    text = path.read_text().strip()
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
