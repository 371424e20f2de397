"""The joint optimum of layouts and stages is the least of all choices, tried one by one; and no plan is faster."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autopart.cluster import Cluster
from autopart.degrees import plan_degrees
from autopart.errors import AutopartError
from autopart.graph import Graph
from autopart.profiler import profile
from autopart.profiler.isolated import Call, Outcome, Runner
from autopart.sharding import Choice, Program, rewrite
from autopart.solver import lower
from autopart.solver.problem import Problem
from autopart.solver.score import score
from autopart.tracer import trace
from autopart.workload import Workload
from benchmarks.joint_draft import Pricing
from benchmarks.joint_optimum import check, limited
from benchmarks.joint_oracle import Oracle, truth

WORKLOAD = Workload("training", 4, 8, "1f1b", "adamw")
CLUSTER = Cluster.parse("4xL4")


class Tied(nn.Module):
    """One weight, read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, self.weight), self.weight).sum()


@functools.cache
def graph() -> Graph:
    return trace(Tied(), (torch.zeros(8, 256),), check=False)


@functools.cache
def program() -> Program:
    return Program.of(graph(), 2)


@functools.cache
def pricing() -> Pricing:
    return Pricing("cuda", 2)


def oracle(cluster: Cluster = CLUSTER, **options: bool) -> Oracle:
    return Oracle(graph(), program(), cluster, WORKLOAD, pricing(), **options)


def every_choice() -> Iterator[Choice]:
    """Every legal choice of layouts."""
    held = {str(node.target): found for node, found in program().layouts.items() if node.op == "get_attr"}
    for layouts in itertools.product(*held.values()):
        for strategies in itertools.product(*program().strategies.values()):
            names = (node.name for node in program().strategies)
            yield Choice(dict(zip(held, layouts, strict=True)), dict(zip(names, strategies, strict=True)), program())


def every_cut(problem: Problem) -> Iterator[list[int]]:
    """Every assignment of items to two stages in which no net flows backwards."""
    stages: list[int] = []

    def go() -> Iterator[list[int]]:
        if len(stages) == problem.items:
            if len(set(stages)) == 2:
                yield list(stages)
            return
        least = max((stages[before] for before in problem.predecessors[len(stages)]), default=0)
        for stage in range(least, 2):
            stages.append(stage)
            yield from go()
            stages.pop()

    yield from go()


@functools.cache
def every_value() -> list[tuple[float, float]]:
    """Step time and largest memory of every choice with every cut."""
    places, run, outcomes = CLUSTER.grouped(2), Runner.run, {}

    def once(runner: Runner, call: Call) -> Outcome:
        """The same signatures occur in many choices."""
        key = repr(call)
        if key not in outcomes:
            outcomes[key] = run(runner, call)
        return outcomes[key]

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", once)
        for choice in every_choice():
            try:
                local = rewrite(graph(), choice, 2)
            except AutopartError:
                continue
            problem = lower(local, profile(local, places, CLUSTER.group_link(2)), places, WORKLOAD, 2).problem
            for cut in every_cut(problem):
                value = score(problem, cut)
                found.append((value.step_s, float(value.memory.max())))
    return found


def test_no_choice_and_cut_is_faster_than_the_joint_optimum() -> None:
    best = oracle().optimum()
    assert best.step_s == pytest.approx(min(step_s for step_s, _ in every_value()), rel=1e-9)
    assert best.fixed is not None and truth(oracle(), best.fixed)[0].step_s == pytest.approx(best.step_s, rel=1e-9)


def test_nor_where_memory_binds() -> None:
    sizes = sorted({memory for _, memory in every_value()})
    found = set()
    for share in (0.02, 0.05, 0.1, 0.2, 0.4):
        given = limited(CLUSTER, int(sizes[int(share * len(sizes))] / 0.94) + 1)
        tried = oracle(given, memory=True)
        best = tried.optimum()
        expected = min(step_s for step_s, memory in every_value() if memory <= tried.limit)
        assert best.step_s == pytest.approx(expected, rel=1e-9)
        assert best.fixed is not None and truth(tried, best.fixed)[1]
        found.add(round(best.step_s, 12))
    assert len(found) > 1


def test_where_nothing_fits_there_is_no_optimum() -> None:
    assert oracle(limited(CLUSTER, 1000), memory=True).optimum().fixed is None


def test_a_plan_is_no_faster_than_the_joint_optimum() -> None:
    plan = plan_degrees(graph(), profile(graph(), CLUSTER), CLUSTER, WORKLOAD, tensor=2, stages=2).plan
    assert plan.step_time_s >= oracle().optimum().step_s * (1 - 1e-9)


def test_the_rules_give_what_the_planner_gives() -> None:
    check(oracle(), 10)
