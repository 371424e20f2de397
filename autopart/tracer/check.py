"""The self-check: the captured graph against the model itself, in values.

Two successive steps with different data, in both modes: a counter, a list that grows or a cache shows only at the
second. Compared are outputs, `requires_grad`, gradients (their absence too), buffers, and the random state afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autopart.graph import Capture, Graph, OutputSpec
from autopart.runtime.structure import decode, encode, omitted
from autopart.tracer.blame import reason_of
from autopart.tracer.call import Recording, choose_loss
from autopart.tracer.compare import NOISE, close, largest
from autopart.tracer.errors import ModelFailsError
from autopart.tracer.interpreter import run_capture
from autopart.tracer.kept_parameters import kept_parameters
from autopart.tracer.modes import Modes
from autopart.tracer.snapshot import random_states, same_random_state, set_random_states, unmarked

# A check that would take longer is cut short; verify compares the package itself anyway.
MOST_SECONDS = 20.0
# A step costs about three forwards, and is run on both sides.
COST = 6
TOO_SLOW = "the graph was not compared with the model, which is slow here; verify compares the package"

LossFunction = Callable[[Any, Any], torch.Tensor] | None


def disagreement(
    graph: Graph, modes: Modes, inputs: Sequence[torch.Tensor], loss_fn: LossFunction
) -> tuple[str | None, list[str]]:
    """What the graph computes otherwise than the model, or None, and notes.

    The model, its state and all random states are left as they were. Nothing is checked on `meta`.

    Raises:
        UsageError: The model fails on one microbatch.
    """
    if any(t.device.type == "meta" for t in [*inputs, *(e.tensor for e in graph.state.values())]):
        return None, []
    captures = [(train, c) for train, c in ((True, graph.training), (False, graph.evaluation)) if c is not None]
    forward_s = _seconds_of_forward(graph, modes, inputs, captures[0][0])
    if forward_s is None:
        return None, [TOO_SLOW]
    notes: list[str] = []
    steps = 2
    if forward_s * COST * len(captures) * steps > MOST_SECONDS:
        captures, steps = captures[:1], 1
        if forward_s * COST > MOST_SECONDS:
            return None, [TOO_SLOW]
        notes = ["the graph was compared with the model over one step in one mode only, to save time"]
    for train_mode, capture in captures:
        found = _Sides(graph, capture, modes, loss_fn, train_mode).compare(inputs, steps)
        if found is not None:
            return f"in {'training' if train_mode else 'evaluation'} mode, {found}", notes
    return None, notes


def _seconds_of_forward(graph: Graph, modes: Modes, inputs: Sequence[torch.Tensor], train_mode: bool) -> float | None:
    """Of one microbatch; None when one row tells that a comparison would take too long."""
    if graph.microbatch_size > 1:
        row = [
            t if i.batch_dim is None else t.narrow(i.batch_dim, 0, 1) for t, i in zip(inputs, graph.inputs, strict=True)
        ]
        with contextlib.suppress(Exception):  # a model that needs several rows is timed on all of them
            if _timed(graph, modes, row, False) * graph.microbatch_size * COST > MOST_SECONDS:
                return None
    try:
        return _timed(graph, modes, inputs, train_mode)
    except Exception as error:
        rows = f"one microbatch of {graph.microbatch_size} rows"
        raise ModelFailsError(
            f"{graph.name} fails on {rows}: {reason_of(error)}",
            "Check that the model runs on the example; if it does, use fewer microbatches or more rows.",
        ) from None


def _timed(graph: Graph, modes: Modes, inputs: Sequence[torch.Tensor], train_mode: bool) -> float:
    args, kwargs, *_ = decode(graph.call, [t.detach().clone() for t in inputs])
    modes.set(train_mode)
    with unmarked(modes.model, values=True), kept_parameters(modes.model):
        start = time.perf_counter()
        modes.model(*args, **kwargs)
        return time.perf_counter() - start


@dataclass
class _Step:
    """What one step left behind."""

    outputs: list[torch.Tensor]
    requires_grad: list[bool]
    gradients: dict[str, torch.Tensor | None]


Run: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class _Sides:
    """The model and one capture of it, run on the same data from the same state."""

    def __init__(self, graph: Graph, capture: Capture, modes: Modes, loss_fn: LossFunction, train_mode: bool) -> None:
        self.graph = graph
        self.capture = capture
        self.modes = modes
        self.model = modes.model
        self.loss_fn = loss_fn
        self.train_mode = train_mode
        (output,) = (n for n in capture.graph.nodes if n.op == "output")
        # Outputs that this mode does not return are None in the graph.
        pairs = zip(graph.outputs, output.args[0], strict=True)  # type: ignore[arg-type]
        self.specs: list[OutputSpec] = [spec for spec, node in pairs if node is not None]
        loss = None if graph.loss is None else graph.outputs[graph.loss]
        self.loss = self.specs.index(loss) if loss in self.specs else None
        # Under autocast, sums over uses of one weight are rounded to the lower precision at other places.
        self.coarse = any(n.meta["autocast"] for n in capture.calls)

    def eager(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs, *target = decode(self.graph.call, tensors)
        output = self.model(*args, **kwargs)
        record = Recording()
        record.result, flat = encode(output, "", omitted)
        record.paths = [o.path for o in self.graph.outputs][: len(flat)]
        if self.graph.mode == "training" and self.loss is not None:
            _, _, loss = choose_loss(output, record, flat, self.loss_fn, target[0] if target else None)
            flat += [loss] if loss is not None else []
        return flat

    def captured(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [o for o in run_capture(self.graph, self.capture, tensors) if o is not None]

    def compare(self, inputs: Sequence[torch.Tensor], steps: int) -> str | None:
        """What differs, or None."""
        data = [[t.detach().clone() for t in inputs], [varied(t) for t in inputs]][:steps]
        self.modes.set(self.train_mode)
        before = random_states()
        sides = []
        for run in (self.eager, self.captured):
            with unmarked(self.model, values=True), kept_parameters(self.model) as kept:
                set_random_states(before)
                done = self._steps(run, data)
                buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
                sides.append((done, buffers | kept.changed(), random_states()))
        (wanted, wanted_state, wanted_random), (got, got_state, got_random) = sides
        for number, (step, other_step) in enumerate(zip(wanted, got, strict=True), 1):
            found = self._difference(step, other_step)
            if found is not None:
                return f"step {number}: {found}"
        unchanged = dict(self.model.named_parameters())
        for name in wanted_state | got_state:
            one, other = (side[name] if name in side else unchanged[name] for side in (wanted_state, got_state))
            if not close(one, other, coarse=self.coarse):
                kind = "parameter" if name in unchanged else "buffer"
                return f"the {kind} {name!r} is another after {steps} steps"
        for name in wanted_random:
            if not same_random_state(wanted_random[name], got_random[name]):
                return f"the state of {name}'s random generator is another after {steps} steps"
        return None

    def _steps(self, run: Run, data: list[list[torch.Tensor]]) -> list[_Step]:
        try:
            return [self._step(run, [t.clone() for t in tensors]) for tensors in data]
        except Exception as error:
            if run != self.eager:
                raise
            raise ModelFailsError(
                f"{self.graph.name} fails in a step of its own: {reason_of(error)}",
                "Check that the model runs on the example, and that its loss can be differentiated.",
            ) from None

    def _step(self, run: Run, tensors: list[torch.Tensor]) -> _Step:
        entries = [e for e in self.graph.state.values() if e.kind == "parameter" and e.requires_grad]
        outputs = run(tensors)
        gradients: dict[str, torch.Tensor | None] = {}
        loss = outputs[self.loss] if self.loss is not None and self.loss < len(outputs) else None
        if entries and loss is not None and loss.requires_grad:
            gradients = _gradients(loss, {e.name: e.tensor for e in entries})
        return _Step([o.detach().clone() for o in outputs], [o.requires_grad for o in outputs], gradients)

    def _difference(self, wanted: _Step, got: _Step) -> str | None:
        if not len(wanted.outputs) == len(got.outputs) == len(self.specs):
            return f"the model returns {len(wanted.outputs)} tensors, the graph {len(got.outputs)}"
        for spec, one, other in zip(self.specs, wanted.outputs, got.outputs, strict=True):
            if not close(one, other, coarse=self.coarse):
                return f"the output {spec.path!r} is another"
        for spec, flag, other_flag in zip(self.specs, wanted.requires_grad, got.requires_grad, strict=True):
            if flag != other_flag:
                return f"the output {spec.path!r} {'carries' if flag else 'does not carry'} gradients in the model"
        noise = NOISE * largest(g for g in wanted.gradients.values() if g is not None)
        for name, gradient in wanted.gradients.items():
            found = got.gradients.get(name)
            if (gradient is None) != (found is None):
                return f"the gradient of {name!r} is {'None' if gradient is None else 'not None'} in the model"
            if gradient is not None and found is not None and not close(gradient, found, noise, self.coarse):
                return f"the gradient of {name!r} is another"
        return None


def _gradients(loss: torch.Tensor, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Gradients by name, leaving `.grad` alone (reentrant checkpoints do not work with `torch.autograd.grad`)."""
    held = {name: p.grad for name, p in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
        loss.backward()
        return {name: p.grad for name, p in parameters.items()}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = held[name]


def varied(tensor: torch.Tensor) -> torch.Tensor:
    """Other data of the same kind: rows in another order, floating values changed too."""
    other = tensor.detach().flip(0) if tensor.dim() else tensor.detach().clone()
    return other * 0.75 + 0.1 if other.is_floating_point() or other.is_complex() else other
