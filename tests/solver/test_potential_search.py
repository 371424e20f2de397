"""Plans and bounds by potentials, against brute force: no false bound, no worse plan, and where it may, no gap."""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from partition_oracle import legal, optimum, value_and_memory
from random_problems import random_problem

from autopart.solver.potential_search import solve_potentials
from autopart.solver.potentials import Potentials
from autopart.solver.problem import Net
from autopart.solver.score import score
from autopart.solver.search import DEEP, search
from autopart.solver.windows import passing

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**9)
TOLERANCES = st.sampled_from([1e-2, 1e-3, 1e-4])
WORK = 10**9
ROUNDING = 1e-9


@PROPERTY
@given(SEEDS, st.booleans(), st.sampled_from([0.0, 1.0]), st.booleans(), TOLERANCES)
@example(68, False, 1.0, False, 1e-3)  # near the optimum at once, with nothing more to be shown
def test_bounds_hold_and_plans_are_no_worse(seed, tight, fill_weight, branch, tolerance):
    problem = _problem(seed, tight, fill_weight)
    plans = _plans(problem)
    assume(plans)
    best, start = min(plans)[0], max(plans)[1]
    plan, bound = _solved(problem, tolerance, start, 0.0, branch)
    value, memory, _ = value_and_memory(problem, plan)
    assert legal(problem, plan)
    assert all(m <= limit for m, limit in zip(memory, problem.limits, strict=True))
    assert bound <= best * (1 + ROUNDING)
    assert best <= value * (1 + ROUNDING) and value <= max(plans)[0] * (1 + ROUNDING)
    assert score(problem, plan).step_s == pytest.approx(value, rel=1e-12)


@PROPERTY
@given(SEEDS, TOLERANCES)
@example(5, 1e-3)  # an item without work is left to decide
def test_branching_leaves_no_gap_where_loads_are_all_that_matters(seed, tolerance):
    problem = _known(_problem(seed, tight=False, fill_weight=0.0))
    plans = _plans(problem)
    plan, bound = _solved(problem, tolerance, max(plans)[1], 0.0, branch=True)
    value, _, _ = value_and_memory(problem, plan)
    assert value * (1 - tolerance) <= bound * (1 + ROUNDING)
    assert value <= min(plans)[0] * (1 + 2 * tolerance)


@PROPERTY
@given(SEEDS, st.booleans(), st.sampled_from([0.9, 1.0]))
def test_a_bound_that_is_known_is_never_lowered(seed, branch, share):
    problem = _problem(seed, tight=False, fill_weight=0.0)
    plans = _plans(problem)
    known = min(plans)[0] * share
    _, bound = _solved(problem, 1e-3, max(plans)[1], known, branch)
    assert known <= bound <= min(plans)[0] * (1 + ROUNDING)


@settings(PROPERTY, max_examples=30)
@given(SEEDS, st.booleans(), st.sampled_from([0, 1000, 100_000]))
@example(68, False, 100_000)
def test_no_limit_is_asked_for_over_and_over(seed, branch, work):
    """Once before it branches, once then; and without work or time, nothing is asked for at all."""
    problem = _problem(seed, tight=False, fill_weight=1.0)
    start = max(_plans(problem))[1]
    asked, kept, impossible = Counter(), [], Potentials.impossible

    def counting(self, limit, *arguments):
        kept.append(self)  # no other has its number
        asked[id(self), self.window[0].tobytes(), self.window[1].tobytes(), limit] += 1
        return impossible(self, limit, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Potentials, "impossible", counting)
        _solved(problem, 1e-3, start, 0.0, branch, work)
        assert max(asked.values(), default=0) <= 1 + branch
        assert work or not asked
        asked.clear()
        assert _solved(problem, 1e-3, start, 0.1, branch, deadline=-math.inf) == (start, 0.1)
        assert not asked


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("kind", ["several stages", "hidden", "one stage", "nothing again"])
def test_it_says_where_it_does_not_apply(kind, branch):
    problem = _problem(3, tight=False, fill_weight=1.0)
    if kind == "several stages":
        problem = random_problem(3, tight=False, schedule="interleaved1f1b")
    elif kind == "hidden":
        problem = random_problem(3, tight=False, schedule="1f1b", travel="hidden")
    elif kind == "one stage":
        problem = random_problem(3, items=4, stages=1, tight=False, schedule="1f1b", travel="relayed")
    else:
        problem = dataclasses.replace(problem, repeat=0.0)
    start = tuple(min(v, problem.stages - 1) for v in range(problem.items))
    assert _solved(problem, 1e-3, start, 0.0, branch) is None


@settings(PROPERTY, max_examples=300)
@given(SEEDS, st.sampled_from([None, "1f1b"]), st.sampled_from([{"potentials"}, {"potentials", "branching"}]))
def test_a_search_with_nothing_else_gives_a_legal_plan_and_a_bound_that_holds(seed, schedule, layers):
    problem = random_problem(seed, schedule=schedule)
    best = optimum(problem)
    answer = search(problem, 1e-4, 30.0, without={*DEEP} - layers)
    assert answer.bound <= best * (1 + ROUNDING)
    if answer.assignment is not None:
        value, memory, _ = value_and_memory(problem, answer.assignment)
        assert legal(problem, answer.assignment)
        assert all(m <= limit for m, limit in zip(memory, problem.limits, strict=True))
        assert answer.value == pytest.approx(value, rel=1e-12)
        assert best <= value * (1 + 1e-12)


@pytest.mark.parametrize(
    "readers, stages, cap, share",
    [
        ([(1,), (2,), (3,)], 2, math.inf, 0.0),  # two stages have none between them
        ([(1,), (2,), (3,)], 3, math.inf, 1.0),  # without a cap all may be anywhere
        ([(1,), (2,), (3,)], 3, 2.0, 1 / 3),  # windows 0-1, 0-1, 1-2, 1-2: only the middle net has stage 1 between
        ([(1,), (2,), (3,)], 4, 1.0, 0.0),  # one item a stage
        ([(3,), (3,), (3,)], 3, 2.0, 1.0),  # each of the first may be in stage 0 with the last one in stage 2
        ([(1, 2, 3)], 4, 2.0, 1.0),  # the first may be in stage 0, its readers in the last
        ([(1, 3), (2,), (3,)], 3, 2.0, 2 / 3),  # the furthest reader counts
        ([()], 3, math.inf, 0.0),  # read by the end of the pipeline alone
        ([], 3, math.inf, 0.0),
    ],
)
def test_how_many_nets_may_pass_a_stage(readers, stages, cap, share):
    """Four items of a second, by hand."""
    nets = tuple(Net(v, own, not own) for v, own in enumerate(readers))
    base = random_problem(0, items=4, stages=stages, tight=False, schedule="1f1b", travel="relayed")
    per_net = np.zeros((stages - 1, len(nets)))
    problem = dataclasses.replace(
        base,
        work=np.ones((stages, 4)),
        fill=np.zeros((stages, 4)),
        nets=nets,
        transfer=per_net,
        send=per_net,
        receive=per_net,
        touch=np.zeros((stages, len(nets))),
        repeat=1.0,
    )
    assert passing(problem, cap) == pytest.approx(share)


def _solved(problem, tolerance, start, bound, branch, work=WORK, deadline=math.inf):
    return solve_potentials(problem, tolerance, start, bound, branch, work=work, deadline=deadline)


def _problem(seed, tight, fill_weight):
    """A random problem in which something is paid for every microbatch, by relayed or by direct transfers."""
    travel = ("relayed", "direct")[seed % 2]
    problem = random_problem(seed, tight=tight, schedule="1f1b", travel=travel)
    return dataclasses.replace(problem, fill_weight=fill_weight, repeat=max(problem.repeat, 1.0))


def _known(problem):
    """Without what potentials do not see: nets that flow backward, states of several users, stages that must hold."""
    forward = [n for n, net in enumerate(problem.nets) if not net.backward]
    tables = {k: getattr(problem, k)[:, forward] for k in ("transfer", "send", "receive", "touch")}
    nets, users = tuple(problem.nets[n] for n in forward), tuple(users[:1] for users in problem.users)
    return dataclasses.replace(problem, nets=nets, users=users, idle=True, **tables)


def _plans(problem):
    """(step time, assignment) of every legal assignment that fits."""
    found = []
    for plan in itertools.product(range(len(problem.process)), repeat=problem.work.shape[1]):
        if legal(problem, plan):
            step, memory, _ = value_and_memory(problem, plan)
            if all(m <= limit for m, limit in zip(memory, problem.limits, strict=True)):
                found.append((step, plan))
    return found
