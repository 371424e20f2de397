"""Programs count in integers: whatever the sizes of a problem's numbers, bounds hold and plans are found."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import optimum
from random_problems import random_problem

from autopart.solver.boundaries import solve_boundaries
from autopart.solver.magnitudes import ceiling
from autopart.solver.program_search import solve_program

EXACT = 1e-4
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
FEW = settings(PROPERTY, max_examples=15)


def _scaled(problem, seconds, size):
    """Other units of time and memory."""
    times = {name: getattr(problem, name) * seconds for name in ("work", "fill", "transfer", "touch", "update", "sync")}
    names = ("saved", "workspace", "send", "receive", "state_bytes", "limits")
    return dataclasses.replace(problem, **times, **{name: getattr(problem, name) * size for name in names})


def _program(problem):
    return solve_program(problem, None, ceiling(problem) / 100, 30.0, 10.0, EXACT / 10)


@PROPERTY
@given(st.integers(0, 10**9), st.sampled_from([1e-9, 1.0, 1e9]), st.sampled_from([1.0, 1e12]))
def test_units_do_not_matter(seed, seconds, size):
    problem = random_problem(seed)
    best, found = optimum(problem), _program(_scaled(problem, seconds, size))
    assert found.complete
    assert found.bound <= best * seconds * (1 + 1e-9)
    assert math.isinf(best) or found.bound == pytest.approx(best * seconds, rel=3 * EXACT)


@PROPERTY
@given(st.integers(0, 10**9), st.sampled_from(["1f1b", "zbv"]))
def test_latency_alone_has_a_program(seed, schedule):
    problem = _scaled(random_problem(seed, schedule=schedule), 1e6, 1.0)
    once = {name: np.zeros_like(getattr(problem, name)) for name in ("update", "sync")}
    problem = dataclasses.replace(problem, **once, repeat=0.0, fill_weight=1.0)
    best, found = optimum(problem), _program(problem)
    assert found.bound == pytest.approx(best, rel=3 * EXACT)


@FEW
@given(st.integers(0, 10**9), st.sampled_from(["1f1b", "zbv"]))
def test_a_device_without_memory_may_stay_empty_if_stages_may(seed, schedule):
    problem = _scaled(random_problem(seed, tight=False, schedule=schedule), 1.0, 1e12)
    limits = np.where(np.arange(problem.processes) == 0, 0.0, math.inf)
    problem = dataclasses.replace(problem, limits=limits, idle=True)
    best, found = optimum(problem), _program(problem)
    assert found.bound == pytest.approx(best, rel=3 * EXACT)
    by_boundary = solve_boundaries(problem, EXACT, None, 0.0, 5.0, math.inf)
    assert by_boundary is None or by_boundary[1] <= best * (1 + 1e-9)


@FEW
@given(st.integers(0, 10**9))
def test_a_device_that_is_a_million_million_times_slower_is_left_empty(seed):
    problem = random_problem(seed, tight=False, schedule="1f1b")
    slow = np.where(np.arange(problem.stages) == 1, 1e12, 1.0)[:, None]
    problem = dataclasses.replace(problem, work=problem.work * slow, fill=problem.fill * slow, idle=True)
    best, cap = optimum(problem), 1.01 * optimum(problem)
    found = solve_program(problem, cap, cap, 30.0, 10.0, EXACT / 10)
    assert found.complete and found.bound <= best * (1 + 1e-9)
    by_boundary = solve_boundaries(problem, EXACT, None, 0.0, 5.0, math.inf)
    assert by_boundary is None or by_boundary[1] <= best * (1 + 1e-9)
