"""Python that is kept as it is: a placeholder operator while tracing, a call of the real thing afterwards.

`autopart::opaque(Tensor[] xs, int token) -> Tensor[]` and `autopart::hook(Tensor(a!) x, int token) -> ()` exist only
while a model is traced. Their nodes become `call_module` nodes whose target is a key of `Graph.opaque`.

`OpaqueCall.structure` is JSON data:

    {"call": structure of (args, kwargs) over the node's flat inputs, "result": structure over its flat outputs,
     "mutates": [indices of inputs that are changed in place]}

or None when an argument is an object that data cannot describe. A module's own parameters and buffers are not inputs:
state whose name lies below `OpaqueCall.path` belongs to a call of kind "module".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from autopart.runtime.structure import Structure, decode, encode
from autopart.tracer.errors import Uncapturable

_LIBRARY = torch.library.Library("autopart", "FRAGMENT")
_LIBRARY.define("opaque(Tensor[] xs, int token) -> Tensor[]")
_LIBRARY.define("hook(Tensor(a!) x, int token) -> ()")


@dataclass(frozen=True)
class TensorLike:
    """What is known of a tensor that was not computed."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLike:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


@dataclass
class Pending:
    """An opaque call met while tracing, until its node is rewritten."""

    kind: Literal["module", "function", "hook"]
    call: Any
    subject: Any
    path: str
    reason: str
    outputs: tuple[TensorLike, ...] = ()
    mutates: tuple[int, ...] = ()
    structure: Any = None


# Calls of the trace that is running; the operator's fake implementation reads the outputs here by token.
PENDING: list[Pending] = []


@torch.library.register_fake("autopart::opaque", lib=_LIBRARY)
def _fake_opaque(xs: Sequence[torch.Tensor], token: int) -> list[torch.Tensor]:
    device = xs[0].device if xs else torch.device("cpu")
    return [torch.empty_strided(o.shape, o.stride, dtype=o.dtype, device=device) for o in PENDING[token].outputs]


@torch.library.register_fake("autopart::hook", lib=_LIBRARY)
def _fake_hook(x: torch.Tensor, token: int) -> None:
    return None


def place(pending: Pending, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put an opaque call into the graph that is being traced, and give back its outputs."""
    PENDING.append(pending)
    token = len(PENDING) - 1
    if pending.kind == "hook":
        torch.ops.autopart.hook.default(tensors[0], token)
        return []
    return list(torch.ops.autopart.opaque.default(list(tensors), token))


@dataclass
class Arguments:
    """(args, kwargs) taken apart; objects that are no data are kept beside it under negative numbers."""

    structure: Structure
    tensors: list[torch.Tensor]
    objects: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        objects: dict[int, Any] = {}

        def keep(path: str, value: Any) -> Structure:
            objects[-len(objects) - 1] = value
            return {"tensor": -len(objects)}

        structure, tensors = encode((tuple(args), dict(kwargs)), "", keep)
        return cls(structure, tensors, objects)

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = decode(self.structure, {**dict(enumerate(tensors)), **self.objects})
        return args, kwargs


def describe(arguments: Arguments, result: Structure, mutates: Sequence[int]) -> Any:
    """`OpaqueCall.structure`: see the module's docstring."""
    if arguments.objects:
        return None
    return {"call": arguments.structure, "result": result, "mutates": list(mutates)}


@dataclass
class LiveCall:
    """Runs the real function or module on flat tensors, and gives back flat tensors."""

    run: Any
    arguments: Arguments

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = self.arguments.rebuilt(tensors)
        return encode(self.run(*args, **kwargs))[1]


@dataclass
class LiveHook:
    """Registers the user's gradient hook on the tensor of this run."""

    hook: Any

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if tensors[0].requires_grad:
            tensors[0].register_hook(self.hook)
        return []


def result_of(value: Any, what: str) -> tuple[Structure, list[torch.Tensor]]:
    """The result of opaque Python taken apart."""

    def refuse(path: str, item: Any) -> Structure:
        raise Uncapturable(None, f"{what} returns a {type(item).__qualname__}, which cannot be taken apart")

    return encode(value, "", refuse)


@dataclass
class RecordedCall:
    """One call of an opaque module in a run outside the trace: what it gave back, and which inputs it changed."""

    result: Structure
    outputs: tuple[TensorLike, ...]
    mutates: tuple[int, ...]


@dataclass
class OpaqueModule:
    """A submodule that is kept whole.

    Attributes:
        calls: Its calls in the current mode, in order; the n-th call of the trace gets the n-th record.
    """

    module: nn.Module
    path: str
    reason: str
    calls: list[RecordedCall] = field(default_factory=list)
    next_call: int = 0

    def stub(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for `module.forward` while tracing."""
        if self.next_call >= len(self.calls):
            raise Uncapturable(self.path, f"{self.path} is called a different number of times in each run")
        recorded = self.calls[self.next_call]
        self.next_call += 1
        arguments = Arguments.of(args, kwargs)
        pending = Pending(
            kind="module",
            call=LiveCall(self.module, arguments),
            subject=self.module,
            path=self.path,
            reason=self.reason,
            outputs=recorded.outputs,
            mutates=recorded.mutates,
            structure=describe(arguments, recorded.result, recorded.mutates),
        )
        return decode(recorded.result, place(pending, arguments.tensors))

    def record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, versions: Sequence[int]) -> None:
        """Remember one call made outside the trace."""
        tensors = Arguments.of(args, kwargs).tensors
        mutates = tuple(i for i, (t, v) in enumerate(zip(tensors, versions, strict=True)) if t._version != v)
        structure, outputs = result_of(result, self.path)
        self.calls.append(RecordedCall(structure, tuple(TensorLike.of(t) for t in outputs), mutates))
