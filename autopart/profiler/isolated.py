"""Isolated: one node of the graph run by itself on fake tensors, forward and backward, to see what it does.

Nothing is computed and no memory is used, so it works for any size and without the device. Two runs are made:

- forward, on fake tensors of the target's device type, under `torch.autograd.graph.saved_tensors_hooks`: results, which
  inputs they alias, what autograd keeps, the kernels. A GPU saves other things than a CPU (a dropout mask of one byte,
  not four);
- forward and backward, on fake CPU tensors: the kernels of the backward pass, what it allocates, and where the
  gradients that it gives lie. Autograd's engine does not run on fake GPU tensors where there is no GPU; the kernels
  that matter are the same.

The result depends on the node's signature alone (operator, shapes, strides, dtypes, arguments, contexts), so equal
nodes of repeated blocks are run once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from autopart.costs import InputGradient
from autopart.profiler.attention import GPU_OPERATORS
from autopart.profiler.kernels import Kernel, KernelCounter
from autopart.profiler.ranks import Exchange, recording
from autopart.torch_private import FakeTensorMode

Step = Kernel | Exchange


@dataclass(frozen=True)
class TensorSpec:
    """A tensor from outside.

    Attributes:
        weight: Whether it is made of parameters alone, so that its gradient is a weight gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    weight: bool = False

    @property
    def bytes(self) -> int:
        """Size when it is sent, which makes it contiguous."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True)
class Place:
    """Where a tensor lives: in the storage of an input, or in a storage that the node made."""

    of: Literal["input", "new"]
    index: int


@dataclass(frozen=True)
class Result:
    """One tensor that a node returns."""

    spec: TensorSpec
    place: Place


@dataclass(frozen=True)
class Work:
    """What a node does: the kernels that it starts, and what it exchanges with other ranks.

    `backward` is the whole, `backward_input` what the gradients of activations alone need.
    """

    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    backward_input: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Backward:
    """What running a node backward allocates.

    Attributes:
        peak_bytes, shared_peak_bytes, input_peak_bytes, weight_peak_bytes: See `autopart.costs.NodeAllocations`.
        gradients: `tensor` is the number of an argument.
    """

    peak_bytes: int = 0
    shared_peak_bytes: int = 0
    input_peak_bytes: int = 0
    weight_peak_bytes: int = 0
    gradients: tuple[InputGradient, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What running a node does.

    Attributes:
        results: Nested like the node's value, with a `Result` for each tensor.
        new_bytes: Sizes of the storages that it makes.
        saved: What autograd keeps, without repeats.
        temporary_bytes: Most bytes that exist only while it runs, forward or backward.
        forward_bytes: Most bytes of new storages at once, forward.
        cast_bytes: Copies of weights in the dtype of autocast, which its cache keeps.
        backward: What backward allocates.
        estimated: Why this is an estimate, or None.
    """

    results: Any
    new_bytes: tuple[int, ...]
    saved: tuple[Place, ...]
    work: Work
    temporary_bytes: int
    forward_bytes: int
    cast_bytes: int = 0
    backward: Backward = Backward()
    estimated: str | None = None

    @property
    def tensors(self) -> list[Result]:
        """The tensors of `results`."""
        return [leaf for leaf in pytree.tree_leaves(self.results) if isinstance(leaf, Result)]


@dataclass(frozen=True)
class Call:
    """A node without its graph: `arguments` is (args, kwargs) with a `TensorSpec` for each tensor."""

    target: Any
    arguments: Any
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        """Its tensor arguments in the order in which `Place` counts inputs."""
        return [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, TensorSpec)]


class Runner:
    """Runs calls on fake tensors for one device type, as one of `tensor` ranks that hold the model together."""

    def __init__(self, kind: str, tensor: int = 1) -> None:
        self._kind = kind
        self._tensor = tensor
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, call: Call) -> Outcome:
        """What `call` does.

        Raises:
            Exception: Whatever the operator raises on fake tensors.
        """
        try:
            outcome = self._forward(call, self._kind)
        except Exception:
            # Some builds of torch know no fake GPU, and some operators (recurrent ones) ask for a real one.
            if self._kind == "cpu":
                raise
            outcome = self._forward(call, "cpu")
        if not any(leaf.spec.requires_grad for leaf in outcome.tensors):
            return outcome
        work, backward = self._backward(call)
        return replace(
            outcome,
            work=replace(work, forward=outcome.work.forward),
            temporary_bytes=max(outcome.temporary_bytes, backward.shared_peak_bytes),
            backward=backward,
        )

    def _forward(self, call: Call, device: str) -> Outcome:
        with self._fake, recording(self._tensor) as ranks:
            inputs, args, kwargs = _materialize(call, device)
            places = _Places(inputs)
            saved: dict[Place, None] = {}

            def pack(tensor: torch.Tensor) -> None:
                saved[places.of(tensor)] = None

            counter = KernelCounter(inputs, host=self._kind == "cpu")
            with counter, contexts(call, device), torch.autograd.graph.saved_tensors_hooks(pack, _never):
                value = _function(call.target, self._kind)(*args, **kwargs)
            weight = bool(call.tensors) and all(spec.weight for spec in call.tensors)
            results = pytree.tree_map_only(torch.Tensor, lambda tensor: _result(tensor, places, weight), value)
            for size in counter.workspaces if saved else ():
                saved[Place("new", len(places.new_bytes))] = None
                places.new_bytes.append(size)
            kept = sum(places.new_bytes[place.index] for place in saved if place.of == "new")
            return Outcome(
                results=results,
                new_bytes=tuple(places.new_bytes),
                saved=tuple(saved),
                work=Work((*counter.kernels, *ranks.exchanges)),
                temporary_bytes=max(0, counter.peak_bytes + sum(counter.workspaces) - kept),
                forward_bytes=counter.peak_bytes + sum(counter.workspaces),
                cast_bytes=_cast_bytes(call, counter.converted),
            )

    def _backward(self, call: Call) -> tuple[Work, Backward]:
        """The steps of the backward pass, and what it allocates."""
        with self._fake, recording(self._tensor) as ranks:
            graph = _CallGraph(call, self._kind)
            counter, sources = graph.counter, [i for i, x in enumerate(graph.inputs) if x.requires_grad]
            activations = [i for i in sources if not call.tensors[i].weight]
            if graph.end is None:
                return Work(), Backward()

            def steps() -> tuple[Step, ...]:
                return (*counter.kernels, *ranks.exchanges)

            alone: tuple[Step, ...] = ()
            halves: tuple[int, int] | None = None
            if 0 < len(activations) < len(sources):
                ranks.exchanges.clear()
                graph.run(activations, True)
                alone = steps()
                weights = _CallGraph(call, self._kind)
                weights.run([i for i in sources if i not in activations], False)
                halves = counter.shared_peak_bytes, weights.counter.shared_peak_bytes
            ranks.exchanges.clear()
            gradients = graph.run(sources, False)
            whole = steps()
            work = Work(backward=whole, backward_input=whole if len(activations) == len(sources) else alone)
            placed = _placed(dict(zip(sources, gradients, strict=True)), graph.incoming)
            shared = counter.shared_peak_bytes
            first, second = halves or (shared, shared)
            return work, Backward(counter.peak_bytes, shared, first, second, placed)


class _CallGraph:
    """A call that was run forward on fake CPU tensors.

    Attributes:
        incoming: Address of the gradient of a result -> which result.
        end: From where it is run backward; None where no gradient comes.
    """

    def __init__(self, call: Call, kind: str) -> None:
        self.inputs, args, kwargs = _materialize(call, "cpu")
        self.counter = KernelCounter(self.inputs, host=kind == "cpu")
        self.incoming: dict[int, int] = {}
        with contexts(call, "cpu", standing_in_for=kind), self.counter:
            value = _function(call.target, kind)(*args, **kwargs)
        results = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        tracked = [i for i, x in enumerate(results) if x.requires_grad]
        self.end: torch.Tensor | None = (
            _End.apply(self._await, tracked, *(results[i] for i in tracked)) if tracked else None
        )

    def _await(self, result: int, gradient: torch.Tensor) -> None:
        storage = gradient.untyped_storage()
        self.incoming[storage._cdata] = result
        self.counter.lasting.add(storage._cdata)
        # Its address may come to mean another storage.
        weakref.finalize(storage, self.incoming.pop, storage._cdata, None)

    def run(self, wanted: list[int], retain_graph: bool) -> tuple[torch.Tensor | None, ...]:
        """The gradients of some of its arguments."""
        self.incoming.clear()
        assert self.end is not None
        start = torch.ones_like(self.end)
        with self.counter:
            self.counter.restart()
            leaves = [self.inputs[i] for i in wanted]
            return torch.autograd.grad(self.end, leaves, start, retain_graph=retain_graph, allow_unused=True)


def _placed(gradients: dict[int, torch.Tensor | None], incoming: dict[int, int]) -> tuple[InputGradient, ...]:
    """Where the gradient of each argument lies.

    Args:
        incoming: Address of the gradient of a result -> which result.
    """
    made: dict[int, int] = {}
    found = []
    for tensor, gradient in gradients.items():
        if gradient is None:
            continue
        storage = gradient.untyped_storage()
        size, view = gradient.numel() * gradient.element_size(), gradient._is_view()
        result, contiguous = incoming.get(storage._cdata), gradient.is_contiguous()
        if result is not None:
            found.append(InputGradient(tensor, size, "result", result, 0, view, contiguous))
        else:
            index = made.setdefault(storage._cdata, len(made))
            found.append(InputGradient(tensor, size, "new", index, storage.nbytes(), view, contiguous))
    return tuple(found)


def estimate(call: Call, results: Any, kind: str, reason: str) -> Outcome:
    """The outcome of what cannot be run by itself: it reads and writes its tensors once, and keeps them all.

    Args:
        results: Nested value of `TensorSpec` that the node is known to return.
        reason: Why, for the person who reads the plan.
    """
    outputs = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, TensorSpec)]
    inputs = call.tensors
    index = iter(range(len(outputs)))
    placed = pytree.tree_map_only(TensorSpec, lambda spec: Result(spec, Place("new", next(index))), results)
    moved = sum(spec.bytes for spec in (*inputs, *outputs))
    tracked = call.grad and any(spec.requires_grad for spec in outputs)
    once = Kernel("unknown", "pointwise", torch.float32, 0.0, float(moved))
    gradients = tuple(
        InputGradient(i, spec.bytes, "new", i, spec.bytes, view=False)
        for i, spec in enumerate(inputs)
        if spec.requires_grad
    )
    saved = [Place("input", i) for i in range(len(inputs))] + [Place("new", i) for i in range(len(outputs))]
    return Outcome(
        results=placed,
        new_bytes=tuple(spec.bytes for spec in outputs),
        saved=tuple(saved) if tracked else (),
        work=Work((once,), (once, once), (once, once)) if tracked else Work((once,)),
        temporary_bytes=moved if tracked else 0,
        forward_bytes=sum(spec.bytes for spec in outputs),
        backward=Backward(moved, moved, moved, moved, gradients) if tracked else Backward(),
        estimated=reason,
    )


class _End(torch.autograd.Function):
    """The end of the graph: makes the gradients of a node's results, which the engine alone then owns."""

    @staticmethod
    def forward(
        ctx: Any, await_: Callable[[int, torch.Tensor], None], numbers: list[int], *results: torch.Tensor
    ) -> torch.Tensor:
        ctx.await_, ctx.numbers = await_, numbers
        ctx.like = [_dense(x) for x in results]
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in ctx.like]
        for number, gradient in zip(ctx.numbers, gradients, strict=True):
            ctx.await_(number, gradient)
        return None, None, *gradients


def _dense(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of the gradient of a tensor, as `empty_like` would make it."""
    like = torch.empty_like(tensor, device="meta")
    return like.shape, like.stride(), like.dtype


class _Identity(torch.autograd.Function):
    """Gives a leaf a history, so that an operator may change it in place as it does in the model."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


@dataclass
class _Places:
    """Says of every tensor of a run whose storage it lives in."""

    inputs: list[torch.Tensor]
    new_bytes: list[int] = field(default_factory=list)
    _storages: list[Any] = field(default_factory=list)
    _known: dict[int, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, tensor in enumerate(self.inputs):
            self._known.setdefault(tensor.untyped_storage()._cdata, Place("input", index))

    def of(self, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = Place("new", len(self.new_bytes))
            self.new_bytes.append(storage.nbytes())
            self._storages.append(storage)  # kept alive, or its address would come to mean another storage
        return self._known[storage._cdata]


def _materialize(call: Call, device: str) -> tuple[list[torch.Tensor], Any, Any]:
    """Fake leaves for the tensor arguments, and (args, kwargs) made from them."""
    leaves: list[torch.Tensor] = []
    in_place = call.target._schema.is_mutable if hasattr(call.target, "_schema") else True

    def tensor(spec: TensorSpec) -> torch.Tensor:
        leaf = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        leaf.requires_grad_(spec.requires_grad and call.grad)
        leaves.append(leaf)
        return _Identity.apply(leaf) if leaf.requires_grad and in_place else leaf

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return tensor(leaf)
        return torch.device(device) if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_map(argument, call.arguments)
    return leaves, args, kwargs


def _function(target: Any, kind: str) -> Callable[..., Any]:
    return GPU_OPERATORS.get(target, target) if kind == "cuda" else target


def _cast_bytes(call: Call, converted: list[tuple[int, int]]) -> int:
    """What autocast's cache keeps of a call: the converted copies of parameters that are trained."""
    cached = {i: size for i, size in converted if call.tensors[i].weight and call.tensors[i].requires_grad}
    return sum(cached.values()) if call.autocast else 0


def _result(tensor: torch.Tensor, places: _Places, weight: bool) -> Result:
    spec = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, weight)
    return Result(spec, places.of(tensor))


@contextmanager
def contexts(call: Call, device: str, standing_in_for: str | None = None) -> Iterator[None]:
    """Grad mode and autocast as at the node.

    Args:
        standing_in_for: The device type whose autocast applies, when fake tensors of another type take its part.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.grad))
        for wanted, dtype in call.autocast:
            applies = wanted == (standing_in_for or device)
            stack.enter_context(_autocast(device if applies else wanted, dtype))
        yield


@contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast`, which refuses CUDA where there is none, by its own primitives; without its cache of casts."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("no backward runs here")
