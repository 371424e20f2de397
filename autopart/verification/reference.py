"""What the original model computes: run eagerly, microbatch by microbatch, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopart.errors import UsageError
from autopart.runtime.structure import decode, encode, leaves, omitted
from autopart.tracer.modes import Modes
from autopart.tracer.surroundings import neutral_surroundings
from autopart.verification.fixed_randomness import FixedRandomness
from autopart.verification.worker import LEARNING_RATE, OPTIMIZERS

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass
class Step:
    """One optimizer step; outputs and losses are those of each microbatch, by path in the result."""

    losses: list[torch.Tensor]
    outputs: list[dict[str, torch.Tensor]]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


@dataclass
class Reference:
    """Everything that is compared with the package, by original names.

    Attributes:
        structure: Of the model's result, in training mode where it is trained.
        evaluation: For each microbatch of the first batch, outputs in evaluation mode after the last step.
        whole: Shapes of the outputs when the whole first batch is evaluated at once, by path.
    """

    structure: Any
    steps: list[Step]
    weights: dict[str, torch.Tensor]
    evaluation: list[dict[str, torch.Tensor]]
    whole: dict[str, torch.Size]
    notes: list[str] = field(default_factory=list)


def run_reference(
    model: nn.Module,
    pipeline: Any,
    batches: Sequence[Mapping[str, torch.Tensor]],
    loss_fn: LossFunction | None,
    microbatches: int,
    optimizer: str,
) -> Reference:
    """Train the model for one step on each batch, then evaluate the first batch; its state is put back afterwards.

    Args:
        pipeline: The package's table: which inputs are cut, and how a call is made of them.
        batches: Input name -> tensor of the whole batch.
    """
    fixed = FixedRandomness()
    modes = Modes(model)
    with neutral_surroundings(), _state_restored(model), fixed:
        if _floating(model) not in (None, pipeline.dtype):
            # As the tracer does; `model.to()` would make complex buffers real.
            model._apply(lambda t: t.to(pipeline.dtype) if t.is_floating_point() else t)
        update = OPTIMIZERS[optimizer](
            [p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=LEARNING_RATE
        )
        steps, structure = [], None
        modes.set(True)
        for batch in batches if pipeline.loss is not None else ():
            model.zero_grad(set_to_none=True)
            losses, outputs = [], []
            for args, kwargs, target in _calls(pipeline, batch, microbatches):
                result = model(*args, **kwargs)
                loss = _loss(result, target, loss_fn, pipeline.loss_name)
                (loss / microbatches).backward()
                structure = encode(result, "", omitted)[0]
                losses.append(loss.detach())
                outputs.append(_tensors(result, loss))
            steps.append(Step(losses, outputs, _gradients(model), _buffers(model)))
            update.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
        modes.set(False)
        evaluation = []
        with torch.no_grad():
            for args, kwargs, target in _calls(pipeline, batches[0], microbatches):
                result = model(*args, **kwargs)
                structure = structure or encode(result, "", omitted)[0]
                evaluation.append(_tensors(result, _loss_or_none(result, target, loss_fn, pipeline)))
            whole = _whole(model, pipeline, batches[0])
    return Reference(structure, steps, weights, evaluation, whole, fixed.notes())


def _calls(
    pipeline: Any, batch: Mapping[str, torch.Tensor], microbatches: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """(args, kwargs, target) of each microbatch; its tensors are copies, for a model may change its inputs."""
    for number in range(microbatches):
        tensors = []
        for spec in pipeline.inputs:
            tensor = batch[spec.name]
            if spec.batch_dim is not None:
                rows = tensor.shape[spec.batch_dim] // microbatches
                tensor = tensor.narrow(spec.batch_dim, number * rows, rows)
            tensors.append(tensor.clone())
        args, kwargs, *target = decode(pipeline.call, tensors)
        yield args, kwargs, target[0] if target else None


def _whole(model: nn.Module, pipeline: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    args, kwargs, *_ = decode(pipeline.call, [batch[spec.name].clone() for spec in pipeline.inputs])
    try:
        return {path: tensor.shape for path, tensor in _tensors(model(*args, **kwargs), None).items()}
    except Exception:
        # A model may be made for one batch size; then nothing can be said about the shape of joined outputs.
        return {}


def _tensors(result: Any, loss: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The result's tensors by path; the loss, when the model does not return it, stands beside them."""
    structure, tensors = encode(result, "", omitted)
    found = {path or "output": tensors[number].detach().clone() for path, number in leaves(structure)}
    if loss is not None and not any(loss is t for t in tensors):
        found.setdefault("loss", loss.detach().clone())
    return found


def _loss(result: Any, target: Any, loss_fn: LossFunction | None, name: str | None) -> torch.Tensor:
    """The scalar that the package was made to train on.

    Raises:
        UsageError: It was made with a `loss_fn`, and none is given here.
    """
    if loss_fn is not None:
        return loss_fn(result, target).reshape(())
    if name == "loss_fn":
        raise UsageError("the package was made with a loss_fn", "Pass the same loss_fn to verify().")
    structure, tensors = encode(result, "", omitted)
    by_path = {path or "output": tensors[number] for path, number in leaves(structure)}
    if name in by_path:
        return by_path[name]
    squares = [t.square().mean() for t in tensors if t.is_floating_point()]
    return torch.stack(squares).sum()


def _loss_or_none(result: Any, target: Any, loss_fn: LossFunction | None, pipeline: Any) -> torch.Tensor | None:
    return None if pipeline.loss is None else _loss(result, target, loss_fn, pipeline.loss_name)


def _floating(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers(remove_duplicate=False)}


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Leave the model as it was: weights, buffers, gradients and modes."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [t.detach().clone() for t in tensors]
    gradients = [p.grad for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(m, dict(m._buffers)) for m in model.modules()]
    try:
        yield
    finally:
        for module, registered in buffers:
            module._buffers.update(registered)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if tensor.dtype == value.dtype:
                    tensor.copy_(value)
                else:
                    tensor.data = value
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
