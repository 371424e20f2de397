"""Plans along potentials are legal and within the limit and the windows; on a chain nothing is missed."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import legal, loads_of_plans, value_and_memory
from random_problems import plain_problem, random_problem

from autopart.solver.beam import plan_along
from autopart.solver.potentials import Potentials
from autopart.solver.problem import Net

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**9)
SHARES = st.sampled_from([1.0, 1.02, 1.2, 2.0])
WIDTHS = st.sampled_from([1, 3, 30])
MOST = 10**7
ROUNDING = 1e-9


@PROPERTY
@given(SEEDS, st.sampled_from(["relayed", "direct"]), SHARES, WIDTHS, st.booleans())
def test_a_plan_is_legal_and_its_loads_are_within_the_limit(seed, travel, share, width, asked):
    problem = _problem(seed, travel)
    limit = share * min(load for _, load in loads_of_plans(problem))
    potentials = Potentials(problem, math.inf, math.inf)
    if asked:  # potentials that were moved, some of them below zero
        potentials.impossible(0.99 * limit, MOST)
    plan = plan_along(potentials, limit, width)
    if plan is not None:
        assert legal(problem, plan)
        assert max(value_and_memory(problem, plan)[2]) <= limit * (1 + ROUNDING)


@PROPERTY
@given(SEEDS, st.sampled_from(["relayed", "direct"]), SHARES, WIDTHS, st.sampled_from([1.01, 1.5, math.inf]))
def test_a_plan_is_within_the_windows(seed, travel, share, width, cap):
    """Those of the cap, and smaller ones from outside that leave at least one plan."""
    rng = random.Random(seed)
    problem = _problem(seed, travel)
    plans = loads_of_plans(problem)
    cap *= min(value_and_memory(problem, plan)[0] for plan, _ in plans)
    potentials = Potentials(problem, cap, math.inf)
    (first, last), (kept, load) = potentials.window, rng.choice(plans)
    narrow = np.array([rng.random() < 0.4 for _ in range(problem.items)])
    first = np.where(narrow, np.maximum(first, kept), first)
    last = np.where(narrow, np.minimum(last, kept), last)
    potentials.window = first, last
    plan = plan_along(potentials, share * load, width)
    if plan is not None:
        assert legal(problem, plan)
        assert all(first[v] <= s <= last[v] for v, s in enumerate(plan))


@PROPERTY
@given(SEEDS, st.sampled_from(["relayed", "direct"]), st.sampled_from([0.3, 0.9, 0.999]), WIDTHS)
def test_there_is_no_plan_below_the_least_largest_load(seed, travel, share, width):
    problem = dataclasses.replace(_problem(seed, travel), idle=True)
    least = min(load for _, load in loads_of_plans(problem))
    assert plan_along(Potentials(problem, math.inf, math.inf), share * least, width) is None


@PROPERTY
@given(SEEDS, SHARES, st.sampled_from([0.0, 0.3]))
def test_a_chain_is_cut_where_it_can_be(seed, share, transfer):
    """Every boundary costs the same and stages may be empty, so the furthest cut is never worse than a nearer one."""
    rng = random.Random(seed)
    items, stages = rng.randint(2, 9), rng.randint(2, 3)
    speed = np.array([[rng.choice([1.0, 1.0, rng.uniform(0.5, 2)])] for _ in range(stages)])
    work = speed * np.array([rng.choice([1.0, rng.uniform(0.1, 3)]) for _ in range(items)])
    problem = _chain(work, transfer)
    limit = share * min(load for _, load in loads_of_plans(problem)) * (1 + ROUNDING)
    plan = plan_along(Potentials(problem, math.inf, math.inf), limit)
    assert legal(problem, plan)
    assert max(value_and_memory(problem, plan)[2]) <= limit * (1 + ROUNDING)


@pytest.mark.parametrize("items, stages, limit", [(2, 2, 2), (4, 3, 3), (6, 3, 6), (6, 4, 3)])
def test_no_stage_is_left_empty_that_must_hold_an_item(items, stages, limit):
    """The limit has room for all items in fewer stages."""
    problem = dataclasses.replace(_chain(np.ones((stages, items)), 0.0), idle=False)
    plan = plan_along(Potentials(problem, math.inf, math.inf), limit)
    assert plan is None or legal(problem, plan)


@pytest.mark.parametrize("limit", [2.0, 4.0, 20.0, 100.0])
def test_more_room_than_is_needed_is_no_obstacle(limit):
    problem = _chain(np.ones((3, 4)), 0.0)
    plan = plan_along(Potentials(problem, math.inf, math.inf), limit)
    assert max(value_and_memory(problem, plan)[2]) <= limit


def test_nothing_is_found_after_the_deadline():
    problem = _chain(np.ones((2, 4)), 0.0)
    assert plan_along(Potentials(problem, math.inf, math.inf), 2.0) == (0, 0, 1, 1)
    late = Potentials(problem, math.inf, math.inf)
    late.deadline = -math.inf
    assert plan_along(late, 2.0) is None


def _problem(seed, travel):
    """A random problem whose loads a sweep knows exactly: no net flows backward, no state has two users."""
    rng = random.Random(seed)
    stages = rng.choice([2, 3, 4])
    items = rng.randint(stages, 7 if stages < 4 else 6)
    problem = random_problem(seed, items, stages, tight=False, schedule="1f1b", travel=travel)
    forward = [n for n, net in enumerate(problem.nets) if not net.backward]
    tables = {k: getattr(problem, k)[:, forward] for k in ("transfer", "send", "receive", "touch")}
    return dataclasses.replace(
        problem,
        nets=tuple(problem.nets[n] for n in forward),
        users=tuple(users[:1] for users in problem.users),
        repeat=max(problem.repeat, 1.0),
        **tables,
    )


def _chain(work, transfer):
    """A chain of items, with nothing but work and what each boundary costs."""
    stages, items = work.shape
    problem = plain_problem([Net(v, (v + 1,)) for v in range(items - 1)], items, stages)
    return dataclasses.replace(problem, work=work, fill=work, transfer=problem.transfer + transfer, idle=True)
