"""A graph's operators, timed: `profile` measures each distinct call on a device of this machine, or prices it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from autopart.catalogue import find
from autopart.cluster import Link
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.profiler.analytic import Walk
from autopart.profiler.cache import MeasurementCache
from autopart.profiler.call_times import CallTimes, addition
from autopart.profiler.isolated import Call, Work
from autopart.profiler.keys import key_of, operator_of
from autopart.profiler.measure import BUDGET_S, Meter
from autopart.profiler.measurement import Measurement, addition_call
from autopart.profiler.profile_file import Entry, Profile, ProfiledDevice
from autopart.profiler.ranks import Exchange
from autopart.profiler.this_machine import by_formula, here

Progress = Callable[[int, int], None]
"""How many of how many distinct calls are done."""


def profile(
    graph: Graph,
    device: str = "cuda",
    how: Literal["auto", "measured", "analytic"] = "auto",
    *,
    cache: bool = True,
    again: bool = False,
    budget_s: float = BUDGET_S,
    progress: Progress | None = None,
) -> Profile:
    """Times of every distinct operator of a captured model, forward and backward, for one microbatch.

    What was measured before on the same device, driver and torch is read from the cache and not measured again;
    interrupted, a second call goes on where the first stopped.

    Args:
        graph: What `autopart.trace` returns.
        device: "cpu" or "cuda", this machine's; or a name of the catalogue ("H100-80G").
        how: "measured" on the device; "analytic", by formula from its figures; "auto": measured where the device is
            this machine's.
        cache: Whether to read and keep measurements on disk (`AUTOPART_CACHE`).
        again: Measure also what the cache has, and keep what is found in its place.
        budget_s: Seconds to spend on each of the three parts of a call, at most.
        progress: Called after each distinct call.

    Raises:
        UsageError: The device is unknown, or is to be measured and is not here.
    """
    if how not in ("auto", "measured", "analytic"):
        raise UsageError(f'how must be "auto", "measured" or "analytic", not {how!r}')
    found = None if how == "analytic" else here(device)
    if how == "measured" and found is None:
        name = find(device)[0].device.name
        hint = "Measure on the machine that has it, and bring the profile here as a file; or take how='analytic'."
        raise UsageError(f"this machine has no {name}, so it cannot be measured here", hint)
    if found is None:
        return _priced(graph, device)
    return _measured(graph, found, cache, again, budget_s, progress)


@dataclass(frozen=True)
class _Calls:
    """The distinct calls of a graph, by key.

    Attributes:
        counts: How often each is made.
        sums: Those that add up gradients: work of backward, although each is an operator that runs forward.
        left: Sentences on what has no call.
    """

    calls: dict[str, Call]
    works: dict[str, Work]
    counts: Counter[str]
    sums: set[str]
    left: list[str]


def _calls(walk: Walk) -> _Calls:
    found = _Calls({}, {}, Counter(), set(), [])

    def add(call: Call, work: Work) -> str:
        key = key_of(call, walk.ranks)
        found.calls.setdefault(key, call)
        found.works.setdefault(key, work)
        found.counts[key] += 1
        return key

    for name, outcome in walk.outcomes.items():
        call = walk.calls.get(name)
        if call is None:
            found.left.append(f"{name} is kept whole and has no entry.")
        elif any(isinstance(step, Exchange) for step in (*outcome.work.forward, *outcome.work.backward)):
            found.left.append(f"{name} exchanges data between ranks and has no entry.")
        else:
            add(call, outcome.work)
            if name in walk.runs_again:  # what backward computes again has run before, without autograd
                add(replace(call, grad=False), Work(outcome.work.forward))
    own = set(found.calls)
    for sums, of_input in ((walk.sums, True), (walk.weight_sums, False)):
        for specs in sums.values():
            for spec in specs:
                kernels = (addition(spec),)
                found.sums.add(add(addition_call(spec), Work((), kernels, kernels if of_input else ())))
    found.sums.difference_update(own)  # what the model calls itself, on the same shapes, stays its own
    return found


def _priced(graph: Graph, name: str) -> Profile:
    device, described = by_formula(name)
    walk = Walk(graph, device.kind)
    walk.run()
    found = _calls(walk)
    prices = CallTimes(device, Link("none", 0.0, 1.0), walk.ranks)
    entries = {}
    for key, call in found.calls.items():
        seconds = prices.call(call, found.works[key], 1.0, 0)
        time = Measurement(seconds.forward_s, seconds.backward_input_s, seconds.backward_weight_s, 0.0, 0)
        entries[key] = Entry.of(found.counts[key], time, found.works[key])
    return Profile(graph.name, "analytic", described, entries, tuple(found.left), graph.microbatch_size)


def _measured(
    graph: Graph, device: ProfiledDevice, cache: bool, again: bool, budget_s: float, progress: Progress | None
) -> Profile:
    walk = Walk(graph, device.kind)
    walk.run()
    found = _calls(walk)
    stored = MeasurementCache(device) if cache else None
    meter: Meter | None = None
    entries: dict[str, Entry] = {}
    notes = found.left
    for done, (key, call) in enumerate(found.calls.items(), start=1):
        time = stored.get(key) if stored is not None and not again else None
        if time is None:
            meter = meter or Meter(torch.device(device.kind), budget_s)
            try:
                time = meter.measure(call, walk.ranks)
            except Exception as error:  # whatever an operator raises; its time stays that of the formula
                notes.append(f"{operator_of(key)} could not be measured ({_first_line(error)}): {key}")
            else:
                if stored is not None:
                    stored.put(key, time)
        if time is not None:
            if key in found.sums:
                time = time.as_backward(of_weights=not found.works[key].backward_input)
            entries[key] = Entry.of(found.counts[key], time, found.works[key])
        if progress is not None:
            progress(done, len(found.calls))
    if stored is not None and stored.problem is not None:
        notes.append(f"Measurements could not be kept ({stored.problem}).")
    return Profile(graph.name, "measured", device, entries, tuple(notes), graph.microbatch_size)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:120]
