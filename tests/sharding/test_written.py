"""Choices as text: every strategy has a text of its own, and what a plan holds is read back as it was."""

from __future__ import annotations

import functools
import random
import zlib
from typing import Any

import pytest

from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.sharding import Program, R, chosen, random_choice, rewrite, written
from autopart.tracer import trace
from tests.sharding.models import MODELS, build
from tests.sharding.test_rules import CASES, example_arguments, one_node


@functools.cache
def traced(name: str) -> Graph:
    model, args, kwargs = build(name)
    return trace(model, args, kwargs, check=False)


def assert_unique(program: Program) -> None:
    for node, strategies in program.strategies.items():
        texts = [str(strategy) for strategy in strategies]
        assert len(set(texts)) == len(texts), (node.name, texts)
    for node, layouts in program.layouts.items():
        assert len(set(map(str, layouts))) == len(layouts), node.name


@pytest.mark.parametrize(("target", "example", "t"), CASES, ids=lambda value: str(value))
def test_strategies_of_an_operator_have_texts_of_their_own(target: Any, example: str, t: int) -> None:
    args, kwargs = example_arguments(example, zlib.crc32(example.encode()))
    assert_unique(Program(one_node(target, args, kwargs)[0], t))


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_choice_is_read_back_as_it_was_written(name: str, t: int) -> None:
    graph = traced(name)
    program = Program.of(graph, t)
    assert_unique(program)
    choice = random_choice(program, random.Random(1))
    state, strategies = written(graph, choice)
    assert state and all(text != "R" for text in state.values())
    assert set(state) <= {entry.name for entry in graph.state.values()}
    found = chosen(graph, t, state, strategies)
    assert found.state == {key: layout for key, layout in choice.state.items() if layout != R}
    assert {name: s.key for name, s in found.strategies.items()} == {n: s.key for n, s in choice.strategies.items()}
    again, wanted = rewrite(graph, found, t), rewrite(graph, choice, t)
    for capture, other in ((again.primary, wanted.primary), (again.evaluation, wanted.evaluation)):
        assert str(capture.graph) == str(other.graph)


def test_what_the_graph_does_not_allow_is_refused_by_name() -> None:
    graph = traced("llama")
    program = Program.of(graph, 2)
    state, strategies = written(graph, random_choice(program, random.Random(1)))
    node = next(iter(program.strategies)).name
    name = next(iter(state))
    for wrong in (
        ({**state, name: "S(7)"}, strategies),
        ({**state, "model.nothing": "S(0)"}, strategies),
        (state, {**strategies, node: "n: R -> S(9)"}),
        (state, {key: text for key, text in strategies.items() if key != node}),
        (state, {**strategies, "nobody": "replicated: R -> R"}),
    ):
        with pytest.raises(UsageError, match="plan anew"):
            chosen(graph, 2, *wrong)
