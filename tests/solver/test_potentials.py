"""Limits on the load are called impossible only where they are, against every assignment; and where it is plain."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from partition_oracle import legal, value_and_memory
from random_problems import plain_problem, random_problem

from autopart.solver import richest_stage
from autopart.solver.potentials import Potentials
from autopart.solver.problem import Net

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**9)
TRAVEL = st.sampled_from(["relayed", "direct", "both"])
MOST_WORK = 10**9


@PROPERTY
@given(SEEDS, TRAVEL, st.sampled_from([1.0, 1.0 + 1e-6, 1.01, 1.3, 5.0]))
@example(957, "relayed", 1.0)  # the best plan's gains add up to nothing less some rounding
@example(430, "direct", 1.0)
def test_no_limit_that_a_plan_keeps_is_called_impossible(seed, travel, share):
    problem = _problem(seed, travel)
    least = min(load for _, load in _plans(problem))
    assert not _potentials(problem).impossible(least * share, MOST_WORK)


@PROPERTY
@given(SEEDS, TRAVEL, st.sampled_from([1.0, 1.05, 1.5]), st.sampled_from([1.0, 1.1]))
def test_only_plans_below_the_cap_count_and_all_of_them_do(seed, travel, cap, share):
    problem = _problem(seed, travel)
    plans = _plans(problem)
    cap *= min(step for step, _ in plans) * (1 + 1e-9)
    least = min(load for step, load in plans if step <= cap)
    assert not _potentials(problem, cap).impossible(least * share, MOST_WORK)


@PROPERTY
@given(SEEDS, TRAVEL, st.lists(st.sampled_from([0.3, 0.6, 0.9, 0.99, 1.0, 1.01, 1.3]), min_size=2, max_size=5))
def test_limits_may_be_asked_for_in_any_order(seed, travel, shares):
    problem = _problem(seed, travel)
    least = min(load for _, load in _plans(problem))
    potentials, plain = _potentials(problem), _plainly_impossible(problem)
    for share in shares:
        found = potentials.impossible(least * share, MOST_WORK)
        assert not (found and share >= 1.0)
        assert found or least * share > 0.95 * plain


@PROPERTY
@given(SEEDS, st.sampled_from(["zbv", "interleaved1f1b"]), st.sampled_from([1.0, 1.1]))
def test_stages_that_share_a_process_are_within_its_load(seed, schedule, share):
    problem = random_problem(seed, tight=False, schedule=schedule)
    problem = dataclasses.replace(problem, work=problem.work + 0.05, repeat=max(problem.repeat, 1.0))
    least = min(load for _, load in _plans(problem))
    assert not _potentials(problem).impossible(least * share, MOST_WORK)
    item = float((problem.repeat * problem.work.min(axis=0)).max())
    assert _potentials(problem).impossible(0.9 * item, MOST_WORK)


@PROPERTY
@given(SEEDS, TRAVEL, st.sampled_from([0.2, 0.7, 0.95]))
def test_limits_below_the_largest_item_or_an_even_share_of_the_work_are_impossible(seed, travel, share):
    problem = _problem(seed, travel)
    assert _potentials(problem).impossible(share * _plainly_impossible(problem), MOST_WORK)


@pytest.mark.parametrize("items, stages", [(2, 2), (7, 2), (7, 3), (8, 4), (9, 4), (23, 5), (20, 4), (24, 4), (25, 5)])
def test_equal_items_in_a_chain_share_as_evenly_as_whole_items_can(items, stages):
    """However little is missing: ceil(items / stages) items are in one stage."""
    problem = _chain(items, stages)
    exact = math.ceil(items / stages)
    potentials = _potentials(problem)
    for limit, impossible in [(exact - 1, True), (exact - 1e-3, True), (exact, False), (exact + 0.5, False)]:
        assert _potentials(problem).impossible(limit, MOST_WORK) == impossible
        assert potentials.impossible(limit, MOST_WORK) == impossible
    assert potentials.impossible(exact - 1e-3, MOST_WORK)


@pytest.mark.parametrize("branches", [2, 3, 5])
def test_branches_that_are_all_torn_cost_every_stage(branches):
    """One item, equal branches of one long item each, one item: two stages share the branches or relay all of them."""
    items = branches + 2
    nets = [Net(0, tuple(range(1, branches + 1))), *(Net(v, (items - 1,)) for v in range(1, branches + 1))]
    problem = plain_problem(nets, items, 2)
    long = np.where((np.arange(items) > 0) & (np.arange(items) < items - 1), 10.0, 1.0)
    problem = dataclasses.replace(problem, work=np.tile(long, (2, 1)), transfer=np.full((1, len(nets)), 0.25))
    least = min(load for _, load in _plans(problem))
    assert not _potentials(problem).impossible(least, MOST_WORK)
    assert _potentials(problem).impossible(0.999 * least, MOST_WORK)


@settings(PROPERTY, max_examples=30)
@given(SEEDS, TRAVEL, st.sampled_from([1.0, 1.2]))
def test_nothing_is_proven_by_giving_up(seed, travel, share):
    """No pairs, no time, searches that end early: their numbers of pairs are compiled in, so they run as Python."""
    problem = _problem(seed, travel, items=5)
    least = min(load for _, load in _plans(problem))
    assert not _potentials(problem).impossible(least * share, 0)
    late = _potentials(problem)
    late.deadline = -math.inf
    assert not late.impossible(least * share, MOST_WORK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(richest_stage, "_search", richest_stage._search.py_func)
        patch.setattr(richest_stage, "PAIRS_AT_FIRST", 4)
        patch.setattr(richest_stage, "MOST_PAIRS", 4)
        assert not _potentials(problem).impossible(least * share, MOST_WORK)


@PROPERTY
@given(SEEDS, TRAVEL, st.sampled_from([1.0, 1.0 + 1e-6, 1.1]), st.booleans())
def test_smaller_windows_rule_out_no_plan_within_them(seed, travel, share, asked):
    rng = random.Random(seed)
    problem = _problem(seed, travel)
    kept = _any_plan(rng, problem)
    load = max(value_and_memory(problem, kept)[2])
    potentials = _potentials(problem)
    if asked:  # cuts and potentials of the wide windows
        potentials.impossible(0.9 * load, MOST_WORK)
    potentials.window = _narrowed(rng, potentials.window, kept)
    assert not potentials.impossible(load * share, MOST_WORK)


@PROPERTY
@given(SEEDS, TRAVEL, st.booleans(), st.sampled_from([0.2, 0.9]))
def test_windows_that_leave_too_much_in_one_stage_are_impossible(seed, travel, asked, share):
    """All items where one plan has them; a limit that has room for its work is another question."""
    rng = random.Random(seed)
    problem = _problem(seed, travel)
    kept = _any_plan(rng, problem)
    work = [sum(problem.work[s][v] for v, at in enumerate(kept) if at == s) for s in range(problem.stages)]
    potentials = _potentials(problem)
    if asked:
        potentials.impossible(max(work) * problem.repeat, MOST_WORK)
    potentials.window = np.array(kept), np.array(kept)
    assert potentials.impossible(share * max(work) * problem.repeat, MOST_WORK)


@PROPERTY
@given(SEEDS, TRAVEL, st.sampled_from([1.0, 1.05]), st.booleans())
def test_potentials_to_begin_with_prove_nothing_false(seed, travel, share, drawn):
    """Those of a lower limit, or any numbers, also where the windows forbid an item to be before a boundary."""
    problem = _problem(seed, travel)
    plans = _plans(problem)
    least = min(load for _, load in plans)
    if drawn:
        start = np.random.default_rng(seed).normal(size=(problem.stages + 1, problem.items)) * 3
    else:
        other = _potentials(problem)
        other.impossible(0.95 * least, MOST_WORK)
        start = other.centre
    cap = 1.2 * min(step for step, _ in plans)
    allowed = min(load for step, load in plans if step <= cap)
    for below, limit in [(math.inf, least), (cap, allowed)]:
        potentials = Potentials(problem, below, math.inf, start)
        assert not potentials.impossible(share * limit, MOST_WORK)


@pytest.mark.parametrize("limit", [2.9, 2.999])
def test_the_potentials_of_one_problem_begin_the_next(limit):
    """What they prove at once they prove again."""
    problem = _chain(9, 3)
    first = _potentials(problem)
    assert first.impossible(limit, MOST_WORK)
    again = Potentials(problem, math.inf, math.inf, first.centre)
    assert np.array_equal(again.centre, first.centre)
    assert again.impossible(limit, MOST_WORK)


@pytest.mark.parametrize("work", [0.0, 1e-300, 1e-14, 1e-6])
@pytest.mark.parametrize("transfer", [0.0, 0.25])
@pytest.mark.parametrize("stages", [2, 3])
def test_nothing_false_is_proven_where_there_is_hardly_any_work(work, transfer, stages):
    problem = _chain(5, stages)
    problem = dataclasses.replace(problem, work=problem.work * work, transfer=problem.transfer + transfer)
    for idle in (False, True):  # with empty stages nothing has to be transferred
        problem = dataclasses.replace(problem, idle=idle)
        least = min(load for _, load in _plans(problem))
        potentials = _potentials(problem)
        for share in (2.0, 1.0, 1.0 + 1e-6):
            assert not potentials.impossible(least * share, MOST_WORK)


@pytest.mark.parametrize("light", [0.0, 1e-14])
def test_one_item_with_work_among_others_without(light):
    problem = _chain(5, 3)
    problem = dataclasses.replace(problem, work=np.where(np.arange(5) == 2, 1.0, light) * np.ones((3, 1)))
    for limit, impossible in [(1.0 + 1e-6, False), (1.5, False), (0.999, True)]:
        assert _potentials(problem).impossible(limit, MOST_WORK) == impossible


def _potentials(problem, cap=math.inf):
    return Potentials(problem, cap, math.inf)


def _problem(seed, travel, items=None):
    """A random problem, often with stages and boundaries of their own speeds, and with nets that cost both ways."""
    rng = random.Random(seed)
    base = "relayed" if travel == "relayed" else "direct"
    stages = rng.choice([2, 3, 4])
    items = items or rng.randint(stages, 8 if stages < 4 else 6)
    problem = random_problem(seed, items, stages, tight=False, schedule="1f1b", travel=base)
    shape = (stages - 1, len(problem.nets))
    transfer = problem.transfer
    if travel == "both":
        forward = np.array([not net.backward for net in problem.nets], dtype=bool)
        transfer = np.array([[rng.uniform(0, 0.5) for _ in range(shape[1])] for _ in range(shape[0])]).reshape(shape)
        transfer = transfer * forward
    speed = np.array([rng.choice([1.0, 1.0, rng.uniform(0.5, 2.0)]) for _ in range(stages)])[:, None]
    # Loads without any work are another question: the step time is then latency alone.
    return dataclasses.replace(
        problem, work=(problem.work + 0.05) * speed, transfer=transfer, repeat=max(problem.repeat, 1.0)
    )


def _narrowed(rng, window, kept):
    """Some items not before, some not after, where a plan has them."""
    first, last = window
    drawn = [rng.choice(["", "", "first", "last", "both"]) for _ in kept]
    first = np.where([d in ("first", "both") for d in drawn], np.maximum(first, kept), first)
    return first, np.where([d in ("last", "both") for d in drawn], np.minimum(last, kept), last)


def _any_plan(rng, problem):
    every = itertools.product(range(len(problem.process)), repeat=problem.work.shape[1])
    return rng.choice([plan for plan in every if legal(problem, plan)])


def _plans(problem):
    """(step time, largest load) of every legal assignment."""
    found = []
    for stage in itertools.product(range(len(problem.process)), repeat=problem.work.shape[1]):
        if legal(problem, stage):
            step, _, loads = value_and_memory(problem, stage)
            found.append((step, max(loads)))
    return found


def _plainly_impossible(problem):
    """No largest load is below an item's least work, nor below an even share of all work at its least."""
    least = problem.repeat * np.array(problem.work).min(axis=0)
    return max(float(least.max()), float(least.sum()) / len(problem.process))


def _chain(items, stages):
    return plain_problem([Net(v, (v + 1,)) for v in range(items - 1)], items, stages)
