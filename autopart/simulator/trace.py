"""A simulated step in the Trace Event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each process of the pipeline is a process of the trace, with a thread for what it computes and one for each neighbour
and direction of its messages. An arrow leads from a message to the action that needs it; memory is a counter.

The format: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopart.simulator.actions import Action, Message
from autopart.simulator.events import Event, Timeline
from autopart.simulator.network import Transfer
from autopart.simulator.simulation import Simulation
from autopart.simulator.tracks import Track

COMPUTE_THREAD = 0
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "wait": "wait",
    "send": "copy a message",
    "sync": "sum tied gradients",
    "update": "optimizer",
}


def trace_json(simulation: Simulation) -> str:
    """The document; the same simulation gives the same text."""
    timeline = simulation.timeline
    events: list[dict[str, Any]] = []
    for process in range(timeline.processes):
        devices = ", ".join(map(str, simulation.devices_of(process)))
        stages = ", ".join(map(str, simulation.stages_of(process)))
        events += _named(process, f"device {devices}: stage {stages}")
        events += [_computed(event) for event in timeline.of(process)]
    events += _messages(timeline)
    for process, track in enumerate(simulation.memory):
        events += _counter(process, track)
    other = {"model": simulation.plan.model, "schedule": simulation.step.schedule, "step_s": simulation.step_s}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, allow_nan=False) + "\n"


def _named(process: int, name: str) -> list[dict[str, Any]]:
    return [
        _metadata(process, 0, "process_name", name=name),
        _metadata(process, 0, "process_sort_index", sort_index=process),
        _metadata(process, COMPUTE_THREAD, "thread_name", name="computing"),
    ]


def _metadata(process: int, thread: int, kind: str, **values: object) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": values}


def _computed(event: Event) -> dict[str, Any]:
    of = {} if event.stage < 0 else {"stage": event.stage, "microbatch": event.microbatch}
    name = NAMES[event.kind] + (f" {event.microbatch}" if of else "")
    return _slice(event.process, COMPUTE_THREAD, name, NAMES[event.kind], event.start_s, event.end_s, of)


def _slice(
    process: int, thread: int, name: str, category: str, start_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
        "args": arguments,
    }


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    needed = {Action(e.stage, e.kind, e.microbatch): e for e in timeline.events if e.kind in ("F", "B", "I")}
    threads: dict[tuple[int, int, bool], int] = {}
    reached: dict[tuple[int, int], float] = {}
    for number, transfer in enumerate(timeline.transfers):
        pair = transfer.source, transfer.target
        # The next message moves while the last one's latency passes: the slices of a thread must not overlap.
        start = max(transfer.start_s, reached.get(pair, 0.0))
        reached[pair] = transfer.end_s
        name = f"{_content(transfer.message)} {transfer.message.microbatch}"
        arguments = {"bytes": transfer.bytes, "boundary": f"{transfer.message.source} to {transfer.message.target}"}
        for process, other, sends in ((*pair, True), (*pair[::-1], False)):
            if (process, other, sends) not in threads:
                threads[process, other, sends] = len(threads) + 1
                title = f"{'to' if sends else 'from'} process {other}"
                yield _metadata(process, threads[process, other, sends], "thread_name", name=title)
            yield _slice(process, threads[process, other, sends], name, "message", start, transfer.end_s, arguments)
        consumer = _consumer(transfer, needed)
        arrow = {"id": number, "name": name, "cat": "message"}
        yield {"ph": "s", "pid": pair[0], "tid": threads[(*pair, True)], "ts": start * 1e6, **arrow}
        yield {"ph": "f", "bp": "e", "pid": pair[1], "tid": COMPUTE_THREAD, "ts": consumer.start_s * 1e6, **arrow}


def _content(message: Message) -> str:
    return "values" if message.source < message.target else "gradients"


def _consumer(transfer: Transfer, needed: dict[Action, Event]) -> Event:
    """The action that waited for a message."""
    _, stage, microbatch = transfer.message
    kinds = ("F",) if transfer.message.source < stage else ("B", "I")
    return next(needed[a] for kind in kinds if (a := Action(stage, kind, microbatch)) in needed)  # type: ignore[arg-type]


def _counter(process: int, track: Track) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "pid": process, "tid": 0, "name": "memory", "ts": time_s * 1e6, "args": {"bytes": held}}
        for time_s, held in track
    ]
