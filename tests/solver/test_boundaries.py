"""One boundary at a time: no limit that a plan meets is called impossible, and bounds hold, against brute force."""

import dataclasses
import itertools
import math
import random
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import legal, optimum, value_and_memory
from random_problems import random_problem

from autopart.solver.boundaries import solve_boundaries
from autopart.solver.filling import least_filling
from autopart.solver.frontiers import Frontiers
from autopart.solver.problem import Net
from autopart.solver.segment import Boundary, Segment
from autopart.solver.units import RESOLUTION

SCHEDULES = ["1f1b", "gpipe"]


def problem_with_skips(seed, tight=False):
    """Up to nine items, most values read far behind their producer and sent directly to each reader's stage."""
    rng = random.Random(seed)
    stages = rng.choice([3, 3, 4])
    items = rng.randint(5, 9 if stages == 3 else 7)
    problem = random_problem(seed, items, stages, tight, rng.choice(SCHEDULES), "direct")
    nets = []
    for v in range(items - 1):
        readers = {v + 1} if rng.random() < 0.6 else set()
        readers |= {r for r in range(v + 2, items) if rng.random() < 0.35}
        if readers:
            nets.append(Net(v, tuple(sorted(readers))))
        if v and rng.random() < 0.2:
            nets.append(Net(v, (rng.randrange(v),), backward=True))
    seconds = np.array([rng.choice([0.1, 0.3, 1.0]) * rng.random() for _ in nets])
    nothing = np.zeros((stages - 1, len(nets)))
    touch = np.tile(seconds, (stages, 1))
    return dataclasses.replace(
        problem, nets=tuple(nets), touch=touch, transfer=nothing, send=nothing, receive=nothing, repeat=3.0
    )


def plans(problem):
    """(largest load, step time) of every legal plan that fits."""
    for stage in itertools.product(range(problem.stages), repeat=problem.items):
        if legal(problem, stage):
            value, memory, loads = value_and_memory(problem, stage)
            if all(m <= limit for m, limit in zip(memory, problem.limits, strict=True)):
                yield max(loads), value


def check_limits(problem, exact):
    found = sorted(plans(problem))
    if not found or found[0][0] <= 0:
        return
    least = found[0][0]
    frontiers = Frontiers(problem, least)
    frontiers.exact = exact
    fill = problem.fill_weight * problem.fill.min(axis=0).sum()
    for slack in (0.0, 0.03, 0.3):
        limit = math.ceil(RESOLUTION * (1 + slack) * (1 + 1e-9)) + 1
        missing = frontiers.missing(limit)
        assert missing is not None and missing <= 0
        filling = least_filling(frontiers, limit) * frontiers.units.second
        within = [value - load - fill for load, value in found if load <= least * (1 + slack)]
        assert filling <= min(within) + 1e-6 * least


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.booleans(), st.booleans())
def test_no_limit_that_a_plan_with_skips_meets_is_called_impossible(seed, tight, exact):
    check_limits(problem_with_skips(seed, tight), exact)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.sampled_from(["relayed", "direct", "hidden"]), st.booleans(), st.booleans())
def test_no_limit_that_a_plan_meets_is_called_impossible(seed, travel, tight, exact):
    schedule = SCHEDULES[seed % 2]
    check_limits(random_problem(seed, schedule=schedule, travel=travel, tight=tight, items=seed % 3 + 4), exact)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_bounds_hold_and_plans_are_legal_and_fit(seed):
    problem = random_problem(seed, schedule=SCHEDULES[seed % 2]) if seed % 3 else problem_with_skips(seed)
    answer = solve_boundaries(problem, 1e-4, None, 0.0, 20.0, time.monotonic() + 60)
    if answer is None:
        return
    assignment, bound = answer
    best = optimum(problem)
    assert bound <= best * (1 + 1e-9)
    if assignment is not None:
        value, memory, _ = value_and_memory(problem, assignment)
        assert legal(problem, assignment)
        assert all(m <= limit for m, limit in zip(memory, problem.limits, strict=True))
        assert value >= best * (1 - 1e-9)


def test_a_program_that_is_stopped_at_once_bounds_nothing_falsely():
    problem = random_problem(0, items=9, stages=3, schedule="gpipe", travel="relayed", tight=False)
    frontiers = Frontiers(problem, 1.0)
    everything = np.ones(problem.items, dtype=bool)
    segment = Segment(frontiers.units, 1, [Boundary(~everything, everything)])
    value = segment.work(1, 0)
    segment.model.add(value <= int(frontiers.units.due[0].sum()) - 1)
    exact = frontiers.maximum(segment, value)
    assert 0 < exact <= frontiers.maximum(segment, value, work=0.0)


def test_a_chain_is_solved_to_the_proof():
    problem = random_problem(5, items=8, stages=3, schedule="gpipe", travel="relayed", tight=False)
    chain = tuple(Net(v, (v + 1,)) for v in range(7))
    work = np.tile(np.array([3.0, 1.0, 2.0, 2.0, 1.0, 4.0, 1.0, 2.0]), (3, 1))
    nothing, sent = np.zeros((2, 7)), np.full((2, 7), 0.25)
    problem = dataclasses.replace(
        problem, work=work, nets=chain, transfer=sent, send=nothing, receive=nothing, touch=np.zeros((3, 7)),
        users=(), state_bytes=np.zeros(0), update=np.zeros((3, 0)), sync=np.zeros((3, 0)), repeat=1.0, fill_weight=0.0
    )  # fmt: skip
    assignment, bound = solve_boundaries(problem, 1e-3, None, 0.0, 20.0, time.monotonic() + 60)
    value = value_and_memory(problem, assignment)[0]
    assert value == optimum(problem)
    assert bound >= value * (1 - 1e-3)


def test_the_same_problem_gives_the_same_answer():
    problem = problem_with_skips(11)
    answers = [solve_boundaries(problem, 1e-4, None, 0.0, 20.0, time.monotonic() + 60) for _ in range(2)]
    assert answers[0] == answers[1]


def test_stages_that_share_a_process_are_not_its_task():
    assert solve_boundaries(random_problem(3, schedule="zbv"), 1e-3, None, 0.0, 1.0, math.inf) is None
