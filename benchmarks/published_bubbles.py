"""The zero-bubble paper's settings, simulated: see `benchmarks.schedule_simulation`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopart.runtime.schedules import SCHEDULES
from autopart.simulator.actions import Action, Message, Post, Program, Wait, actions
from autopart.simulator.events import Timeline, replay
from autopart.simulator.network import Network, Wire

# Schedules of torch that the paper has no rates for, or has them for other chunks, simulated for comparison.
BESIDE = ("gpipe", "interleaved1f1b", "zbv")


def published_bubbles(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows, and how many published rates are met to all four decimals."""
    sweep = json.loads(file.read_text())["sweeps"]["zero_bubble"]
    columns = sweep["table5_columns"]
    rows, met, compared = [], 0, 0
    for (model, p, m), seconds, published in zip(
        sweep["settings"], sweep["table6_ms"], sweep["table5_bubble_rate"], strict=True
    ):
        row: dict[str, Any] = {"model": model, "p": p, "m": m}
        for name, order in (("1F1B", actions("1f1b", p, m)), ("ZB-H1", zb_h1(p, m))):
            rate = round(bubble(order, p, m, seconds), 4)
            row |= {f"{name} published": published[columns.index(name)], f"{name} simulated": rate}
            met += rate == published[columns.index(name)]
            compared += 1
        for name in BESIDE:
            count = p * SCHEDULES[name].stages_per_process
            row[name] = round(bubble(actions(name, count, m), p, m, seconds), 4)
        rows.append(row)
    return rows, {"published rates met to four decimals": f"{met} of {compared}"}


def bubble(order: Sequence[Sequence[Action]], p: int, m: int, milliseconds: Sequence[float]) -> float:
    """The paper's rate for what each of p processes computes; T_F, T_B and T_W are of all stages of a process."""
    forward, backward_input, backward_weight, message = milliseconds
    held = max(a.stage for row in order for a in row) + 1
    share = p / held
    seconds = {"F": forward, "B": backward_input + backward_weight, "I": backward_input, "W": backward_weight}
    timeline = replay(
        unhindered(order),
        lambda action: seconds[action.kind] * share,
        lambda _: (),
        Network(lambda source, target: Wire(message), by_host=False),
    )
    cost = max(_span(timeline, process) for process in range(p))
    return (cost - m * (forward + backward_input + backward_weight)) / cost


def unhindered(order: Sequence[Sequence[Action]]) -> list[Program]:
    """Programs that post every receipt at the start and wait for no send: messages take their latency alone."""
    home = {action.stage: process for process, row in enumerate(order) for action in row}
    programs = []
    for process, row in enumerate(order):
        receipts: list[Post] = []
        rest: list[Action | Post | Wait] = []
        for batch, action in enumerate(row):
            if action.kind != "W":
                step = 1 if action.kind == "F" else -1
                source, target = action.stage - step, action.stage + step
                if home.get(source, process) != process:
                    receipts.append(Post(batch, (), (Message(source, action.stage, action.microbatch),)))
                    rest.append(Wait(batch))
            rest.append(action)
            if action.kind != "W" and home.get(target, process) != process:
                rest.append(Post(batch - len(row), (Message(action.stage, target, action.microbatch),), ()))
        programs.append((*receipts, *rest))
    return programs


def zb_h1(p: int, m: int) -> list[list[Action]]:
    """ZB-H1 (section 2.2 of the paper): 1F1B whose stage s puts its weight gradients off by s microbatches."""
    order = []
    for s in range(p):
        ahead = min(m, p - 1 - s)
        row = [Action(s, "F", i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                row.append(Action(s, "F", ahead + i))
            row.append(Action(s, "I", i))
            if i >= s:
                row.append(Action(s, "W", i - s))
        order.append(row + [Action(s, "W", i) for i in range(max(0, m - s), m)])
    return order


def _span(timeline: Timeline, process: int) -> float:
    computed = [e for e in timeline.of(process) if e.kind != "wait"]
    return max(e.end_s for e in computed) - min(e.start_s for e in computed)
