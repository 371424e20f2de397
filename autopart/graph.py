"""Graph: what the tracer knows of a model, and everything later steps read of it.

Conventions of the fx graphs inside (they are data, never run by autopart itself except for checks):

- `placeholder`: one for each tensor leaf of the call, in the order of `Graph.inputs`; same names in both captures.
- `get_attr`: a parameter, buffer or constant; its target is a key of `Graph.state`. One node for each key.
- `call_function`: an ATen overload (`torch.ops.aten...`) or `operator.getitem`; in-place operators stay in place.
- `call_module`: an opaque call, target a key of `Graph.opaque`; flat tensors in, a list of tensors out (with getitems).
- `output`: its one argument is the flat tuple of tensor outputs, in the order of `Graph.outputs`.

`node.meta` of every node but `output`:

- `val`: FakeTensor (list or tuple for several outputs); shape and dtype are those of one microbatch.
- `requires_grad`: bool (list of bool for several outputs): whether autograd tracks the value in training.
- `nn_module_stack`: ordered mapping call key -> (module path, class name), outermost first; paths as in the user's
  model ("" for the root); a key that ends in `@n` is the n-th further call of the same module.
- `stack_trace`: the user's source lines, where known.
- `grad_enabled`: bool; False inside `torch.no_grad()`.
- `autocast`: tuple of (device type, dtype) for which autocast is on; empty outside.
- `checkpoint`: identifier of the activation-checkpoint region the node belongs to, or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

Mode = Literal["training", "inference"]


@dataclass(frozen=True)
class StateEntry:
    """One parameter, buffer or lifted constant; tied names share one entry.

    Attributes:
        key: Target of its `get_attr` nodes, "t0", "t1", ...
        names: All fully qualified names in the model, first the canonical one; a constant has one made-up name.
        kind: "parameter", "buffer" or "constant".
        persistent: Whether it is part of `state_dict()`.
        tensor: The model's own tensor (it may live on `meta`).
        used: Whether any capture reads or writes it.
    """

    key: str
    names: tuple[str, ...]
    kind: Literal["parameter", "buffer", "constant"]
    persistent: bool
    tensor: torch.Tensor
    used: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad


@dataclass(frozen=True)
class InputSpec:
    """One tensor leaf of the model's call, or of the target of the loss.

    Attributes:
        name: Name of its placeholder, a Python identifier close to the user's argument name.
        path: Where it stands in the call: "args[0]", "kwargs['labels']", "args[1]['mask'][0]" or "target...".
        shape: Shape of one microbatch.
        batch_dim: Dimension that is cut into microbatches; None when every microbatch gets the whole tensor.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None


@dataclass(frozen=True)
class OutputSpec:
    """One tensor leaf of the model's result (or the loss, whose path is "loss" when it is computed outside the model).

    Attributes:
        batch_dim: Dimension along which microbatches are joined; None for values without one (a mean loss).
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None


@dataclass(frozen=True)
class OpaqueCall:
    """Python that is run as it is instead of being captured.

    Attributes:
        key: Target of its `call_module` node.
        kind: "module", "function" (a `torch.autograd.Function`) or "hook".
        call: The callable: flat list of tensors in, list of tensors out.
        subject: The user's own module or class that is called.
        path: Module path at which it is called ("" for the root).
        reason: Why it was kept whole, for the person who reads the plan.
        structure: How flat tensors map to the subject's arguments (see `tracer.opaque`).
    """

    key: str
    kind: Literal["module", "function", "hook"]
    call: Any
    subject: Any
    path: str
    reason: str
    structure: Any = None


@dataclass(frozen=True)
class Capture:
    """The model's graph in one mode.

    Attributes:
        graph: See the module's docstring.
        colocated: Sets of node names that no cut may separate (an operator and its getitems, a value, its views and
            its in-place changes, the nodes of a stateful leaf module).
    """

    graph: fx.Graph
    colocated: tuple[frozenset[str], ...]

    @property
    def calls(self) -> list[fx.Node]:
        """The nodes that do work: `call_function` and `call_module`, in program order."""
        return [n for n in self.graph.nodes if n.op in ("call_function", "call_module")]


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured model.

    Attributes:
        name: Class name of the model.
        mode: What the plan is for; decides which capture is `primary`.
        training, evaluation: The two captures; `training` is None in inference mode.
        state: Every parameter, buffer and constant by key, used or not, in the order of the model's `state_dict`.
        inputs: Tensor leaves of the call.
        call: Structure of (args, kwargs[, target]) over indices into `inputs` (see `runtime.structure`).
        outputs: Tensor leaves of the result, in the order of the `output` node.
        result: Structure of the model's result over indices into `outputs` (without an outside loss).
        loss: Index into `outputs` of the scalar that is trained on; None in inference mode.
        loss_name: What that scalar is: "loss_fn", the output's path, or the stand-in, for people.
        opaque: Opaque calls by key.
        microbatch_size: Rows in one microbatch (1 if no input has a batch dimension).
        notes: Sentences for the person who reads the plan.
        modules: Module path -> class of every submodule of the model, the root included.
        initialization: State key -> how to draw its initial value (see `tracer.initialization`).
    """

    name: str
    mode: Mode
    training: Capture | None
    evaluation: Capture
    state: Mapping[str, StateEntry]
    inputs: tuple[InputSpec, ...]
    call: Any
    outputs: tuple[OutputSpec, ...]
    result: Any
    loss: int | None
    loss_name: str | None
    opaque: Mapping[str, OpaqueCall]
    microbatch_size: int
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    modules: Mapping[str, type] = field(default_factory=dict)
    initialization: Mapping[str, Any] = field(default_factory=dict)

    @property
    def primary(self) -> Capture:
        """The capture that a plan is made for."""
        return self.training if self.training is not None else self.evaluation
