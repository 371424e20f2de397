"""What the integer program counts in depends on how large things can be: steps, bytes, and levels of workspace."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autopart.solver.problem import Floats, Problem

# A cap or a limit of less than this share of what all items take together is counted as that: integers end at 10^18.
LEAST_SHARE = 1e-6
WORKSPACE_LEVELS = 12


def ceiling(problem: Problem) -> float:
    """No step takes longer: everything on one process at its slowest, every net crossing everywhere."""
    relayed, touched = float(problem.transfer.sum()), float(problem.touch.sum())
    work = problem.repeat * (float(problem.work.max(axis=0).sum()) + 2 * relayed + touched)
    fill = problem.fill_weight * (float(problem.fill.max(axis=0).sum()) + relayed)
    if problem.blocks is not None:
        work += (problem.repeat + problem.fill_weight) * float(problem.blocks.again.sum())
    return work + fill + float(problem.update.sum() + problem.sync.sum())


def most_bytes(problem: Problem) -> float:
    """No process holds more than this for each of its stages."""
    tables = (problem.saved.max(axis=0), problem.workspace, problem.state_bytes, problem.send, problem.receive)
    return float(sum(table.sum() for table in tables))


def workspace_levels(workspace: Floats) -> list[tuple[float, float]]:
    """(level, rise above the level below): the largest distinct workspaces, what lies between rounded down."""
    distinct = sorted({float(w) for w in workspace if w > 0})
    if len(distinct) > WORKSPACE_LEVELS:
        picks = np.linspace(0, len(distinct) - 1, WORKSPACE_LEVELS).astype(int)
        distinct = [distinct[i] for i in picks]
    return [(level, level - below) for below, level in pairwise([0.0, *distinct])]
