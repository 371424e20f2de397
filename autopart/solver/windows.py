"""Which stages an item may be in when the step time is to stay below a cap; and uniting those that have one choice.

The items before v (v included) fit into stages 0..s only if their work, each at its fastest, is at most what the
processes of those stages can do within the load that the cap allows; so do those after v into s..K-1. Under a cap close
to the optimum most items of a deep model have one stage left. What has to share a stage may be one item, and what is
left to decide grows with what lies near the boundaries, not with the depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopart.solver.problem import Floats, Problem, membership
from autopart.solver.reductions import condense

ROUNDING = 1e-9


def windows(problem: Problem, cap: float) -> tuple[list[int], list[int]]:
    """Earliest and latest stage of each item in any assignment whose step time is at most `cap`."""
    load = (cap - problem.least_fill) * (1 + ROUNDING)
    work = problem.repeat * problem.work.min(axis=0)
    stages = range(problem.stages)
    room_first = load * np.array([len({problem.process[t] for t in range(s + 1)}) for s in stages])
    room_last = load * np.array([len({problem.process[t] for t in range(s, problem.stages)}) for s in stages])
    # Room before a boundary grows from stage to stage, room after it shrinks.
    earliest = np.searchsorted(room_first, _work_of(problem.ancestors, work), side="left")
    latest = np.searchsorted(-room_last, -_work_of(problem.descendants, work), side="right") - 1
    return earliest.tolist(), latest.tolist()


def passing(problem: Problem, cap: float) -> float:
    """The share of the nets that have room for a stage between producer and a reader."""
    earliest, latest = windows(problem, cap)
    can = [max((latest[r] for r in net.readers), default=0) > earliest[net.producer] + 1 for net in problem.nets]
    return float(np.mean(can)) if can else 0.0


def unite_fixed(problem: Problem, cap: float) -> tuple[Problem, list[int], list[int]]:
    """The problem with the items of one possible stage united: its assignments below the cap are the same.

    Returns:
        The smaller problem, for each old item the new one, and for each new item an old one.
    """
    earliest, latest = windows(problem, cap)
    groups: dict[int, list[int]] = {}
    for item, (first, last) in enumerate(zip(earliest, latest, strict=True)):
        if first == last:
            groups.setdefault(first, []).append(item)
    smaller, new = condense(problem, groups.values())
    old = dict(zip(new, range(problem.items), strict=True))
    return smaller, new, [old[item] for item in range(smaller.items)]


def _work_of(sets: Sequence[int], work: Floats) -> Floats:
    """The work in each bit set of items.

    In a deep graph nearly all of the items before an item are the first ones without a gap, and of those after it the
    last ones: only what lies between is looked at one by one.
    """
    before = np.concatenate([[0.0], np.cumsum(work)])
    everything = (1 << len(work)) - 1
    found = np.empty(len(sets))
    for i, bits in enumerate(sets):
        low = (~bits & (bits + 1)).bit_length() - 1
        high = (everything ^ bits).bit_length()
        if low >= high:
            found[i] = before[-1]
            continue
        between = (bits >> low) & ((1 << (high - low)) - 1)
        skipped = (between & -between).bit_length() - 1 if between else 0
        between >>= skipped
        first = low + skipped
        length = between.bit_length()
        inside = membership([between], max(length, 1))[0]
        found[i] = before[low] + before[-1] - before[high] + inside[:length] @ work[first : first + length]
    return found
