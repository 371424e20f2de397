"""A limit is excluded where no assignment keeps it, and only there, against every assignment."""

import dataclasses
import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import legal, loads_of_plans, value_and_memory
from random_problems import random_problem

from autopart.solver.branching import Branching
from autopart.solver.potentials import Potentials

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**9)
TRAVEL = st.sampled_from(["relayed", "direct", "both"])
ENOUGH = st.sampled_from([1.0, 1.0 + 1e-6, 1.05, 1.5])
TOO_LOW = st.sampled_from([0.999, 0.97, 0.8])


@PROPERTY
@given(SEEDS, TRAVEL, ENOUGH)
def test_no_limit_that_a_plan_keeps_is_excluded(seed, travel, share):
    problem = _problem(seed, travel)
    least = min(load for _, load in loads_of_plans(problem))
    excluded, _ = _excluded(problem, least * share)
    assert not excluded


@PROPERTY
@given(SEEDS, TRAVEL, st.sampled_from([1.02, 1.3]), st.sampled_from([1.0, 1.1]))
def test_no_limit_that_a_plan_below_the_cap_keeps_is_excluded(seed, travel, cap, share):
    problem = _problem(seed, travel)
    plans = loads_of_plans(problem)
    steps = [value_and_memory(problem, plan)[0] for plan, _ in plans]
    cap *= min(steps)
    least = min(load for (_, load), step in zip(plans, steps, strict=True) if step <= cap)
    excluded, _ = _excluded(problem, least * share, cap)
    assert not excluded


@PROPERTY
@given(SEEDS, TRAVEL, TOO_LOW)
def test_a_limit_that_no_plan_keeps_is_excluded(seed, travel, share):
    """Where the sweeps know all of a load, and stages may be empty."""
    problem = _known(_problem(seed, travel), idle=True)
    least = min(load for _, load in loads_of_plans(problem))
    excluded, accepted = _excluded(problem, least * share)
    assert excluded and not accepted


@PROPERTY
@given(SEEDS, TRAVEL, TOO_LOW)
def test_otherwise_a_plan_says_why_it_is_not(seed, travel, share):
    """What the sweeps leave out of a load may make a plan look possible: that plan is offered."""
    problem = dataclasses.replace(_problem(seed, travel), idle=True)
    least = min(load for _, load in loads_of_plans(problem))
    excluded, accepted = _excluded(problem, least * share)
    assert excluded != bool(accepted)
    assert all(legal(problem, plan) for plan in accepted)


@PROPERTY
@given(SEEDS, TRAVEL, ENOUGH, st.booleans())
def test_what_is_accepted_is_one_plan_within_the_limit(seed, travel, share, idle):
    problem = _known(_problem(seed, travel), idle)
    limit = share * min(load for _, load in loads_of_plans(problem))
    _, accepted = _excluded(problem, limit)
    assert len(accepted) <= 1
    for plan in accepted:
        assert legal(problem, plan)
        assert max(value_and_memory(problem, plan)[2]) <= limit * (1 + 1e-9)


@PROPERTY
@given(SEEDS, TRAVEL)
def test_with_room_to_spare_a_plan_is_found(seed, travel):
    problem = _known(_problem(seed, travel), idle=True)
    excluded, accepted = _excluded(problem, 1.02 * min(load for _, load in loads_of_plans(problem)))
    assert not excluded and accepted


@PROPERTY
@given(SEEDS, st.sampled_from([0.97, 0.999, 1.0, 1.2]))
def test_items_without_work_are_decided_too(seed, share):
    """Only such items may be left open: then any of those is decided, and it ends."""
    rng = random.Random(seed)
    problem = _known(_problem(seed, "relayed"), idle=True)
    light = np.array([rng.random() < 0.6 for _ in range(problem.items)])
    free = np.array([light[net.producer] or rng.random() < 0.5 for net in problem.nets], dtype=bool)
    problem = dataclasses.replace(
        problem, work=np.where(light, 0.0, problem.work), transfer=np.where(free, 0.0, problem.transfer)
    )
    least = min(load for _, load in loads_of_plans(problem))
    excluded, _ = _excluded(problem, share * least)
    if share >= 1.0 or least == 0.0:
        assert not excluded
    else:
        assert excluded


@settings(PROPERTY, max_examples=20)
@given(SEEDS, TRAVEL, st.sampled_from([0.5, 0.97, 1.0]))
def test_nothing_is_excluded_by_giving_up(seed, travel, share):
    problem = _problem(seed, travel)
    limit = share * min(load for _, load in loads_of_plans(problem))
    late = Potentials(problem, math.inf, math.inf)
    late.deadline = -math.inf
    # What needs no search may be shown at any time: no stage has room even for the least.
    if not late.impossible(limit, math.inf):
        assert not Branching(late, lambda plan: None).excluded(limit)


@PROPERTY
@given(SEEDS, TRAVEL, st.lists(st.sampled_from([0.8, 0.95, 0.999, 1.0 + 1e-6, 1.05]), min_size=2, max_size=5))
def test_limits_may_be_asked_for_one_after_the_other(seed, travel, shares):
    """In any order; what one limit made of the plans is still all of them, each once, and bounds them."""
    problem = _known(_problem(seed, travel), idle=True)
    plans = loads_of_plans(problem)
    least = min(load for _, load in plans)
    accepted = []
    branching = Branching(Potentials(problem, math.inf, math.inf), accepted.append)
    for share in shares:
        accepted.clear()
        excluded = branching.excluded(share * least)
        assert excluded == (share < 1.0)
        assert excluded != bool(accepted)
        for plan, load in plans:
            (part,) = [part for part in branching.parts if _within(part.window, plan)]
            assert load >= part.bound * (1 - 1e-9)


@settings(PROPERTY, max_examples=20)
@given(SEEDS, TRAVEL, st.integers(1, 40_000))
def test_a_search_that_runs_out_of_work_loses_no_plan(seed, travel, work):
    problem = _known(_problem(seed, travel), idle=True)
    plans = loads_of_plans(problem)
    branching = Branching(Potentials(problem, math.inf, math.inf, most_work=work), lambda plan: None)
    excluded = branching.excluded(0.97 * min(load for _, load in plans))
    for plan, load in plans:
        (part,) = [part for part in branching.parts if _within(part.window, plan)]
        assert load >= part.bound * (1 - 1e-9)
    if excluded:
        assert all(part.bound > 0.0 for part in branching.parts)


def _within(window, plan):
    earliest, latest = window
    return bool((earliest <= plan).all() and (latest >= plan).all())


def _excluded(problem, limit, cap=math.inf):
    """Whether the limit is excluded, and the plans accepted."""
    accepted = []
    branching = Branching(Potentials(problem, cap, math.inf), accepted.append)
    return branching.excluded(limit), accepted


def _problem(seed, travel):
    """A random problem, often with stages of their own speeds, and with nets that cost both ways."""
    rng = random.Random(seed)
    stages = rng.choice([2, 3, 4])
    items = rng.randint(stages, 8 if stages < 4 else 6)
    base = "relayed" if travel == "relayed" else "direct"
    problem = random_problem(seed, items, stages, tight=False, schedule="1f1b", travel=base)
    transfer = problem.transfer
    if travel == "both":
        forward = np.array([not net.backward for net in problem.nets], dtype=bool)
        drawn = [[rng.uniform(0, 0.5) for _ in problem.nets] for _ in range(stages - 1)]
        transfer = np.array(drawn).reshape(transfer.shape) * forward
    speed = np.array([[rng.choice([1.0, 1.0, rng.uniform(0.5, 2.0)])] for _ in range(stages)])
    return dataclasses.replace(
        problem, work=problem.work * speed + 0.02, transfer=transfer, repeat=max(problem.repeat, 1.0)
    )


def _known(problem, idle):
    """Without what a sweep does not charge: nets that flow backward, states of several users."""
    forward = [n for n, net in enumerate(problem.nets) if not net.backward]
    tables = {k: getattr(problem, k)[:, forward] for k in ("transfer", "send", "receive", "touch")}
    nets, users = tuple(problem.nets[n] for n in forward), tuple(users[:1] for users in problem.users)
    return dataclasses.replace(problem, nets=nets, users=users, idle=idle, **tables)
