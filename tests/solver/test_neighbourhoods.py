"""Windows of adjacent stages: plans get better, stay legal and fit; two stages are one window, so solved."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import legal, optimum, value_and_memory
from random_problems import random_problem

from autopart.solver.neighbourhoods import improve


def legal_start(problem, seed):
    """A random plan that is legal and fits, or None."""
    rng = random.Random(seed)
    for _ in range(400):
        stage = [rng.randrange(problem.stages)] * problem.items
        for v in range(problem.items):
            stage[v] = max([rng.randrange(problem.stages), *(stage[u] for u in problem.predecessors[v])])
        _, memory, _ = value_and_memory(problem, stage)
        if legal(problem, stage) and all(m <= limit for m, limit in zip(memory, problem.limits, strict=True)):
            return stage
    return None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_a_plan_is_never_worse_and_stays_legal_and_within_its_memory(seed):
    problem = random_problem(seed)
    start = legal_start(problem, seed)
    if start is None:
        return
    found = improve(problem, start, 20.0)
    value, memory, _ = value_and_memory(problem, found)
    assert legal(problem, found)
    assert all(m <= limit for m, limit in zip(memory, problem.limits, strict=True))
    assert value <= value_and_memory(problem, start)[0] * (1 + 1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_two_stages_are_solved(seed):
    problem = random_problem(seed, stages=2, schedule=["1f1b", "gpipe"][seed % 2], tight=False)
    start = legal_start(problem, seed)
    if start is None:
        return
    value = value_and_memory(problem, improve(problem, start, 20.0))[0]
    assert value == pytest.approx(optimum(problem), rel=1e-5)


def test_the_same_start_gives_the_same_plan():
    problem = random_problem(8, items=8, stages=3, schedule="1f1b", tight=False)
    start = legal_start(problem, 1)
    assert improve(problem, start, 5.0) == improve(problem, start, 5.0)
