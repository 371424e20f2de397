"""A captured graph and its local rewriting, executed by conventions; and the model itself in eager mode."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from autopart.graph import Capture, Graph
from autopart.runtime.shards import cut, join
from autopart.sharding.layouts import Split
from autopart.sharding.rewrite import LocalGraph
from tests.sharding.ranks import ThreadRanks


def run_capture(
    graph: Graph,
    capture: Capture,
    state: dict[str, torch.Tensor],
    inputs: list[torch.Tensor],
    values: dict[str, Any] | None = None,
) -> list[Any]:
    """The flat outputs of a capture on the given state; `values` receives the value of every node by name."""
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)

    def look(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return env[arg]
        if isinstance(arg, (list, tuple)):
            return [look(a) for a in arg] if isinstance(arg, list) else tuple(look(a) for a in arg)
        return arg

    for node in capture.graph.nodes:
        if node.op == "output":
            return [look(a) for a in node.args[0]]
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = state[node.target]
        else:
            call = graph.opaque[node.target].call if node.op == "call_module" else node.target
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(node.meta["grad_enabled"]))
                for device, dtype in node.meta["autocast"]:
                    stack.enter_context(torch.autocast(device, dtype))
                env[node] = call(*look(node.args), **{k: look(v) for k, v in node.kwargs.items()})
        if values is not None:
            values[node.name] = env[node]
    raise AssertionError("no output node")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensor leaves of a call, in the order of `Graph.inputs`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def run_whole(graph: Graph, inputs: list[torch.Tensor]) -> dict[str, Any]:
    """Loss, outputs, gradients and buffers of the unsplit capture."""
    state = {key: own_copy(entry.tensor) for key, entry in graph.state.items()}
    outputs = run_capture(graph, graph.primary, state, inputs)
    outputs[graph.loss].backward()
    return {
        "outputs": [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs],
        "gradients": {graph.state[k].name: t.grad for k, t in state.items() if t.requires_grad},
        "buffers": {graph.state[k].name: t.detach() for k, t in state.items() if not t.requires_grad},
    }


def run_split(local: LocalGraph, inputs: list[torch.Tensor], rtol: float = 1e-9) -> tuple[dict[str, Any], ThreadRanks]:
    """The same from the local graph on threads, shards joined; what is replicated must be equal on all ranks.

    The loss is whole on every rank; other results may be shards.
    """
    assert local.output_splits[local.loss] is None
    t = local.tensor
    ranks = ThreadRanks(t)
    whole = local.whole.state

    def program(rank: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
        state = {}
        for key, split in local.shards.items():
            full = whole[key].tensor
            mine = full.detach().clone() if split is None else cut(full.detach(), split.dim, split.parts, rank, t)
            assert mine.shape == local.state[key].tensor.shape
            state[key] = mine.requires_grad_(full.requires_grad)
        outputs = run_capture(local, local.primary, state, [x.clone() for x in inputs])
        outputs[local.loss].backward()
        return [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs], state

    found = ranks.run(program)
    results = zip(*(outputs for outputs, _ in found), strict=True)
    joined = [joined_result(list(held), split, rtol) for held, split in zip(results, local.output_splits, strict=True)]
    merged: dict[str, Any] = {"outputs": joined, "gradients": {}, "buffers": {}}
    for key, split in local.shards.items():
        entry = whole[key]
        values = [state[key].grad if entry.requires_grad else state[key].detach() for _, state in found]
        place = merged["gradients"] if entry.requires_grad else merged["buffers"]
        if any(v is None for v in values):
            assert all(v is None for v in values), entry.name
            place[entry.name] = None
        elif split is not None:
            place[entry.name] = join(values, split.dim, split.parts)
        else:
            for value in values[1:]:
                assert torch.allclose(value, values[0], rtol=rtol, atol=rtol / 1000), (
                    f"{entry.name} differs between ranks"
                )
            place[entry.name] = values[0]
    return merged, ranks


def joined_result(held: list[Any], split: Split | None, rtol: float) -> Any:
    """One result from what the ranks hold of it."""
    if split is not None:
        return join(held, split.dim, split.parts)
    for other in held[1:]:
        assert held[0] is other is None or torch.allclose(held[0], other, rtol=rtol, atol=rtol / 1000, equal_nan=True)
    return held[0]


def worst_error(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Largest relative error of the outputs, gradients and buffers; gradients are held against the largest of all."""
    errors = {"outputs": 0.0, "gradients": 0.0, "buffers": 0.0}
    scale = max((float(g.abs().max()) for g in wanted["gradients"].values() if g is not None), default=1.0)
    for a, b in zip(found["outputs"], wanted["outputs"], strict=True):
        errors["outputs"] = max(errors["outputs"], _error(a, b, 0.0))
    assert found["gradients"].keys() == wanted["gradients"].keys()
    assert found["buffers"].keys() == wanted["buffers"].keys()
    for name, value in wanted["gradients"].items():
        errors["gradients"] = max(errors["gradients"], _error(found["gradients"][name], value, 1e-6 * scale))
    scale = max((float(b.abs().max()) for b in wanted["buffers"].values() if b.is_floating_point()), default=1.0)
    for name, value in wanted["buffers"].items():
        errors["buffers"] = max(errors["buffers"], _error(found["buffers"][name], value, 1e-6 * scale))
    return errors


def _error(a: torch.Tensor | None, b: torch.Tensor | None, floor: float) -> float:
    if a is None or b is None:
        zero = all(x is None or not x.any() for x in (a, b))
        return 0.0 if zero else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    difference = torch.where(a == b, 0.0, (a - b).abs())  # equal infinities differ by nothing
    return float(difference.max() / max(float(b.abs().nan_to_num(0, 0, 0).max()), floor, 1e-300))


def in_double(graph: Graph) -> Graph:
    """The same graph with its casts to float32 raised to float64 (libraries cast losses and norms)."""
    for capture in (graph.training, graph.evaluation):
        if capture is None:
            continue
        mode = next(n for n in capture.graph.nodes).meta["val"].fake_mode
        for node in capture.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, _raise)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _raise)
            if node.op == "call_function":
                with mode, torch.no_grad():
                    values = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                    node.meta["val"] = node.target(*values[0], **values[1])
    return graph


def _raise(arg: Any) -> Any:
    return torch.float64 if arg is torch.float32 else arg


def parameters_of(model: nn.Module) -> list[str]:
    """Every parameter's canonical name."""
    return [name for name, _ in model.named_parameters()]
