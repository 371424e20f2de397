"""Recombined plans are legal, fit, are never worse than the plan to begin with, and are best on small graphs."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import legal, optimum, value_and_memory
from random_problems import random_problem

from autopart.solver.prefixes import cut_order
from autopart.solver.recombination import recombined
from autopart.solver.score import score


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_plans_are_legal_and_fit_and_no_worse_than_the_first(seed):
    problem = random_problem(seed)
    plans = [a for a in cut_order(problem, list(range(problem.items))) if score(problem, a).fits(problem)]
    start = max(plans, key=lambda a: score(problem, a).step_s) if plans else None
    found = recombined(problem, start, 0.0, math.inf)
    if found is None:
        assert start is None
        return
    value, memory, _ = value_and_memory(problem, found)
    assert legal(problem, found)
    assert all(m <= limit for m, limit in zip(memory, problem.limits, strict=True))
    assert optimum(problem) * (1 - 1e-9) <= value
    assert start is None or value <= value_and_memory(problem, start)[0] * (1 + 1e-9)


def test_almost_all_small_graphs_are_solved():
    solved = 0
    for seed in range(30):
        problem = random_problem(seed, schedule="1f1b", tight=False)
        value = value_and_memory(problem, recombined(problem, None, 0.0, math.inf))[0]
        solved += value <= optimum(problem) * (1 + 1e-5)
    assert solved >= 28


def test_the_same_problem_gives_the_same_plan():
    problem = random_problem(8, items=8, stages=3, schedule="1f1b", tight=False)
    assert recombined(problem, None, 0.0, math.inf) == recombined(problem, None, 0.0, math.inf)
