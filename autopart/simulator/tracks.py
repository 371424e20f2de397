"""Memory over time: the bytes of each action, put where the simulation ran it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopart.simulator.events import Timeline

if TYPE_CHECKING:
    from autopart.simulator.memory import ActionMemory, ProcessMemory

# (seconds, bytes held from then on), in order.
Track = tuple[tuple[float, int], ...]


def memory_tracks(timeline: Timeline, memory: Sequence[ProcessMemory]) -> tuple[Track, ...]:
    """For each process: while an action runs, the most that it holds; between actions, what stays."""
    return tuple(_track(timeline, process, of.trace) for process, of in enumerate(memory))


def _track(timeline: Timeline, process: int, trace: Sequence[ActionMemory]) -> Track:
    events = timeline.of(process)
    spans = {(e.stage, e.kind, e.microbatch): (e.start_s, e.end_s) for e in events}
    done = max((e.end_s for e in events), default=0.0)
    update = min((e.start_s for e in events if e.kind in ("sync", "update")), default=done)
    track = [(0.0, trace[0].before_bytes)]
    for entry in trace:
        # The last entry is no action: tied gradients are summed and the optimizer runs.
        start, end = spans[entry.action] if entry.action is not None else (update, done)
        track += [(start, entry.peak_bytes), (end, entry.after_bytes)]
    return tuple(track)
