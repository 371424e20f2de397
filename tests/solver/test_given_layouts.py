"""Layouts that were not solved for cost what the same layouts cost when they are, and can be planned and held."""

from __future__ import annotations

import dataclasses
import random

import pytest

from autopart.cluster import Cluster
from autopart.degrees import plan_layouts
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.profiler import LayoutPrices
from autopart.sharding import Program, S, chosen, random_choice
from autopart.solver import choose_layouts, priced
from autopart.tracer import trace
from autopart.workload import Workload
from tests.sharding.models import build

CLUSTER = Cluster.parse(["CPU"] * 2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, args, kwargs = build("recommender")
    return trace(model, args, kwargs, check=False)


def test_the_price_of_given_layouts_is_that_of_solved_ones(graph: Graph) -> None:
    prices = LayoutPrices(graph, CLUSTER)
    solved = choose_layouts(graph, prices, CLUSTER, 2, optimizer="sgd", tie=False)
    given = priced(graph, prices, CLUSTER, 2, solved.choice, optimizer="sgd")
    assert given.time_s == solved.time_s
    assert given.value.memory_bytes == solved.value.memory_bytes
    assert {block.block: block.splits for block in given.blocks} == {b.block: b.splits for b in solved.blocks}


def test_a_plan_holds_random_layouts_as_they_were_drawn(graph: Graph) -> None:
    workload = Workload("training", 1, graph.microbatch_size, "gpipe", "sgd")
    for seed in range(3):
        choice = random_choice(Program.of(graph, 2), random.Random(seed))
        layouts = priced(graph, LayoutPrices(graph, CLUSTER), CLUSTER, 2, choice, optimizer="sgd")
        plan = plan_layouts(graph, layouts, CLUSTER, workload, {"stages": 1}).plan
        assert plan.layouts is not None and plan.layouts.time_s == layouts.time_s
        read = chosen(graph, 2, plan.layouts.state, plan.layouts.strategies)
        assert {k: str(s) for k, s in read.strategies.items()} == {k: str(s) for k, s in choice.strategies.items()}
        assert {k: v for k, v in read.state.items() if v.split} == {k: v for k, v in choice.state.items() if v.split}


def test_layouts_that_are_not_legal_are_refused_by_name(graph: Graph) -> None:
    choice = random_choice(Program.of(graph, 2), random.Random(0))
    key = next(iter(choice.state))
    wrong = dataclasses.replace(choice, state={**choice.state, key: S(0, 1, 1)})
    with pytest.raises(UsageError, match="cannot be laid out"):
        priced(graph, LayoutPrices(graph, CLUSTER), CLUSTER, 2, wrong)
