"""The fingerprint of a captured graph: equal for equal structure, in every process."""

from __future__ import annotations

import hashlib
from types import FunctionType
from typing import Any

import torch
from torch.fx.node import map_arg

from autopart.graph import Capture, Graph


def signature(graph: Graph) -> str:
    """sha256 over operators, arguments, shapes, dtypes, contexts, state names, inputs, outputs and structures.

    Devices are left out: a model on `meta` and the same model with weights have one signature. So are node names.
    """
    digest = hashlib.sha256()

    def put(*items: Any) -> None:
        digest.update(repr(items).encode() + b"\n")

    put(graph.name, graph.mode, graph.microbatch_size, str(graph.dtype), graph.loss)
    for entry in graph.state.values():
        put(
            entry.key,
            entry.names if entry.kind != "constant" else (),
            entry.kind,
            entry.persistent,
            _kind(entry.tensor),
        )
    for spec in graph.inputs:
        put(spec.path, spec.shape, str(spec.dtype), spec.batch_dim)
    for output in graph.outputs:
        put(output.path, output.shape, str(output.dtype), output.batch_dim)
    put(graph.call, graph.result)
    for call in graph.opaque.values():
        put(call.key, call.kind, call.path)
    for capture in (graph.training, graph.evaluation):
        if capture is not None:
            _put_capture(capture, put)
    return digest.hexdigest()


def _put_capture(capture: Capture, put: Any) -> None:
    number = {node: f"%{i}" for i, node in enumerate(capture.graph.nodes)}

    def text(arg: Any) -> str:
        return repr(_plain(map_arg(arg, lambda n: _Name(number[n]))))  # type: ignore[arg-type,return-value]

    for node in capture.graph.nodes:
        target = _target(node.target) if node.op != "placeholder" else ""
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        kwargs = {k: v for k, v in sorted(node.kwargs.items()) if k != "device"}
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        put(node.op, target, text(node.args), text(kwargs), [_kind(v) for v in values], stack)
        put(
            node.meta.get("grad_enabled"),
            str(node.meta.get("autocast")),
            node.meta.get("checkpoint"),
            node.meta.get("requires_grad"),
        )


def _target(target: Any) -> str:
    """An operator or a key as it is written; a plain function by its name, for its text holds an address."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)


def _plain(arg: Any) -> Any:
    """Containers of fx as ordinary ones, devices without their name."""
    if isinstance(arg, (list, tuple)):
        return [_plain(item) for item in arg]
    if isinstance(arg, dict):
        return {key: _plain(item) for key, item in arg.items()}
    if isinstance(arg, torch.device):
        return "device"
    return arg


def _kind(value: Any) -> Any:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else None


class _Name:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text
