"""Which blocks backward computes again: in the least time that frees enough bytes, which is a knapsack problem.

Of blocks with equal seconds and bytes, which a model has many of, only the number matters. So classes of equal blocks
are merged one after the other, best ratio of seconds to bytes first; of the numbers chosen so far only those remain
that no other beats in both, and that could still beat the greedy choice (Nemhauser and Ullmann, 1969).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats, Problem

# Room for roundings, relative to the sums compared.
ROUNDING = 1e-9


def choose_recomputed(problem: Problem, stage: NDArray[np.int64], kept: Floats, largest: Floats) -> NDArray[np.bool_]:
    """Whether each stage computes a block again, (stages, blocks): what takes least time on its process and fits.

    Nothing is computed again on a process that fits without, or that does not fit with all.

    Args:
        stage: Of each item.
        kept, largest: Bytes that each stage keeps, and its largest workspace, where nothing is computed again.
    """
    blocks = problem.blocks
    assert blocks is not None
    chosen = np.zeros(blocks.again.shape, dtype=bool)
    homes = [stage[list(items)] for items in blocks.items]
    whole = [(int(home[0]), b) for b, home in enumerate(homes) if (home == home[0]).all()]
    for p, own in enumerate(problem.stages_of_process):
        excess = sum(kept[s] for s in own) + max((largest[s] for s in own), default=0.0) - problem.limits[p]
        if excess <= 0:
            continue
        places = [(s, b) for s, b in whole if s in own and blocks.spared[s, b] > 0]
        rows, columns = [s for s, _ in places], [b for _, b in places]
        again, spared = blocks.again[rows, columns], blocks.spared[rows, columns]
        pick = least_added(again, spared, blocks.peak[columns], excess)
        if pick is not None:
            chosen[np.array(rows)[pick], np.array(columns)[pick]] = True
    return chosen


def least_added(again: Floats, spared: Floats, peak: Floats, excess: float) -> NDArray[np.int64] | None:
    """The blocks that take least time in all and whose spared bytes, less the largest peak, are at least `excess`.

    Args:
        again, spared, peak: Of each block, (blocks,).

    Returns:
        Indices of blocks; None where all of them are not enough.
    """
    best, value = None, np.inf
    for level in np.unique(peak):
        allowed = np.flatnonzero(peak <= level)
        pick = cover(again[allowed], spared[allowed], excess + level)
        if pick is not None and again[allowed[pick]].sum() < value:
            best, value = allowed[pick], float(again[allowed[pick]].sum())
    return best


def cover(seconds: Floats, size: Floats, need: float) -> NDArray[np.int64] | None:
    """The entries whose sizes sum to at least `need` in the least seconds; None where all of them do not."""
    if size.sum() < need:
        return None
    order = np.lexsort((-size, seconds / size))
    kinds, kind_of, count = np.unique(
        np.stack([seconds[order], size[order]]), axis=1, return_inverse=True, return_counts=True
    )
    first = [int(np.flatnonzero(kind_of == k)[0]) for k in range(len(count))]
    rank = np.argsort(first)  # kinds by their ratio
    reached = size[order].cumsum().searchsorted(need * (1 - ROUNDING) if need > 0 else need)
    limit = float(seconds[order][: reached + 1].sum()) * (1 + ROUNDING)

    time, got = np.zeros(1), np.zeros(1)
    trail: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for at, k in enumerate(rank):
        rest = float((kinds[1] * count)[rank[at + 1 :]].sum())
        ratio = kinds[0, rank[at + 1]] / kinds[1, rank[at + 1]] if at + 1 < len(rank) else np.inf
        number = np.arange(count[k] + 1)
        parent = np.repeat(np.arange(len(time)), len(number))
        taken = np.tile(number, len(time))
        next_time, next_got = time[parent] + taken * kinds[0, k], got[parent] + taken * kinds[1, k]
        missing = np.maximum(0.0, need - next_got)
        to_come = np.where(missing > 0, missing * (ratio if np.isfinite(ratio) else 0.0), 0.0)
        open_ = np.flatnonzero((missing <= rest) & (next_time + to_come <= limit))
        open_ = open_[np.lexsort((-next_got[open_], next_time[open_]))]
        enough = np.minimum(next_got[open_], need)
        most_before = np.concatenate([[-np.inf], np.maximum.accumulate(enough)[:-1]])
        open_ = open_[enough > most_before]
        time, got = next_time[open_], next_got[open_]
        trail.append((parent[open_], taken[open_]))
    if not len(time):
        return order[: reached + 1]
    state, pick = int(np.flatnonzero(got >= need)[0]), []
    for k, (parents, numbers) in zip(rank[::-1], reversed(trail), strict=True):
        pick += list(order[np.flatnonzero(kind_of == k)[: numbers[state]]])
        state = int(parents[state])
    return np.array(pick, dtype=np.int64)
