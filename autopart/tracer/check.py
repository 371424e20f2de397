"""The self-check: the captured graph against the model itself, in values.

Two successive steps with different data, in both modes: a counter, a list that grows or a cache shows only at the second.
Compared are outputs, `requires_grad`, gradients (their absence too), buffers, and the random state afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autopart.errors import UsageError
from autopart.graph import Capture, Graph
from autopart.runtime.structure import decode, encode, omitted
from autopart.tracer.blame import reason_of
from autopart.tracer.call import Recording, choose_loss
from autopart.tracer.interpreter import run_capture
from autopart.tracer.snapshot import random_states, same_random_state, set_random_states, unmarked

# A check that would take longer is cut short; verify compares the package itself anyway.
MOST_SECONDS = 20.0
# A step costs about three forwards, and is run on both sides.
COST = 6
# A gradient this much smaller than the largest one is rounding noise (the bias of a key projection).
NOISE = 1e-4
# Both sides run the same operators in the same order; a kernel may still choose its summation order by alignment.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def disagreement(
    graph: Graph,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
) -> tuple[str | None, list[str]]:
    """What the graph computes otherwise than the model, or None, and notes.

    The model, its buffers and all random states are left as they were. Nothing is checked on `meta`.
    """
    if any(e.tensor.device.type == "meta" for e in graph.state.values()):
        return None, []
    modes = [(train, c) for train, c in ((True, graph.training), (False, graph.evaluation)) if c is not None]
    forward_s = _seconds_of_forward(graph, model, inputs, modes[0][0])
    notes: list[str] = []
    steps = 2
    if forward_s * COST * len(modes) * steps > MOST_SECONDS:
        modes, steps = modes[:1], 1
        if forward_s * COST > MOST_SECONDS:
            return None, [
                "the captured graph was not compared with the model, which is slow here; verify compares the package"
            ]
        notes = ["the captured graph was compared with the model over one step in one mode only, to save time"]
    for train_mode, capture in modes:
        found = _compare(graph, capture, model, inputs, loss_fn, train_mode, steps)
        if found is not None:
            return f"in {'training' if train_mode else 'evaluation'} mode, {found}", notes
    return None, notes


def _seconds_of_forward(graph: Graph, model: nn.Module, inputs: Sequence[torch.Tensor], train_mode: bool) -> float:
    args, kwargs, *_ = decode(graph.call, [t.detach().clone() for t in inputs])
    model.train(train_mode)
    start = time.perf_counter()
    try:
        with torch.no_grad(), unmarked(model, values=True):
            model(*args, **kwargs)
    except Exception as error:
        rows = f"one microbatch of {graph.microbatch_size} rows"
        raise UsageError(
            f"{graph.name} fails on {rows}: {reason_of(error)}", "Use fewer microbatches, or a larger global batch."
        ) from None
    return time.perf_counter() - start


class _Step:
    """What one step left behind."""

    def __init__(self, outputs: list[torch.Tensor], gradients: dict[str, torch.Tensor | None]) -> None:
        self.outputs = [o.detach().clone() for o in outputs]
        self.requires_grad = [o.requires_grad for o in outputs]
        self.gradients = gradients


def _compare(
    graph: Graph,
    capture: Capture,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    train_mode: bool,
    steps: int,
) -> str | None:
    data = [[t.detach().clone() for t in inputs], [varied(t) for t in inputs]][:steps]
    buffers = {e.name: e.tensor for e in graph.state.values() if e.kind == "buffer"}
    model.train(train_mode)
    before = random_states()

    def eager(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs, *target = decode(graph.call, tensors)
        output = model(*args, **kwargs)
        record = Recording()
        record.result, flat = encode(output, "", omitted)
        record.paths = [o.path for o in graph.outputs][: len(flat)]
        if graph.mode == "training":
            _, _, loss = choose_loss(output, record, flat, loss_fn, target[0] if target else None)
            flat += [loss] if loss is not None else []
        return flat

    def captured(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run_capture(graph, capture, tensors)

    sides = []
    for run in (eager, captured):
        with unmarked(model, values=True):
            set_random_states(before)
            done = [_step(graph, run, [t.clone() for t in tensors]) for tensors in data]
            # A buffer may have been replaced; the model's attribute is what counts.
            now = {name: b.detach().clone() for name, b in model.named_buffers() if name in buffers}
            sides.append((done, now, random_states()))
    set_random_states(before)
    (wanted, wanted_buffers, wanted_random), (got, got_buffers, got_random) = sides
    for number, (one, other) in enumerate(zip(wanted, got, strict=True), 1):
        found = _difference(graph, one, other)
        if found is not None:
            return f"step {number}: {found}"
    for name, value in wanted_buffers.items():
        if name in got_buffers and not close(value, got_buffers[name]):
            return f"the buffer {name!r} is another after {steps} steps"
    for name in ("torch", "python", "numpy"):
        if name in wanted_random and not same_random_state(wanted_random[name], got_random[name]):
            return f"the state of {name}'s random generator is another after {steps} steps"
    return None


def _step(
    graph: Graph, run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], tensors: list[torch.Tensor]
) -> _Step:
    parameters = {e.name: e.tensor for e in graph.state.values() if e.kind == "parameter" and e.tensor.requires_grad}
    outputs = run(tensors)
    gradients: dict[str, torch.Tensor | None] = {}
    loss = outputs[graph.loss] if graph.loss is not None else None
    if loss is not None and loss.requires_grad:
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = dict(zip(parameters, found, strict=True))
    return _Step(outputs, gradients)


def _difference(graph: Graph, wanted: _Step, got: _Step) -> str | None:
    if len(wanted.outputs) != len(got.outputs):
        return f"the model returns {len(wanted.outputs)} tensors, the graph {len(got.outputs)}"
    for spec, one, other, grad, other_grad in zip(
        graph.outputs, wanted.outputs, got.outputs, wanted.requires_grad, got.requires_grad, strict=True
    ):
        if not close(one, other):
            return f"the output {spec.path!r} is another"
        if grad != other_grad:
            return f"the output {spec.path!r} {'carries' if grad else 'does not carry'} gradients in the model"
    largest = max(
        (float(g.detach().abs().max()) for g in wanted.gradients.values() if g is not None and g.numel()), default=0.0
    )
    for name, gradient in wanted.gradients.items():
        found = got.gradients.get(name)
        if (gradient is None) != (found is None):
            return f"the gradient of {name!r} is {'None' if gradient is None else 'not None'} in the model"
        if gradient is not None and found is not None and not close(gradient, found, NOISE * largest):
            return f"the gradient of {name!r} is another"
    return None


def varied(tensor: torch.Tensor) -> torch.Tensor:
    """Other data of the same kind: rows in another order, floating values changed too."""
    other = tensor.detach().flip(0) if tensor.dim() else tensor.detach().clone()
    return other * 0.75 + 0.1 if other.is_floating_point() or other.is_complex() else other


def close(one: torch.Tensor, other: torch.Tensor, least_scale: float = 0.0) -> bool:
    """Equal shape, dtype and values, up to rounding relative to the largest (or to `least_scale`)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    one, other = one.detach(), other.detach()
    if torch.equal(one, other):
        return True
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    if not finite.all() and not torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()):
        return False
    one, other = one[finite], other[finite]
    scale = max(float(one.abs().max()) if one.numel() else 0.0, least_scale)
    tolerance = TOLERANCES.get(one.dtype, 1e-4)
    return bool(float((one - other).abs().max() if one.numel() else 0.0) <= tolerance * scale)
