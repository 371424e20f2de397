"""Reductions keep the optimum, against brute force; and they reduce what they are meant to."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import choices, legal, optimum, value_and_memory
from random_problems import foldable_problem, random_problem, with_blocks

from autopart.solver.folding import fold
from autopart.solver.problem import Net
from autopart.solver.reductions import condense


def _same_optimum(problem, reduced, new):
    best, least = optimum(problem), optimum(reduced)
    assert least == pytest.approx(best, rel=1e-9, abs=1e-12)
    if math.isinf(best):
        return
    for stage in itertools.product(range(problem.stages), repeat=reduced.items):
        if legal(reduced, stage):
            whole = [stage[new[v]] for v in range(problem.items)]
            assert legal(problem, whole)
            value, memory, _ = value_and_memory(reduced, stage)
            assert value_and_memory(problem, whole)[0] == pytest.approx(value, rel=1e-9, abs=1e-12)
            assert value_and_memory(problem, whole)[1] == pytest.approx(memory, rel=1e-9, abs=1e-12)
            break


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_merging_keeps_every_value(seed):
    problem = _with_doubles(random_problem(seed), random.Random(seed))
    if seed % 3 == 0:
        problem = with_blocks(problem, seed)
    reduced, new = condense(problem, [])
    assert new == list(range(problem.items))
    assert len(reduced.nets) <= len(problem.nets)
    for stage in itertools.islice(itertools.product(range(problem.stages), repeat=problem.items), 0, None, 7):
        assert legal(problem, stage) == legal(reduced, stage)
        for again in choices(problem, stage) if legal(problem, stage) else ():
            value, memory, loads = value_and_memory(problem, stage, again)
            other, held, busy = value_and_memory(reduced, stage, again)
            assert (other, *held, *busy) == pytest.approx((value, *memory, *loads), rel=1e-9, abs=1e-12)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_uniting_groups_costs_what_uniting_them_costs(seed):
    rng = random.Random(seed)
    problem = random_problem(seed, schedule="1f1b")
    if seed % 3 == 0:
        problem = with_blocks(problem, seed)
    groups = [rng.sample(range(problem.items), 2) for _ in range(rng.randint(0, 2))]
    reduced, new = condense(problem, groups)
    best = math.inf
    for stage in itertools.product(range(problem.stages), repeat=problem.items):
        if legal(problem, stage) and all(stage[a] == stage[b] for a, b in groups):
            for again in choices(problem, stage):
                value, memory, _ = value_and_memory(problem, stage, again)
                if all(m <= limit for m, limit in zip(memory, problem.limits, strict=True)):
                    best = min(best, value)
    assert optimum(reduced) == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert all(new[a] == new[b] for a, b in groups)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.sampled_from(["relayed", "direct", "hidden"]))
def test_folding_keeps_the_optimum(seed, travel):
    problem = foldable_problem(seed, travel)
    reduced, new, kept = fold(problem)
    _same_optimum(problem, reduced, new)
    for stage in itertools.islice(itertools.product(range(problem.stages), repeat=problem.items), 0, None, 7):
        if legal(problem, stage):
            moved = [stage[kept[item]] for item in new]
            assert legal(problem, moved)
            value, memory, _ = value_and_memory(problem, stage)
            less, held, _ = value_and_memory(problem, moved)
            assert less <= value * (1 + 1e-12)
            for after, before, limit in zip(held, memory, problem.limits, strict=True):
                assert after <= max(before, limit) * (1 + 1e-12)


@pytest.mark.parametrize("travel, least", [("relayed", 150), ("direct", 100), ("hidden", 80)])
def test_the_random_problems_do_fold(travel, least):
    folded = sum(
        fold(foldable_problem(seed, travel))[0].items < foldable_problem(seed, travel).items for seed in range(300)
    )
    assert folded >= least


def test_a_relayed_net_and_a_direct_one_of_the_same_pins_keep_both_costs():
    problem = foldable_problem(0, "direct", items=3)
    nets = (Net(0, (1,)), Net(1, (2,)), Net(0, (1,)))
    relayed, direct = np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 2.0])
    between = np.tile(relayed, (problem.stages - 1, 1))
    touch = np.tile(direct, (problem.stages, 1))
    problem = dataclasses.replace(problem, nets=nets, transfer=between, send=between, receive=between, touch=touch)
    reduced, _ = condense(problem, [])
    stage = (0, 1, 1)
    for got, expected in zip(value_and_memory(reduced, stage), value_and_memory(problem, stage), strict=True):
        assert got == pytest.approx(expected)


def test_stages_that_must_hold_an_item_are_not_emptied():
    problem = dataclasses.replace(foldable_problem(3, "direct"), idle=False)
    assert fold(problem)[0] is problem


def test_orders_that_follow_from_others_are_dropped():
    problem = foldable_problem(0, "direct", items=4)
    nets = (Net(0, (1,)), Net(1, (2,)), Net(0, (2, 3)), Net(3, (0,), backward=True))
    touch = np.zeros((problem.stages, 4))
    touch[:, 0] = touch[:, 3] = 1.0
    none = np.zeros((problem.stages - 1, 4))
    problem = dataclasses.replace(problem, nets=nets, touch=touch, transfer=none, send=none, receive=none)
    reduced, _ = condense(problem, [])
    assert sorted((net.producer, net.readers, net.backward) for net in reduced.nets) == [
        (0, (1,), False),
        (0, (3,), False),
        (1, (2,), False),
    ]


def _with_doubles(problem, rng):
    """Some nets twice, and some that cost nothing."""
    extra = [rng.randrange(len(problem.nets)) for _ in range(3)] if problem.nets else []
    columns = [*range(len(problem.nets)), *extra]
    free = np.array([rng.random() > 0.3 for _ in columns], dtype=float)
    tables = {k: getattr(problem, k)[:, columns] * free for k in ("transfer", "send", "receive", "touch")}
    return dataclasses.replace(problem, nets=tuple(problem.nets[n] for n in columns), **tables)
