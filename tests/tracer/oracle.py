"""Eager PyTorch against a captured graph, step by step; shares no code with the tracer's own check."""

from __future__ import annotations

import copy
import operator
import random
from contextlib import ExitStack
from typing import Any

import numpy
import torch
from torch import nn

from autopart.graph import Capture, Graph
from autopart.tracer import trace


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """Tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in flat_tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat_tensors(v)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for name in value.__dataclass_fields__ for t in flat_tensors(getattr(value, name))]
    return []


def run(graph: Graph, capture: Capture, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Execute a capture as its conventions say."""
    env: dict[str, Any] = {}
    feed = list(inputs)

    def look(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return env[arg.name]
        if isinstance(arg, (list, tuple)):
            return type(arg)(look(a) for a in arg) if type(arg) in (list, tuple) else [look(a) for a in arg]
        if isinstance(arg, dict):
            return {k: look(v) for k, v in arg.items()}
        return arg

    for node in capture.graph.nodes:
        if node.op == "output":
            return [look(a) for a in node.args[0]]
        if node.op == "placeholder":
            env[node.name] = feed.pop(0)
        elif node.op == "get_attr":
            env[node.name] = graph.state[node.target].tensor
        else:
            assert node.op in ("call_function", "call_module")
            call = graph.opaque[node.target].call if node.op == "call_module" else node.target
            if node.op == "call_function":
                assert call is operator.getitem or isinstance(call, torch._ops.OpOverload), call
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(node.meta["grad_enabled"]))
                for device, dtype in node.meta["autocast"]:
                    stack.enter_context(torch.autocast(device, dtype))
                env[node.name] = call(*look(node.args), **look(node.kwargs))
    raise AssertionError("no output node")


def stand_in(outputs: list[torch.Tensor]) -> torch.Tensor:
    return sum((o.square().mean() for o in outputs if o.is_floating_point()), start=torch.zeros(()))


def steps(model: nn.Module, call: Any, batches: list[Any], own_loss: int | None) -> list[dict[str, Any]]:
    """One record for each batch: outputs, flags, gradients by name, buffers, random states."""
    records = []
    for number, batch in enumerate(batches):
        seed(100 + number)
        model.zero_grad(set_to_none=True)
        outputs = call(batch)
        loss = outputs[own_loss] if own_loss is not None else stand_in(outputs)
        if loss.requires_grad:
            loss.backward()
        records.append(
            {
                "outputs": [o.detach().clone() for o in outputs],
                "flags": [o.requires_grad for o in outputs],
                "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
                "buffers": {n: b.detach().clone() for n, b in model.named_buffers()},
                "torch": torch.random.get_rng_state(),
                "python": random.getstate(),
                "numpy": (numpy.random.get_state()[1].tobytes(), numpy.random.get_state()[2]),
            }
        )
    return records


def second_batch(batch: Any) -> Any:
    """Other data of the same shape."""
    if isinstance(batch, torch.Tensor):
        if batch.is_floating_point():
            return (batch * -0.5 + 0.25).detach()
        return batch.flip(0) if batch.dim() else batch.clone()
    if isinstance(batch, dict):
        return type(batch)((k, second_batch(v)) for k, v in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(second_batch(v) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(second_batch(v) for v in batch)
    if hasattr(batch, "__dataclass_fields__"):
        return type(batch)(**{n: second_batch(getattr(batch, n)) for n in batch.__dataclass_fields__})
    return batch


def differences(
    make: Any, steps_count: int = 2, modes: tuple[bool, ...] = (True, False), coarse: bool = False, **options: Any
) -> list[str]:
    """What differs between captures and eager, in both modes.

    `make()` gives (model, args, kwargs), equal at every call: each side and each mode has its own model, so that Python
    state of one cannot repair the other.
    """
    found = []
    for train in modes:
        seed(0)
        model, args, kwargs = make()
        seed(0)
        twin = make()[0]
        seed(1)
        graph = trace(model, args, kwargs, **{"check": False} | options)
        capture = graph.training if train else graph.evaluation
        assert capture is not None
        model.train(train)
        twin.train(train)
        batches = [(args, kwargs), second_batch((args, kwargs))][:steps_count]
        own = graph.loss if graph.loss_name in ("loss", "output", "[0]") else None

        def eager(batch: Any, twin: nn.Module = twin) -> list[torch.Tensor]:
            batch = copy.deepcopy(batch)
            return flat_tensors(twin(*batch[0], **batch[1]))

        def captured(
            batch: Any, graph: Graph = graph, capture: Capture = capture, own: Any = own
        ) -> list[torch.Tensor]:
            outputs = run(graph, capture, flat_tensors(copy.deepcopy(batch)))
            return outputs if own is not None else outputs[:-1]

        wanted = steps(twin, eager, batches, own)
        got = steps(model, captured, batches, own)
        for number, (a, b) in enumerate(zip(wanted, got, strict=True)):
            found += [f"{'train' if train else 'eval'} step {number}: {text}" for text in _compare(a, b, coarse)]
    return found


def _compare(a: dict[str, Any], b: dict[str, Any], coarse: bool) -> list[str]:
    found = []
    relative = 2e-2 if coarse else 1e-4

    def same(x: torch.Tensor, y: torch.Tensor, least: float = 0.0) -> bool:
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        scale = float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() and x.dtype != torch.bool else 0.0
        return torch.allclose(x, y, rtol=relative, atol=relative * max(scale, least), equal_nan=True)

    if len(a["outputs"]) != len(b["outputs"]):
        return [f"{len(a['outputs'])} outputs against {len(b['outputs'])}"]
    found += [f"output {i}" for i, (x, y) in enumerate(zip(a["outputs"], b["outputs"], strict=True)) if not same(x, y)]
    if a["flags"] != b["flags"]:
        found.append(f"requires_grad {a['flags']} against {b['flags']}")
    # Against the largest gradient, that of a key projection's bias is nothing but rounding.
    noise = 1e-4 * max((float(g.abs().max()) for g in a["gradients"].values() if g is not None), default=0.0)
    for name, x in a["gradients"].items():
        y = b["gradients"][name]
        if (x is None) != (y is None):
            found.append(f"gradient of {name}: None or not")
        elif x is not None and not same(x, y, noise):
            found.append(f"gradient of {name}")
    found += [f"buffer {name}" for name, x in a["buffers"].items() if not same(x, b["buffers"][name])]
    found += [f"{name} random state" for name in ("python", "numpy") if a[name] != b[name]]
    if not torch.equal(a["torch"], b["torch"]):
        found.append("torch random state")
    return found
