"""A stage between two boundaries: what it receives, what it passes on, and how gradients find their way back.

Three guards make the schedules of `torch.distributed.pipelining` exact for every stage:

- The *gate* is one autograd function over all gradient-carrying tensors of a boundary, at entry and at exit. Behind it
  every tensor is contiguous and no view, so it can be sent, changed in place and detached.
- The *token* is a tensor of one element that requires grad; it is born in stage 0 and goes through every gate, first in
  each boundary. It connects every stage to its successor where no value carries a gradient (a frozen prefix): schedules
  that split the backward only find weight gradients on a path from a received tensor to the loss.
- *Static metadata*: torch is told the shape, dtype and requires_grad of what crosses, so it never runs a stage on
  uninitialised memory to find out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import nn

from . import collectives
from .errors import PackageError
from .gathered_again import keeping_shards
from .interface import Pipeline, Value
from .shards import piece_size
from .work import Work


class Gate(torch.autograd.Function):
    """The identity on all gradient-carrying tensors of a boundary; gradients pass through contiguous."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.detach().contiguous() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if g is None else g.contiguous() for g in gradients)


def gated(token: torch.Tensor, tensors: list[torch.Tensor], carries: list[bool]) -> tuple[torch.Tensor, ...]:
    """The token and the tensors behind the gate; tensors that carry no gradient are detached beside it.

    Args:
        carries: For each tensor, whether gradients flow back through it.
    """
    through = [t for t, c in zip(tensors, carries, strict=True) if c]
    token, *passed = Gate.apply(token, *through)
    rest = iter(passed)
    return (token, *(next(rest) if c else t.detach().contiguous() for t, c in zip(tensors, carries, strict=True)))


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.empty((), dtype=dtype, device="meta").real.dtype


def real_shape(value: Value) -> tuple[int, ...]:
    return (*value.shape, 2) if value.dtype.is_complex else value.shape


def wire_shape(value: Value, ranks: int) -> tuple[int, ...]:
    """The shape of what one of `ranks` tensor ranks sends: of a scattered value, its piece of the elements."""
    return (piece_size(prod(real_shape(value)), ranks),) if value.scattered else real_shape(value)


def wire_metadata(values: tuple[Value, ...], dtype: torch.dtype, ranks: int) -> tuple[torch.Tensor, ...]:
    """Meta tensors of what crosses a boundary in training: the token, then every value; complex as pairs of reals."""
    token = torch.empty(1, dtype=dtype, device="meta", requires_grad=True)
    wires = [token]
    for value in values:
        shape, real = wire_shape(value, ranks), real_dtype(value.dtype)
        wires.append(torch.empty(shape, dtype=real, device="meta", requires_grad=value.requires_grad))
    return tuple(wires)


def to_wire(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """What is sent of a value. Process groups do not send complex numbers: they travel as pairs of reals."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return collectives.split(real.flatten(), 0) if value.scattered else real


def from_wire(wire: torch.Tensor, value: Value) -> torch.Tensor:
    if value.scattered:
        shape = real_shape(value)
        wire = collectives.all_gather(wire, 0, (prod(shape),)).view(shape)
    return torch.view_as_complex(wire) if value.dtype.is_complex else wire


class StageAdapter(nn.Module):
    """An emitted stage, dressed for a schedule: takes boundary s - 1, returns boundary s (or the loss, if it is last).

    Args:
        pipeline: The package's table, in the dtype of the run.
        index: Which stage.
        module: The emitted stage.
        device: Where it runs.
    """

    work: Work

    def __init__(self, pipeline: Pipeline, index: int, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.index, self.device, self.dtype = index, device, pipeline.dtype
        stage = pipeline.stages[index]
        self.takes, self.gives = stage.takes, stage.gives
        self.is_first, self.is_last = index == 0, index == len(pipeline.stages) - 1
        self.received = () if self.is_first else pipeline.boundaries[index - 1]
        self.sent = () if self.is_last else pipeline.boundaries[index]
        self.loss = pipeline.loss
        self.keeping = keeping_shards if pipeline.tensor > 1 else nullcontext

    def forward(self, *wires: torch.Tensor, microbatch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One microbatch of training, as a schedule calls it.

        Args:
            wires: What crossed boundary s - 1 (see `wire_metadata`); nothing for stage 0.
            microbatch: Its number, in a tensor because schedules cut their arguments into microbatches.
        """
        number = int(microbatch)
        token, received = self.enter(wires)
        return self.leave(token, self.run(number, received))

    def enter(self, wires: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The token and the named values of one training microbatch, behind the entry gate."""
        if self.is_first:
            return torch.zeros(1, dtype=self.dtype, device=self.device, requires_grad=True), {}
        token, *tensors = gated(wires[0], list(wires[1:]), [v.requires_grad for v in self.received])
        return token, {v.name: from_wire(t, v) for v, t in zip(self.received, tensors, strict=True)}

    def leave(self, token: torch.Tensor, known: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the next stage gets, behind the exit gate; of the last stage, (its scaled loss,)."""
        if self.is_last:
            assert self.loss is not None
            return gated(token, [known[self.loss] * self.work.loss_scale], [True])[1:]
        return gated(token, [to_wire(known[v.name], v) for v in self.sent], [v.requires_grad for v in self.sent])

    def run(self, number: int, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every value known after this stage for one microbatch: those received and those it computed.

        Inputs are cloned, because the stage may change them in place. Random numbers depend on the step, the stage and
        the microbatch, not on the schedule.

        Raises:
            PackageError: The stage gave another number of tensors, or another shape or dtype, than the table says.
        """
        inputs = self.work.inputs[number]
        arguments = [received[name] if name in received else inputs[name].clone() for name in self.takes]
        with seeded(self.work.seed, self.work.step, self.index, number, device=self.device), self.keeping():
            results = self.module(*arguments)
        if len(results) != len(self.gives):
            raise PackageError(
                f"stage {self.index} returned {len(results)} tensors, pipeline.py names {len(self.gives)}"
            )
        known = {**received, **dict(zip(self.gives, results, strict=True))}
        for value in self.sent:
            tensor = known[value.name]
            if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
                raise PackageError(
                    f"stage {self.index} computed {value.name} as {list(tensor.shape)} {tensor.dtype}, and stage "
                    f"{self.index + 1} expects {list(value.shape)} {value.dtype}: the batch or a stage's code is not "
                    "what this package was made for"
                )
        self.work.keep(self.index, number, known)
        return known


@contextmanager
def seeded(*keys: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a stream of its own; the caller's generators are left as they were."""
    digest = hashlib.blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        yield
