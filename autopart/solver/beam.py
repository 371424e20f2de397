"""Plans along potentials: stage by stage the richest ones behind each of the best beginnings, a beam search.

What a beginning of so many stages is worth is the potential of its boundary, the same measure for all of them
(`potentials`), so the best few are kept at every boundary (Lowerre, 1976).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver.potentials import Potentials, labels_within
from autopart.solver.richest_stage import FORBIDDEN, Richest, any_rich
from autopart.solver.sweep import AFTER, BEFORE, IN

# Beginnings that are kept, and stages that are tried behind each.
WIDTH, BRANCHES = 30, 8
# How far below what the relaxation says stages are looked for; worth that may be neglected.
BELOW, BLUR = tuple(0.02 * 2.5**i for i in range(10)), 1e-4


@dataclass(frozen=True, eq=False)
class _Beginning:
    """A down-set, its potential, its last stage's labels, and which beginning that was put behind."""

    inside: NDArray[np.bool_]
    potential: float
    labels: NDArray[np.int8]
    parent: int


def plan_along(potentials: Potentials, limit: float, width: int = WIDTH) -> tuple[int, ...] | None:
    """A plan within the windows whose loads are within the limit, in seconds, if the beam finds one.

    None, too, if the potentials' work is spent.
    """
    problem, table = potentials.problem, potentials.centre
    nothing = np.zeros(problem.items, dtype=bool)
    beam = [_Beginning(nothing, 0.0, np.zeros(problem.items, np.int8), 0)]
    beams = []
    for stage in range(problem.stages):

        def behind(beginning: _Beginning, stage: int = stage) -> Richest:
            return _behind(potentials, beginning.inside, table[stage + 1], stage, limit)

        with ThreadPoolExecutor() as threads:
            found = list(threads.map(behind, beam))
        potentials.work += sum(stages.work for stages in found)
        if potentials.spent():
            return None
        new: dict[bytes, _Beginning] = {}
        for parent, stages in enumerate(found):
            for labels in stages.stages:
                if not problem.idle and not (labels == IN).any():
                    continue
                inside = labels <= IN
                after = _Beginning(inside, float(table[stage + 1][inside].sum()), labels, parent)
                new.setdefault(inside.tobytes(), after)
        if not new:
            return None
        beam = sorted(new.values(), key=lambda beginning: -beginning.potential)[:width]
        beams.append(beam)
    assignment = np.zeros(problem.items, dtype=int)
    chosen = 0
    for stage in reversed(range(problem.stages)):
        assignment[beams[stage][chosen].labels == IN] = stage
        chosen = beams[stage][chosen].parent
    return tuple(assignment.tolist())


def _behind(
    potentials: Potentials, inside: NDArray[np.bool_], potential: NDArray[np.float64], stage: int, limit: float
) -> Richest:
    """Rich stages behind a boundary: of all stages within the limit, or nearly all, the ones that get farthest."""
    problem = potentials.problem
    worth = np.full((problem.items, 3), FORBIDDEN)
    worth[inside, BEFORE] = 0.0
    worth[~inside, IN] = potential[~inside]
    worth[~inside, AFTER] = 0.0
    worth[~labels_within(potentials.window, stage)] = FORBIDDEN
    return any_rich(potentials.sweeps[stage], worth, limit, potentials.price, BLUR, BRANCHES, BELOW)
