"""Nets that may have pins on both sides of a stage: how they are counted where it is not known that they have not.

A net costs a stage c where it is torn there: a pin in the stage, another not. Counted at down-sets alone, c before and
after, it would be c or 2c too much for a stage that it passes. Of a passing net two pins count, the first and the
last, and one of them pays: `Segment.seen_from` has the formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopart.solver.problem import Floats, Problem
from autopart.solver.units import Integers, Span, span


@dataclass(frozen=True)
class Payer:
    """How a net is counted at a stage that may have its pins on both sides.

    Attributes:
        first, last: The two pins that count, the first before the last.
        sign: +1 if the first pays, -1 if the last.
        group: With sign +1 the first and other pins behind it, with -1 the last and others before it, such that no
            stage has pins of the group on both sides: a stage that holds one of them pays too.
    """

    first: int
    last: int
    sign: int
    group: Span | None = None


def payer(problem: Problem, pins: Span, stage: int, work_before: Integers, middle: Floats) -> Payer:
    """How to count a net that may pass the stage, with all its pins in the group that may be.

    Args:
        work_before: Work of all that comes before an item; the last pin is the one with the most.
        middle: Likely stage of each item: the likelier of the two pins pays.
    """
    first = pins.first[0]
    behind = [v for v in pins.pins if problem.descendants[first] >> v & 1]
    reached = [v for v in pins.last if v in behind]
    if not reached:
        return Payer(first, first, 0)
    last = max(reached, key=lambda v: int(work_before[v]))
    if stage < (middle[first] + middle[last]) / 2:
        return Payer(first, last, 1, _group(problem, {*behind} - {last}))
    before = {v for v in pins.pins if problem.ancestors[last] >> v & 1}
    return Payer(first, last, -1, _group(problem, before - {first}))


def fewer(problem: Problem, known: Payer, first: int, last: int) -> Payer:
    """The same with a smaller group, when a stage may have these two of the group's pins on its two sides."""
    pins = set(known.group.pins if known.group else ())
    pins.discard(last if known.sign > 0 else first)
    return replace(known, group=_group(problem, pins))


def _group(problem: Problem, pins: set[int]) -> Span | None:
    return span(problem, tuple(sorted(pins))) if len(pins) > 1 else None
