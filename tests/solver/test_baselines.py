"""Splits by hand are the best of their kind: against every way to cut the program order."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem

from autopart.solver.baselines import balanced_parameters, balanced_times, pipedream, valued


def cuts(problem):
    """Every assignment of the program order to non-empty stages."""
    items, stages = problem.items, problem.stages
    for places in itertools.combinations(range(1, items), stages - 1):
        yield [sum(item >= place for place in places) for item in range(items)]


def boundary_seconds(problem, stage, b):
    return sum(
        problem.transfer[b][n]
        for n, net in enumerate(problem.nets)
        if stage[net.producer] <= b and (net.to_end or any(stage[r] > b for r in net.readers))
    )


def stage_seconds(problem, stage):
    return [sum(problem.work[s][v] for v in range(problem.items) if stage[v] == s) for s in range(problem.stages)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_the_largest_stage_is_least(seed):
    problem = random_problem(seed, travel="relayed")
    stages = range(problem.stages)

    def parameters(stage):
        first = [(stage[users[0]], held) for users, held in zip(problem.users, problem.state_bytes, strict=True)]
        return max(sum(held for s, held in first if s == t) for t in stages)

    def times(stage):
        return max(stage_seconds(problem, stage))

    def slowest(stage):
        return max(times(stage), *(boundary_seconds(problem, stage, b) for b in stages[:-1]))

    for split, measure in ((balanced_parameters, parameters), (balanced_times, times), (pipedream, slowest)):
        assert measure(split(problem)) == pytest.approx(min(map(measure, cuts(problem))), rel=1e-9)


def test_only_pipedream_sees_what_is_sent():
    """Three items of equal work in two stages: the value between the first two takes longer than everything else."""
    problem = random_problem(3, items=3, stages=2, schedule="1f1b", tight=False, travel="relayed")
    ones = np.ones((2, 3))
    chain = tuple(dataclasses.replace(problem.nets[0], producer=v, readers=(v + 1,), to_end=False) for v in (0, 1))
    two = {name: np.zeros((1, 2)) for name in ("send", "receive")}
    problem = dataclasses.replace(
        problem,
        work=ones * [1, 1, 0.5],
        fill=ones,
        nets=chain,
        transfer=np.array([[9.0, 0.1]]),
        touch=np.zeros((2, 2)),
        **two,
    )
    assert balanced_times(problem) == [0, 1, 1]
    assert pipedream(problem) == [0, 0, 1]


def test_a_split_that_does_not_fit_says_which_device_lacks_what():
    problem = random_problem(3, items=3, stages=2, schedule="1f1b", tight=False)
    problem = dataclasses.replace(problem, limits=np.array([0.0, np.inf]))
    found = valued("balanced times", problem, balanced_times(problem))
    assert not found.fits and found.step_time_s is not None
    assert found.reason.startswith("device 0 would need")
