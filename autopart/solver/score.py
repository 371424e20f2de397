"""What an assignment costs, from the assignment alone, in floats: every plan and baseline is valued here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats, Problem
from autopart.solver.recomputation import choose_recomputed


@dataclass(frozen=True, eq=False)
class Score:
    """The value of one assignment.

    Attributes:
        step_s: The objective.
        loads_s: Load of each process.
        work_s: Seconds each stage computes for one microbatch.
        transfer_s: Seconds each boundary is busy for one microbatch.
        memory: Bytes of each process; `stage_memory` splits it by stage, workspace included.
        recomputed: Whether a stage computes a block again, (stages, blocks); `again_s` the seconds that adds to it.
        held: Whether a stage holds a state, (stages, states).
        crossing: Whether a net crosses a boundary, (stages - 1, nets).
    """

    step_s: float
    loads_s: Floats
    work_s: Floats
    transfer_s: Floats
    memory: Floats
    stage_memory: Floats
    recomputed: NDArray[np.bool_]
    again_s: Floats
    held: NDArray[np.bool_]
    crossing: NDArray[np.bool_]

    def fits(self, problem: Problem) -> bool:
        return bool((self.memory <= problem.limits).all())


def score(problem: Problem, assignment: Sequence[int]) -> Score:
    """Value an assignment (item -> stage) that respects the nets."""
    stage = np.asarray(assignment, dtype=np.int64)
    stages, items = problem.stages, np.arange(problem.items)
    crossing = np.zeros((stages - 1, len(problem.nets)), dtype=bool)
    torn = np.zeros((stages, len(problem.nets)), dtype=bool)
    for n, net in enumerate(problem.nets):
        touched = {int(stage[net.producer]), *(int(stage[r]) for r in net.readers)}
        torn[list(touched), n] = len(touched) > 1
        last = stages - 1 if net.to_end else max(touched)
        if not net.backward:
            crossing[int(stage[net.producer]) : last, n] = True
    held = np.zeros((stages, len(problem.users)), dtype=bool)
    for r, users in enumerate(problem.users):
        held[stage[list(users)], r] = True

    kept = np.bincount(stage, weights=problem.saved[stage, items], minlength=stages) + held @ problem.state_bytes
    kept[:-1] += (problem.send * crossing).sum(axis=1)
    kept[1:] += (problem.receive * crossing).sum(axis=1)
    largest = np.zeros(stages)
    np.maximum.at(largest, stage, problem.workspace)
    recomputed, again, peak = np.zeros((stages, 0), dtype=bool), np.zeros(stages), np.zeros(stages)
    if problem.blocks is not None:
        recomputed = choose_recomputed(problem, stage, kept, largest)
        again = (problem.blocks.again * recomputed).sum(axis=1)
        kept -= (problem.blocks.spared * recomputed).sum(axis=1)
        peak = (problem.blocks.peak * recomputed).max(axis=1, initial=0.0)

    work: Floats = np.bincount(stage, weights=problem.work[stage, items], minlength=stages) + again
    transfer = (problem.transfer * crossing).sum(axis=1)
    received, sent = np.concatenate([[0.0], transfer]), np.concatenate([transfer, [0.0]])
    if problem.hidden:
        busy = np.maximum(work, np.maximum(received, sent))
    else:
        busy = work + received + sent + (problem.touch * torn).sum(axis=1)
    shared = held & (held.sum(axis=0) > 1)
    once = (problem.update * held).sum(axis=1) + (problem.sync * shared).sum(axis=1)
    fill = problem.fill[stage, items].sum() + transfer.sum() + again.sum()

    loads, memory = np.zeros(problem.processes), np.zeros(problem.processes)
    for p, own in enumerate(problem.stages_of_process):
        loads[p] = sum(problem.repeat * busy[s] + once[s] for s in own)
        for part in (largest, peak):
            memory[p] += max((part[s] for s in own), default=0.0)
        memory[p] += sum(kept[s] for s in own)
    step = problem.fill_weight * fill + loads.max()
    own_memory = kept + largest + peak
    return Score(float(step), loads, work, transfer, memory, own_memory, recomputed, again, held, crossing)
