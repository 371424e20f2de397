"""The dynamic program over down-sets: exact below any cap, against brute force; and it stops where its work ends."""

import dataclasses
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import choices, legal, optimum, value_and_memory
from random_problems import plain_problem, random_problem, with_blocks

from autopart.solver import down_sets as module
from autopart.solver.down_sets import solve_down_sets
from autopart.solver.enumeration import down_sets, down_sets_within
from autopart.solver.problem import Net
from autopart.solver.score import score
from autopart.solver.stage_costs import StageCosts

EXACT = 1e-4


def _optimum_of(problem, answer, best, cap):
    """The answer's promises, given the optimum by brute force."""
    assignment, bound = answer
    if assignment is None:
        assert best >= bound * (1 - 1e-9)
        assert bound >= cap * (1 - EXACT)
        return
    assert legal(problem, assignment)
    value = score(problem, assignment).step_s
    assert score(problem, assignment).fits(problem)
    assert value == pytest.approx(_value(problem, assignment), rel=1e-9)
    assert value < cap * (1 + 1e-9)
    assert best <= value * (1 + 1e-12) <= best * (1 + 2 * EXACT)
    assert value * (1 - 2 * EXACT) <= bound <= best * (1 + 1e-9)


def _value(problem, assignment):
    """The least step time of an assignment over what may be computed again."""
    found = [value_and_memory(problem, assignment, again) for again in choices(problem, assignment)]
    fitting = [v for v, memory, _ in found if all(m <= x for m, x in zip(memory, problem.limits, strict=True))]
    return min(fitting)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**9),
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from(["relayed", "direct", "hidden"]),
    st.sampled_from([0.5, 0.999, 1.001, 1.05, 1.5, math.inf]),
)
def test_the_best_plan_below_any_cap_is_found(seed, schedule, travel, share):
    problem = random_problem(seed, schedule=schedule, travel=travel)
    best = optimum(problem)
    cap = best * share if math.isfinite(best) else 100.0 * share
    _optimum_of(problem, solve_down_sets(problem, EXACT, cap), best, cap)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.sampled_from([0.999, 1.01, math.inf]))
def test_with_blocks_that_are_computed_again_too(seed, share):
    problem = with_blocks(random_problem(seed, schedule="1f1b", tight=True), seed)
    best = optimum(problem)
    cap = best * share if math.isfinite(best) else math.inf
    _optimum_of(problem, solve_down_sets(problem, EXACT, cap), best, cap)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(1, 3))
def test_blocks_of_any_size_give_the_same(seed, before, after):
    problem = random_problem(seed, schedule="1f1b")
    whole = solve_down_sets(problem, EXACT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BEFORE", before)
        patch.setattr(module, "AFTER", after)
        assert solve_down_sets(problem, EXACT) == whole


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_a_stage_costs_what_the_definition_says_whatever_the_others_are(seed, random):
    problem = random_problem(seed, schedule="1f1b", tight=False)
    inside = down_sets(problem, 10**6)
    costs = StageCosts(problem, inside)
    chain = _random_chain(problem, inside, random)
    stage = (~inside[chain[1:-1]]).sum(axis=0)
    result = score(problem, stage)
    for s in range(problem.stages):
        load = costs.load(s, np.array([chain[s]]), np.array([chain[s + 1]]))
        assert load.item() == pytest.approx(result.loads_s[s], rel=1e-9, abs=1e-9)
    value, _, _ = value_and_memory(problem, [int(s) for s in stage])
    fill = sum(costs.boundary_fill[s, chain[s + 1]] for s in range(problem.stages))
    assert fill + result.loads_s.max() == pytest.approx(value, rel=1e-9, abs=1e-9)


def _random_chain(problem, inside, random):
    """Down-sets of all boundaries that leave no stage empty unless that is allowed."""
    order = sorted(range(problem.items), key=lambda v: v)  # items are numbered in topological order
    draw = random.choices if problem.idle else random.sample
    cuts = sorted(draw(range(0 if problem.idle else 1, problem.items), k=problem.stages - 1))
    rows = {row.tobytes(): i for i, row in enumerate(inside)}
    sets = [np.isin(np.arange(problem.items), order[:cut]) for cut in (0, *cuts, problem.items)]
    return [rows[one.tobytes()] for one in sets]


@pytest.mark.parametrize("branches, length", [(2, 3), (3, 4), (4, 2)])
def test_the_down_sets_of_parallel_chains_are_all_there(branches, length):
    nets = [Net(0, tuple(1 + b * length for b in range(branches)))]
    last = 1 + branches * length
    for v in range(1, last):
        nets.append(Net(v, (v + 1 if v % length else last,)))
    problem = _plain(nets, last + 1, 3)
    found = down_sets(problem, 10**6)
    assert len(found) == (length + 1) ** branches + 2  # nothing; the first item and a prefix of each branch; everything
    assert len(np.unique(found, axis=0)) == len(found)
    assert not found[0].any() and found[-1].all()
    assert all(row[net.producer] or not row[r] for row in found for net in nets for r in net.readers)
    assert down_sets(problem, len(found) - 1) is None


def test_a_wide_graph_is_given_up_before_its_down_sets_fill_the_memory():
    leaves = 300  # 44,850 pairs of them
    star = _plain([Net(0, tuple(range(1, leaves + 1)))], leaves + 1, 2)
    tracemalloc.start()
    assert down_sets(star, 2000) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * 2**20


def test_it_says_when_its_work_ends_instead_of_answering():
    problem = _plain([Net(v, (v + 1,)) for v in range(19)], 20, 3)
    assert solve_down_sets(problem, EXACT, effort=1e-7) is None
    assert solve_down_sets(problem, EXACT) is not None


def _plain(nets, items, stages):
    """A second an item, a hundredth a transfer, 4 microbatches."""
    problem = plain_problem(nets, items, stages)
    return dataclasses.replace(problem, transfer=problem.transfer + 0.01, repeat=3.0, fill_weight=1.0, idle=False)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(3, 50))
def test_no_down_set_between_the_limits_of_work_is_missed(seed, before, behind, most):
    problem = random_problem(seed, stages=3, schedule="1f1b")
    work = problem.work[0]
    upto, rest = work.sum() * np.array([before, before / 2]), work.sum() * np.array([behind, behind / 2])
    everything = down_sets(problem, 10**6)
    found = down_sets_within(problem, work, upto, rest, most)
    if found is None:
        assert len(everything) > most
        return
    rows = {row.tobytes() for row in found}
    assert rows <= {row.tobytes() for row in everything} and len(rows) == len(found)
    assert not found[0].any() and found[-1].all()
    for row in everything:
        done = work[row].sum()
        if any(done <= u and work.sum() - done <= r for u, r in zip(upto, rest, strict=True)):
            assert row.tobytes() in rows
