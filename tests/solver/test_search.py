"""The search finds the optimum, and never claims a bound above it: against brute force on small random problems."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import legal, optimum, value_and_memory
from random_problems import foldable_problem, random_problem

from autopart.solver.bounds import containment_bound, simple_bound
from autopart.solver.down_sets import solve_down_sets
from autopart.solver.magnitudes import ceiling
from autopart.solver.program_search import solve_program
from autopart.solver.score import score
from autopart.solver.search import DEEP, FIRST, NARROWINGS, search, search_any
from autopart.solver.units import MOST, units_in

EXACT = 1e-4


@settings(max_examples=800, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_the_search_finds_the_optimum_and_proves_it(seed):
    problem = random_problem(seed)
    best = optimum(problem)
    answer = search(problem, EXACT, 30.0)
    if math.isinf(best):
        assert answer.assignment is None
        assert answer.bound == math.inf
        return
    assert legal(problem, answer.assignment)
    value, memory, _ = value_and_memory(problem, answer.assignment)
    assert all(m <= limit for m, limit in zip(memory, problem.limits, strict=True))
    assert answer.value == pytest.approx(value, rel=1e-12)
    assert best <= value * (1 + 1e-12) <= best * (1 + 2 * EXACT)
    assert answer.bound <= best * (1 + 1e-9)
    assert answer.stopped_by == "proof"
    assert simple_bound(problem) <= best * (1 + 1e-9)
    assert containment_bound(problem) <= best * (1 + 1e-9)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.sampled_from(["relayed", "direct", "hidden"]))
def test_a_plan_is_worth_what_is_said_where_items_were_folded(seed, travel):
    problem = foldable_problem(seed, travel)
    answer = search(problem, EXACT, 30.0)
    if answer.assignment is not None:
        assert legal(problem, answer.assignment)
        assert answer.value == pytest.approx(value_and_memory(problem, answer.assignment)[0], rel=1e-12)
        assert answer.bound <= optimum(problem) * (1 + 1e-9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=4))
def test_the_best_of_several_problems_is_found_and_proven(seeds):
    problems = [random_problem(seed) for seed in seeds]
    values = [optimum(problem) for problem in problems]
    which, answer = search_any(problems, EXACT, 30.0)
    if math.isinf(min(values)):
        assert answer.assignment is None and answer.bound == math.inf
        return
    value, _, _ = value_and_memory(problems[which], answer.assignment)
    assert legal(problems[which], answer.assignment)
    assert answer.value == pytest.approx(value, rel=1e-12)
    assert min(values) <= value * (1 + 1e-12) <= min(values) * (1 + 2 * EXACT)
    assert answer.bound <= min(values) * (1 + 1e-9) and answer.stopped_by == "proof"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.sampled_from([*FIRST, *NARROWINGS, *DEEP]))
def test_without_any_one_part_the_plan_is_legal_and_the_bound_holds(seed, left_out):
    problem = random_problem(seed)
    answer = search(problem, EXACT, 30.0, without={left_out})
    best = optimum(problem)
    assert answer.bound <= best * (1 + 1e-9)
    if answer.assignment is not None:
        assert legal(problem, answer.assignment)
        assert best <= answer.value * (1 + 1e-12)


@pytest.mark.parametrize("seed", [0, 5, 6, 10, 11, 12, 13, 17])
def test_boundaries_have_a_plan_where_there_was_none(seed):
    problem = random_problem(seed, tight=False, schedule="1f1b")
    plans = {"first plans", "more plans", "down-sets", "integer program", "last of the gap", "recombination"}
    answer = search(problem, EXACT, 30.0, without=plans)
    assert legal(problem, answer.assignment)
    assert answer.value == pytest.approx(value_and_memory(problem, answer.assignment)[0], rel=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_the_two_exact_methods_agree(seed):
    problem = random_problem(seed, schedule="1f1b")
    assignment, bound = solve_down_sets(problem, EXACT)
    program = solve_program(problem, None, ceiling(problem) / 100, 30.0, 10.0, EXACT / 10)
    if assignment is None:
        assert bound == math.inf
        assert program.complete and program.bound == math.inf
        return
    value = score(problem, assignment).step_s
    assert bound * (1 - 1e-12) <= value <= bound * (1 + 2 * EXACT)
    assert program.bound <= value * (1 + 1e-9)
    assert score(problem, program.assignment).step_s == pytest.approx(value, rel=3 * EXACT)


def test_a_problem_solved_twice_gives_the_same_plan():
    problem = random_problem(7, items=8, stages=3, schedule="1f1b", tight=False)
    assert search(problem, EXACT, 30.0) == search(problem, EXACT, 30.0)


def test_an_exhausted_time_limit_is_said_and_the_bound_still_holds():
    problem = random_problem(11, items=8, stages=3, schedule="1f1b", tight=False)
    answer = search(problem, 0.0, 1e-9)
    assert answer.assignment is not None
    assert answer.bound <= optimum(problem) * (1 + 1e-9)


@pytest.fixture
def begun(monkeypatch):
    """The layers that are begun, in turn, among them how many first plans."""
    names = []
    for name, layer in [*FIRST.items(), *DEEP.items()]:

        def counting(*arguments, name=name, layer=layer):
            names.append(name)
            return layer(*arguments)

        monkeypatch.setitem(FIRST if name in FIRST else DEEP, name, counting)
    return names


@pytest.mark.parametrize("past", [{"time_limit_s": 1e-9}, {"time_limit_s": 30.0, "deadline": 0.0}])
def test_nothing_is_begun_after_the_deadline_but_a_first_plan(begun, past):
    problem = random_problem(11, items=8, stages=3, schedule="1f1b", tight=False)
    answer = search(problem, 0.0, **past)
    assert answer.assignment is not None and answer.stopped_by == "time limit"
    assert begun == list(FIRST)


def test_after_the_deadline_one_first_plan_is_enough_for_all_problems(begun):
    problems = [random_problem(seed, items=8, stages=3, schedule="1f1b", tight=False) for seed in range(11, 17)]
    which, answer = search_any(problems, 0.0, 30.0, deadline=0.0)
    assert legal(problems[which], answer.assignment) and answer.stopped_by == "time limit"
    assert begun.count("first plans") == 1 and not {*begun} & {*DEEP}
    assert answer.bound <= min(optimum(problem) for problem in problems) * (1 + 1e-9)


def test_exact_methods_give_up_after_the_deadline():
    problem = random_problem(11, items=8, stages=3, schedule="1f1b", tight=False)
    assert solve_down_sets(problem, EXACT, deadline=0.0) is None
    late = solve_program(problem, None, ceiling(problem) / 100, 0.0, 10.0, EXACT)
    assert (late.assignment, late.bound, late.complete) == (None, 0.0, False)


def test_units_are_summed_exactly():
    rows = np.random.default_rng(0).integers(0, int(MOST), (3, 5000))
    inside = np.random.default_rng(1).random((50, 5000)) < 0.5
    truth = [[sum(int(x) for x in row[flags]) for flags in inside] for row in rows]
    assert units_in(inside, rows).tolist() == truth
