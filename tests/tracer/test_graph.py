"""What a Graph says besides its operators: state, ties, structure, places that no cut may separate, fingerprint."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_hazards import HAZARDS, Pair
from torch import nn

from autopart.errors import CaptureError, UsageError
from autopart.graph_signature import signature
from autopart.runtime.structure import Record, decode, encode, leaves
from autopart.tracer import trace


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids).mean(1)
        for block in self.blocks:
            h = h + block(h) * self.scale
        return self.head(h)


def traced(**options: Any) -> Any:
    torch.manual_seed(0)
    return trace(Tied(), (torch.randint(0, 16, (4, 5)),), **options)


def test_state_lists_every_name_once_in_the_order_of_the_state_dict() -> None:
    graph = traced()
    names = [n for e in graph.state.values() for n in e.names if e.persistent]
    assert sorted(names) == sorted(Tied().state_dict())
    first = [e.name for e in graph.state.values() if e.persistent]
    assert first == [n for n in Tied().state_dict() if n != "head.weight"]
    (tied,) = [e for e in graph.state.values() if len(e.names) > 1]
    assert tied.names == ("emb.weight", "head.weight") and tied.kind == "parameter"
    assert {e.name for e in graph.state.values() if not e.used} == {"unused.weight", "unused.bias"}
    assert [e.name for e in graph.state.values() if not e.persistent] == ["scale"]
    assert set(graph.initialization) == set(graph.state)


def test_ties_are_found_on_meta() -> None:
    with torch.device("meta"):
        model, ids = Tied(), torch.zeros(4, 5, dtype=torch.long)
    graph = trace(model, (ids,))
    assert sum(len(e.names) == 2 for e in graph.state.values()) == 1


def test_state_tensors_are_the_models_own() -> None:
    model = Tied()
    graph = trace(model, (torch.zeros(4, 5, dtype=torch.long),))
    own = {id(t) for t in [*model.parameters(), *model.buffers()]}
    assert {id(e.tensor) for e in graph.state.values()} == own


def test_parameters_that_overlap_are_refused_by_name() -> None:
    class Overlap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(4, 4)
            self.w, self.part = nn.Parameter(whole), nn.Parameter(whole[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    with pytest.raises(CaptureError, match="'w' and 'part' share memory"):
        trace(Overlap(), (torch.randn(2, 4),))


def test_a_hook_on_a_parameter_is_refused_by_name() -> None:
    model = Tied()
    model.blocks[0][0].weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match=r"'blocks.0.0.weight' has a gradient hook"):
        trace(model, (torch.zeros(4, 5, dtype=torch.long),))


def test_module_paths_are_those_of_the_model() -> None:
    graph = traced()
    paths = {path for n in graph.primary.calls for path, _ in n.meta["nn_module_stack"].values()}
    assert {"", "emb", "blocks.0", "blocks.1.0", "head"} <= paths
    assert paths <= set(graph.modules)
    loss = graph.primary.graph.find_nodes(op="call_function", target=torch.ops.aten.square.default)
    assert all(n.meta["nn_module_stack"] == {} for n in loss)
    assert all("test_graph.py" in n.meta["stack_trace"] for n in graph.primary.calls if n.meta["nn_module_stack"])


def test_batch_norm_stays_with_its_counter_and_a_value_with_its_changes() -> None:
    graph = traced()
    sets = [{str(n) for n in group} for group in graph.training.colocated]
    for norm in graph.training.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        (group,) = [g for g in sets if norm.name in g]
        assert any(name.startswith("add_") for name in group)
    model, args, kwargs = HAZARDS["zeros_filled_piece_by_piece"]()
    graph = trace(model, args, kwargs)
    changes = graph.training.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    zeros = graph.training.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros_like.default)[0]
    assert any({c.name for c in changes} | {zeros.name} <= group for group in graph.training.colocated)


def test_an_operator_stays_with_its_getitems() -> None:
    class Chunks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = x.chunk(3, -1)
            return a * b + c

    graph = trace(Chunks(), (torch.randn(4, 6),), mode="inference")
    (group,) = graph.evaluation.colocated
    assert len(group) == 4


def test_every_node_says_whether_autograd_tracks_it() -> None:
    """Against eager flags, by an interpreter that looks at each value."""
    for name in ("frozen_and_unused", "context_no_grad", "view_changed_in_place", "function_two_outputs_and_none"):
        model, args, kwargs = HAZARDS[name]()
        graph = trace(model, args, kwargs, check=False)
        env: dict[str, Any] = {}
        stamped = {}
        for node in graph.training.graph.nodes:
            look = functools.partial(torch.fx.node.map_arg, fn=lambda n, env=env: env[n.name])
            if node.op == "placeholder":
                env[node.name] = args[0].clone()
            elif node.op == "get_attr":
                env[node.name] = graph.state[node.target].tensor
            elif node.op != "output":
                call = graph.opaque[node.target].call if node.op == "call_module" else node.target
                with torch.set_grad_enabled(node.meta["grad_enabled"]):
                    env[node.name] = call(*look(node.args), **look(node.kwargs))
            if node.op != "output":
                stamped[node.name] = node.meta["requires_grad"]
        for key, value in env.items():
            actual = [v.requires_grad for v in value] if isinstance(value, (list, tuple)) else value.requires_grad
            assert stamped[key] == actual, (name, key)


def test_an_input_changed_in_place_is_copied_and_noted() -> None:
    model, args, kwargs = HAZARDS["input_changed_in_place"]()
    graph = trace(model, args, kwargs)
    assert any("changes the input 'x'" in note for note in graph.notes)
    (node,) = graph.primary.graph.find_nodes(op="placeholder")
    assert [u.target for u in node.users] == [torch.ops.aten.clone.default]


def test_checkpoint_regions_are_marked() -> None:
    model, args, kwargs = HAZARDS["checkpoint_with_dropout"]()
    graph = trace(model, args, kwargs)
    marked = [n.target for n in graph.training.calls if n.meta["checkpoint"] is not None]
    assert torch.ops.aten.dropout.default in marked and torch.ops.aten.square.default not in marked


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_loss_is_the_models_own_or_given_or_stands_in(mode: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            y = self.l(x)
            return y if labels is None else {"logits": y, "loss": F.cross_entropy(y, labels)}

    x, labels = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    own = trace(Own(), (x,), {"labels": labels}, mode=mode)  # type: ignore[arg-type]
    given = trace(Own(), (x,), mode=mode, loss_fn=F.cross_entropy, target=labels)  # type: ignore[arg-type]
    standing = trace(Own(), (x,), mode=mode)  # type: ignore[arg-type]
    if mode == "inference":
        assert own.loss is given.loss is standing.loss is None
        assert given.training is None and [i.path for i in given.inputs] == ["args[0]"]
        return
    assert (own.loss, own.loss_name) == (1, "loss") and len(own.outputs) == 2
    assert given.loss_name == "loss_fn" and [i.path for i in given.inputs] == ["args[0]", "target"]
    assert [i.batch_dim for i in given.inputs] == [0, 0]
    assert standing.loss == 1 and standing.loss_name.startswith("stand-in")
    assert given.outputs[given.loss].path == standing.outputs[standing.loss].path == "loss"


def test_a_loss_function_that_gives_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="one floating number"):
        trace(nn.Linear(4, 3), (torch.randn(2, 4),), loss_fn=lambda y, t: y - t, target=torch.randn(2, 3))
    with pytest.raises(UsageError, match="without target"):
        trace(nn.Linear(4, 3), (torch.randn(2, 4),), loss_fn=F.mse_loss)


def test_what_evaluation_mode_does_not_return_is_none_and_noted() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            h = self.a(x)
            return (h, self.b(h)) if self.training else h

    graph = trace(Auxiliary(), (torch.randn(3, 4),))
    (output,) = graph.evaluation.graph.find_nodes(op="output")
    assert [o.path for o in graph.outputs] == ["[0]", "[1]", "loss"]
    assert [a is None for a in output.args[0]] == [False, True, False]
    assert any("evaluation mode" in note for note in graph.notes)


def test_dtype_converts_a_copy() -> None:
    model = Tied()
    graph = trace(model, (torch.zeros(4, 5, dtype=torch.long),), dtype=torch.float64)
    assert graph.dtype is torch.float64 and model.emb.weight.dtype is torch.float32
    assert graph.outputs[0].dtype is torch.float64 and graph.state["t0"].tensor.dtype is torch.float64


def test_structures_survive_a_round_trip() -> None:
    x = torch.ones(2)
    for value in (
        {"a": [x, None, (x, 1.5, float("inf"))], "b": {"c": True, 3: "s"}},
        Pair(x, {"deep": [x]}, "n"),
        HAZARDS["named_tuple_out"]()[0](x.expand(2, 6, 2).reshape(4, 6)),
    ):
        structure, tensors = encode(value)
        again = decode(json.loads(json.dumps(structure)), tensors)
        assert type(again) is type(value) and repr(again) == repr(value)
        assert [number for _, number in leaves(structure)] == list(range(len(tensors)))


def test_what_an_operator_returns_keeps_its_class() -> None:
    values = torch.randn(3, 4).max(dim=1)
    structure, tensors = encode({"best": values})
    again = decode(json.loads(json.dumps(structure)), tensors)["best"]
    assert type(again) is type(values)
    assert torch.equal(again.values, values.values) and torch.equal(again.indices, values.indices)


def test_a_class_that_cannot_be_imported_becomes_a_record() -> None:
    structure, tensors = encode(Pair(torch.ones(1)))
    structure["object"] = "no_such_module:Pair"
    record = decode(structure, tensors)
    assert isinstance(record, Record) and record.first is record["first"] and record.note == ""


def test_the_fingerprint_is_equal_in_every_process_and_changes_with_the_graph() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests/tracer'); import test_graph, torch\n"
        "from autopart.graph_signature import signature\n"
        "print(signature(test_graph.traced()))"
    )
    seen = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(1)
    }
    assert seen == {signature(traced())}
    assert signature(traced(microbatches=2)) != signature(traced())
    assert signature(traced(mode="inference")) != signature(traced())
