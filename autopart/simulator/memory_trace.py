"""Memory of one process over a step: its actions one after the other, and what crosses a boundary outlives them.

What is sent lives as long as the handle of its send (`Handles`). Neighbours on one process hand tensors over without a
message: what is handed over takes the place of the receive buffer, and with it of what the step before left there. A
received tensor keeps its gradient until the next step begins, where input gradients are computed apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopart.plan import StageMemory, Strategy
from autopart.simulator.actions import Action, Kind


@dataclass(frozen=True)
class ActionMemory:
    """Bytes that a process holds before an action, at most while it runs, and after.

    The last one is no action: tied gradients are summed and the optimizer runs.
    """

    action: Action | None
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def trace(strategy: Strategy, stages: Mapping[int, StageMemory], order: Sequence[Action]) -> tuple[ActionMemory, ...]:
    """Every action of a process, and the end of the step.

    Args:
        stages: Those of the process, by index.
    """
    now = max(stage.batch for stage in stages.values())
    for number, stage in stages.items():
        now += stage.parameters + stage.buffers + stage.optimizer_state
        now += _buffers(strategy, stages, number, order)
    handles = Handles(strategy, stages)
    started: set[int] = set()
    found = []
    for action in order:
        stage = stages[action.stage]
        part = part_of(action, stage)
        before = peak = now
        if part is not None:
            first = action.stage not in started and part in ("B", "W")
            if first:
                started.add(action.stage)
            extra, change = _bytes(part, stage, first)
            peak, now = now + extra, now + change + handles.after(action.stage, part)
        found.append(ActionMemory(action, before, max(peak, now), now))
    now -= handles.close()
    found.append(ActionMemory(None, now, now + max(stage.update for stage in stages.values()), now))
    return tuple(found)


def part_of(action: Action, stage: StageMemory) -> Kind | None:
    """What of a microbatch an action runs.

    A whole backward has its place in a schedule that splits it: that of the input gradients where the stage's code
    cannot be split, that of the weight gradients in the first stage.
    """
    if action.kind in ("F", "B") or stage.split is not None:
        return action.kind
    return "B" if (action.kind == "I") == stage.whole_backward else None


def _bytes(part: Kind, stage: StageMemory, first: bool) -> tuple[int, int]:
    """Most bytes at once, and those that stay, beyond what was there."""
    work, split = stage.microbatch, stage.split
    if part == "F":
        return work.forward_peak, work.kept
    if part == "B":
        peak = work.first_backward_peak if first else work.backward_peak
        return peak, work.gradients * first + work.returned - work.kept
    assert split is not None
    if part == "I":
        return split.input_peak, split.waiting - work.kept
    peak = split.first_weight_peak if first else split.weight_peak
    return peak, split.gradients * first + split.returned - split.waiting


def _buffers(strategy: Strategy, stages: Mapping[int, StageMemory], number: int, order: Sequence[Action]) -> int:
    """Bytes of what a stage receives and of the gradients that it gets back, for all microbatches."""
    stage, following = stages[number], stages.get(number + 1)
    received = stages[number - 1].microbatch.sent if number - 1 in stages else stage.received
    if following is None:
        return strategy.microbatches * (received + stage.received_gradients)
    back = sum(_returned(following, part_of(action, following)) for action in order if action.stage == number + 1)
    return strategy.microbatches * received + back


def _returned(stage: StageMemory, part: Kind | None) -> int:
    """Bytes of the gradients that a part sends back: a whole backward copies those that something else holds."""
    if part == "B":
        return stage.microbatch.returned
    return stage.split.returned if part == "I" and stage.split is not None else 0


class Handles:
    """What the handles of sends keep alive.

    GPipe and the schedules of several stages keep every handle of a step until its end. 1F1B keeps those of the last
    gradient sent, until the next is, and that of the last forward but one of its warm-up, until its cool-down.
    """

    def __init__(self, strategy: Strategy, stages: Mapping[int, StageMemory]) -> None:
        self._strategy, self._stages = strategy, stages
        self._kept = 0
        self._returned = 0
        self._warm = 0
        self._forwards = self._backwards = 0

    def after(self, stage: int, part: Kind) -> int:
        """Bytes that a part leaves behind, less those it lets go."""
        if self._strategy.stages == 1:
            return 0
        if self._strategy.schedule == "1f1b":
            return self._after_1f1b(stage, part)
        work = self._stages[stage].microbatch
        handed_on, handed_back = stage + 1 in self._stages, stage - 1 in self._stages
        if part == "F":
            return -work.sent if handed_on else 0
        returned = _returned(self._stages[stage], part)
        change = -returned if handed_back else 0
        if part != "I":
            change += work.sent
            self._kept += 0 if handed_on else work.sent
            self._kept += 0 if handed_back else returned
        return change

    def _after_1f1b(self, stage: int, part: Kind) -> int:
        work = self._stages[stage].microbatch
        m, rest = self._strategy.microbatches, self._strategy.stages - stage
        warm_up = min(m, rest)
        if part == "F":
            return 0
        self._backwards += 1
        change = -self._returned
        self._returned = work.returned
        if self._backwards == warm_up - 1 and self._backwards <= m - warm_up + 1:
            self._warm = work.sent
            change += self._warm
        if self._warm and self._backwards == m - warm_up + 2:
            change -= self._warm
            self._warm = 0
        return change

    def close(self) -> int:
        """Bytes that the end of the schedule lets go."""
        return self._kept + self._returned + self._warm
