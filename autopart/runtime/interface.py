"""What a package says about itself: the table in its `pipeline.py`, which the runtime reads.

Stage s sends boundary s to stage s + 1; a value that stage s + 2 needs is relayed by stage s + 1. Inputs of the model
are not sent: each process takes what its stages need from its own copy of the batch.

With a tensor degree t > 1, every stage runs on t processes, its tensor ranks, which share out its work. Shapes in this
table are those of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Shard:
    """How a tensor is cut among the tensor ranks (see `shards`).

    Attributes:
        dim: The dimension that is cut.
        parts: Sizes of the parts of the whole dimension, each of which is cut evenly: fused weights have several.
    """

    dim: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """One tensor that crosses a boundary, for one microbatch.

    Attributes:
        requires_grad: Whether the loss depends on it through autograd. False for a value that only feeds outputs: a
            gradient of zeros would otherwise reach parameters that have none in the original model.
        scattered: Whether each tensor rank sends 1/t of the elements, which are gathered behind the boundary. Only for
            a value that is whole and equal on every tensor rank, as its gradient must be.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    scattered: bool = False


@dataclass(frozen=True)
class Input:
    """One tensor of the model's call.

    Attributes:
        path: "args[0]", "kwargs['labels']", "target".
        batch_dim: Dimension cut into microbatches; None when every microbatch gets the whole tensor.
        maximum: Exclusive upper bound for random integers (a vocabulary size); None for floats and masks.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    maximum: int | None = None


@dataclass(frozen=True)
class Output:
    """One tensor of the model's result; `value` names a boundary value, an input, or something the last stage gives.

    Attributes:
        in_evaluation: Whether the model gives it in evaluation mode too; where it does not, its place holds None.
        shard: How the tensor ranks hold it in training; None where each has all of it, as in evaluation.
    """

    value: str
    path: str
    batch_dim: int | None
    in_evaluation: bool = True
    shard: Shard | None = None


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        module: Its class; `module()` builds it, `forward(*takes)` returns the tuple `gives`.
        takes: Names of received values and of inputs, in the order of `forward`'s parameters.
        gives: Names of the values it returns.
        whole_backward: True where the backward must run in one piece (hooks, custom autograd functions): schedules
            that split it into input and weight gradients run some of its nodes twice.
    """

    module: type[torch.nn.Module]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    whole_backward: bool = False


@dataclass(frozen=True)
class Tie:
    """One parameter that several stages hold: (stage, name in that stage), all copies the same tensor."""

    copies: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Pipeline:
    """The whole package.

    Attributes:
        model: Class name of the original model.
        dtype: The dtype that the graph was captured in.
        schedule, microbatches: As planned; both can be overridden when training starts.
        call: Structure of (args, kwargs[, target]) over `inputs` (see `structure`).
        result: Structure of the model's result over `outputs`.
        boundaries: `boundaries[s]` crosses from stage s to stage s + 1.
        loss: Name of the scalar that is trained on; None for inference.
        loss_name: What that scalar is, for people.
        names: Every key of the original `state_dict()`, in order -> (stage, name in that stage) that holds it.
        initialization: Key of the original `state_dict()` -> how to draw it when no weights are given (see
            `initialization`); keys without an entry keep what their stage was built with.
        tensor: Tensor degree t: ranks that share out the work of one stage.
        shards: Key of the original `state_dict()` -> how the tensor ranks hold it, all names of a tied weight; keys
            without an entry are whole on every rank.
        coarsest: The least exact dtype in which the split model computes (in autocast regions, say): sums of another
            order differ by its rounding. None: `dtype`.
        ranks: Place in the pipeline (and tensor rank in it) -> rank of torchrun that takes it, where devices are not
            alike and their order was chosen; empty: as they come.
    """

    model: str
    mode: str
    dtype: torch.dtype
    schedule: str
    microbatches: int
    microbatch_size: int
    inputs: tuple[Input, ...]
    call: Any
    outputs: tuple[Output, ...]
    result: Any
    loss: str | None
    loss_name: str | None
    stages: tuple[Stage, ...]
    boundaries: tuple[tuple[Value, ...], ...]
    ties: tuple[Tie, ...]
    names: dict[str, tuple[int, str]]
    initialization: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 1
    shards: Mapping[str, Shard] = field(default_factory=dict)
    coarsest: torch.dtype | None = None
    ranks: tuple[int, ...] = ()

    @property
    def size(self) -> str:
        """What it takes, for people."""
        stages = f"{len(self.stages)} stages"
        return stages if self.tensor == 1 else f"{stages} x {self.tensor} tensor ranks"
