"""The classic splits fall out of the rules: forced by the names of the linear layers alone, everything else follows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from torch import fx

from autopart.graph import Graph
from autopart.sharding import Choice, Layout, Program, S, collectives_of, describe, following, rewrite
from autopart.tracer import trace
from tests.sharding.models import build
from tests.sharding.running import in_double, run_split, run_whole, tensors_of, worst_error


@dataclass(frozen=True)
class Classic:
    """Part of a parameter's name -> the label that its operator is cut by, and how the parameter is held."""

    labels: dict[str, tuple[str, int, tuple[float, ...]]]
    copies: int  # all-reduces of gradients in a block


# Shares are of the dimension that is cut: one part, or the parts of a fused weight.
CLASSICS = {
    "llama": Classic(
        {
            **{f"{x}_proj.weight": ("n", 0, (1,)) for x in ("q", "k", "v", "gate", "up")},
            "o_proj.weight": ("k", 1, (1,)),
            "down_proj.weight": ("k", 1, (1,)),
            "embed_tokens": ("vocabulary", 0, (1,)),
            "lm_head": ("n", 0, (1,)),
        },
        copies=2,
    ),
    "phi3": Classic(
        {
            "qkv_proj.weight": ("n", 0, (2 / 3, 1 / 6, 1 / 6)),
            "o_proj.weight": ("k", 1, (1,)),
            "gate_up_proj.weight": ("n", 0, (1 / 2, 1 / 2)),
            "down_proj.weight": ("k", 1, (1,)),
            "embed_tokens": ("vocabulary", 0, (1,)),
            "lm_head": ("n", 0, (1,)),
        },
        copies=2,
    ),
    "gpt2": Classic(
        {
            "c_attn.weight": ("n", 1, (1 / 3, 1 / 3, 1 / 3)),
            "c_attn.bias": ("n", 0, (1 / 3, 1 / 3, 1 / 3)),
            "attn.c_proj.weight": ("k", 0, (1,)),
            "c_fc.weight": ("n", 1, (1,)),
            "c_fc.bias": ("n", 0, (1,)),
            "mlp.c_proj.weight": ("k", 0, (1,)),
            "wte": ("vocabulary", 0, (1,)),
        },
        copies=2,
    ),
}


def classic_choice(graph: Graph, program: Program, classic: Classic) -> Choice:
    state: dict[str, Layout] = {}
    wanted = {}
    for node in program.layouts:
        if node.op != "get_attr":
            continue
        entry = graph.state[str(node.target)]
        for name, (label, dim, shares) in classic.labels.items():
            if name in entry.name:
                size = entry.tensor.shape[dim]
                layout = S(dim, *(round(size * share) for share in shares))
                assert layout in program.layouts[node], f"{entry.name} cannot be held as {layout}"
                state[str(node.target)] = layout
                for user in node.users:
                    own = "n" if label == "vocabulary" and "linear" in str(user.target) else label
                    wanted[user.name] = strategy_of(program, user, node, own, layout)
    for node in program.operations:
        if "cross_entropy" in str(node.target):
            wanted[node.name] = next(s for s in program.strategies[node] if s.name == "vocabulary")
    return following(program, state, wanted)


def strategy_of(program: Program, user: fx.Node, state: fx.Node, label: str, layout: Layout):
    place = program.operations[user].operands.index(state)
    return next(s for s in program.strategies[user] if s.name == label and s.inputs[place] == layout)


@pytest.mark.parametrize("t", [2])
@pytest.mark.parametrize("name", CLASSICS)
def test_column_then_row_needs_two_all_reduces_a_block_each_way(name: str, t: int) -> None:
    model, args, kwargs = build(name)
    graph = in_double(trace(model, args, kwargs, check=False))
    program = Program.of(graph, t)
    choice = classic_choice(graph, program, CLASSICS[name])
    local = rewrite(graph, choice, t)
    inputs = tensors_of(list(args)) + tensors_of(kwargs)
    found, _ = run_split(local, inputs)
    assert max(worst_error(found, run_whole(graph, inputs)).values()) < 1e-9
    # Two a block each way; the embedding forward, the head backward; the logits stay shards in training.
    sent = [s for s in collectives_of(local.primary, t) if s.forward_bytes + s.backward_bytes > 0]
    blocks = 2
    activation = 2 * 2 * 8 * 32 * 8 * (t - 1) // t  # an all-reduce of [2, 8, 32] in float64
    assert Counter((s.forward, s.forward_bytes) for s in sent if s.forward == "all_reduce") == {
        ("all_reduce", activation): 2 * blocks + 1
    }, sent
    assert Counter((s.backward, s.backward_bytes) for s in sent if s.backward) == {
        ("all_reduce", activation): 2 * blocks + 1
    }, sent
    assert not [s.forward for s in sent if s.forward not in (None, "all_reduce")], sent
    logits = next(i for i, output in enumerate(graph.outputs) if "logits" in output.path)
    assert [i for i, split in enumerate(local.output_splits) if split] == [logits]
    evaluated = [s for s in collectives_of(local.evaluation, t) if s.forward not in (None, "all_reduce")]
    assert [s.forward for s in evaluated] == ["all_gather"], evaluated
    matrices = [key for key, entry in graph.state.items() if entry.kind == "parameter" and entry.tensor.dim() == 2]
    for key in matrices:
        if "wpe" not in graph.state[key].name:
            # A vocabulary of 41 is padded to 42 rows.
            rows, columns = graph.state[key].tensor.shape
            halves = {math.ceil(rows / t) * columns, rows * math.ceil(columns / t)}
            assert local.state[key].tensor.numel() in halves, graph.state[key].name
    words = " ".join(describe(graph, choice, t).values())
    assert "column" in words and "row" in words and "vocabulary" in words
    heads = [n for n in local.primary.calls if "scaled_dot_product" in str(n.target)]
    assert heads and all(n.meta["val"].shape[1] * t == (4 if name == "gpt2" else 8) for n in heads)
