"""The evaluation capture on shards: the conversions of training, and the results of the model, whole on every rank."""

from __future__ import annotations

import difflib
import functools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopart.cluster import Cluster, Link
from autopart.graph import Capture, Graph
from autopart.profiler import LayoutPrices
from autopart.runtime import collectives, split_operators
from autopart.runtime.shards import cut
from autopart.sharding import LocalGraph, Program, random_choice, rewrite
from autopart.solver.layouts import choose_layouts
from autopart.tracer import trace
from tests.sharding.models import build
from tests.sharding.ranks import ThreadRanks
from tests.sharding.running import in_double, own_copy, run_capture, tensors_of


class Dropped(nn.Module):
    """Dropout, attention with dropout and batch norm: what they do depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (z.view(4, 2, 4, 2).transpose(1, 2) for z in self.qkv(x).view(4, 2, 24).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        y = self.norm(self.out(y.transpose(1, 2).reshape(8, 8)))
        return F.dropout(y, 0.25, self.training)


@functools.cache
def traced(name: str) -> tuple[Graph, list[torch.Tensor]]:
    if name == "dropped":
        torch.manual_seed(1)
        x = torch.randn(8, 8, dtype=torch.float64)
        return trace(Dropped().double(), (x,), check=False), [x]
    model, args, kwargs = build(name)
    return in_double(trace(model, args, kwargs, check=False)), tensors_of(list(args)) + tensors_of(kwargs)


@functools.cache
def splits(name: str, t: int) -> list[LocalGraph]:
    """Under five random choices of layouts, and under the chosen one."""
    graph, _ = traced(name)
    program = Program.of(graph, t)
    choices = [random_choice(program, random.Random(seed)) for seed in range(5)]
    cluster, link = Cluster.parse("4xCPU"), Link("test", 1e-9, 1e10)
    cluster = Cluster(cluster.devices, cluster.nodes, link, link)
    choices.append(choose_layouts(graph, LayoutPrices(graph, cluster), cluster, t).choice)
    return [rewrite(graph, choice, t) for choice in choices]


def calls(capture: Capture) -> list[tuple[Any, ...]]:
    """Target, constants, and innermost module call of every operator and conversion."""
    found = []
    for node in capture.calls:
        constant = fx.node.map_arg((node.args, node.kwargs), lambda n: None)
        of_shards = node.target.__module__ == collectives.__name__
        place = next(reversed(node.meta.get("nn_module_stack") or {}), "")
        found.append((str(node.target), str(constant) if of_shards else "", place))
    return found


MODELS = ("gpt2", "llama", "bert", "resnet", "dropped")


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_both_captures_make_the_same_conversions(name: str, t: int) -> None:
    graph, _ = traced(name)
    whole = difference(graph.training, graph.evaluation)
    for local in splits(name, t):
        found = difference(local.training, local.evaluation)
        gathered = sum(split is not None for split in local.output_splits)
        assert [call for call in found[0] if call not in whole[0]] == []
        new = [call for call in found[1] if call not in whole[1]]
        assert len(new) <= gathered and all("all_gather" in call[0] and call[2] == "" for call in new), new


def difference(training: Capture, evaluation: Capture) -> tuple[list[Any], list[Any]]:
    """Calls of one capture that the other lacks."""
    a, b = calls(training), calls(evaluation)
    found: tuple[list[Any], list[Any]] = ([], [])
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            found[0].extend(a[i:j])
            found[1].extend(b[k:m])
    return found


def evaluated(local: LocalGraph, inputs: list[torch.Tensor]) -> list[list[Any]]:
    """The results of the evaluation capture on every rank."""

    def program(rank: int) -> list[Any]:
        state = {}
        for key, split in local.shards.items():
            full = local.whole.state[key].tensor.detach()
            state[key] = full.clone() if split is None else cut(full, split.dim, split.parts, rank, local.tensor)
        return run_capture(local, local.evaluation, state, [x.clone() for x in inputs])

    return ThreadRanks(local.tensor).run(program)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_computes_what_the_model_computes(name: str, t: int) -> None:
    graph, inputs = traced(name)
    state = {key: own_copy(entry.tensor) for key, entry in graph.state.items()}
    wanted = run_capture(graph, graph.evaluation, state, inputs)
    for local in splits(name, t):
        for found in evaluated(local, inputs):
            for a, b in zip(found, wanted, strict=True):
                assert a is b is None or torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_split_operators_are_one_call_in_both_modes() -> None:
    graph, _ = traced("dropped")
    program, used = Program.of(graph, 2), set()
    for seed in range(20):
        local = rewrite(graph, random_choice(program, random.Random(seed)), 2)
        both = [{n.target for n in c.calls if n.target in SPLIT} for c in (local.training, local.evaluation)]
        assert both[0] == both[1]
        used |= both[0]
    assert used == SPLIT


SPLIT = {split_operators.dropout, split_operators.attention, split_operators.batch_norm_of_split_batch}
