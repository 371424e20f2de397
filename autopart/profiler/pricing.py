"""Prices of layouts: what a strategy of an operator and a conversion of a value cost a rank, before a choice is made.

They are the costs that `profile` gives to the nodes of the local graph, taken apart so that they add up. A local call
is run by itself like any other (`isolated`), on arguments whose shapes and strides are those of the whole value, cut.
That a conversion makes its value contiguous, so that a reader needs one copy more or less, is not seen. The kernels of
a conversion are those of its two moves (`moves`). Gradients are added up where a value has r readers, in r - 1 kernels:
every reader pays one, in the layout in which it reads, and the producer is paid one back; a conversion reads one value
and makes another. The gradient of a parameter is also added to `.grad`: nobody is paid back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.cluster import Cluster, Link
from autopart.costs import SavedTensor, StrategyCost
from autopart.graph import Graph
from autopart.profiler.analytic import (
    CUDA_BLOCK_BYTES,
    Outcomes,
    Walk,
    signature_of,
)
from autopart.profiler.call_times import CallTimes, addition
from autopart.profiler.isolated import Call, Outcome, Result, Runner, Step, TensorSpec, Work
from autopart.profiler.kernels import Kernel
from autopart.profiler.known import Known
from autopart.profiler.moves import copied
from autopart.profiler.ranks import Exchange
from autopart.sharding import Layout, Operation, Strategy, conversion, local_shape, results_of
from autopart.sharding.operation import Operand, substitute
from autopart.sharding.operation import Result as LocalResult


class LayoutPrices:
    """Prices for one graph on the first device of a cluster, for any number of ranks.

    Attributes:
        saved: Every storage that autograd keeps of the whole graph for one microbatch.
    """

    def __init__(
        self, graph: Graph, cluster: Cluster, outcomes: Outcomes | None = None, known: Known | None = None
    ) -> None:
        """See `profile` for `outcomes` and `known`; of what is known, corrections alone count here."""
        self._device = cluster.devices[0]
        self._times = CallTimes(self._device, cluster.intra_node, known=known)
        self._outcomes: Outcomes = {} if outcomes is None else outcomes
        self._walk = Walk(graph, self._device.kind, self._outcomes)
        self._walk.run()
        block_bytes = CUDA_BLOCK_BYTES if self._device.kind == "cuda" else 1
        self.saved: tuple[SavedTensor, ...] = self._walk.saved(block_bytes, {})
        self._training = graph.mode == "training"
        self._runners: dict[int, Runner] = {}
        self._classes: dict[Hashable, int] = {}
        self._class_of: dict[tuple[fx.Node, int], int] = {}
        self._priced: dict[Hashable, tuple[Strategy, StrategyCost]] = {}
        self._converted: dict[Hashable, float] = {}
        self._seconds: dict[Kernel, float] = {}

    def strategy(self, operation: Operation, strategy: Strategy, link: Link) -> StrategyCost:
        """What the local calls of a strategy cost, with that link between the ranks."""
        key = self._class(operation), id(strategy), link
        if key not in self._priced:
            self._priced[key] = strategy, self._cost(operation, strategy, link)  # kept alive, or its id would go on
        return self._priced[key][1]

    def conversion(self, value: fx.Node, a: Layout, b: Layout, t: int, differentiable: bool, read: bool) -> float:
        """Seconds of the kernels of one conversion.

        Args:
            differentiable: Whether a gradient flows back to its readers.
            read: Whether an operator reads its result, not the model's caller alone.
        """
        whole = self._walk.values[value].spec
        key = whole, a, b, t, differentiable, read
        if key not in self._converted:
            self._converted[key] = self._copies_s(whole, a, b, t, differentiable, read)
        return self._converted[key]

    def _copies_s(self, whole: TensorSpec, a: Layout, b: Layout, t: int, differentiable: bool, read: bool) -> float:
        made = conversion(a, b, whole.shape, t, differentiable)
        if made.target is None:
            return 0.0
        before = local_spec(whole, a, t)
        forward, backward = copied(made, before, t)
        copies = [*forward, *(backward if whole.requires_grad else ())]
        found = self._kernels_s(Kernel("copy", "pointwise", whole.dtype, 0.0, float(size)) for size in copies)
        if whole.requires_grad:
            found += self._kernels_s([addition(before)])
            found -= self._kernels_s([addition(local_spec(whole, b, t))]) * read
        return found

    def _class(self, operation: Operation) -> int:
        """A number that operators have in common whose strategies cost the same."""
        key = operation.node, operation.t
        if key not in self._class_of:
            node = operation.node
            read = tuple(_read(v) for n in range(len(operation.outputs)) for v in results_of(node, n))
            values = tuple((v.spec, v.parameter) for v in map(self._walk.values.__getitem__, operation.operands))
            again, autocast = node.name in self._walk.runs_again, tuple(node.meta.get("autocast", ()))
            described = operation.signature, values, read, again, autocast
            self._class_of[key] = self._classes.setdefault(described, len(self._classes))
        return self._class_of[key]

    def _cost(self, operation: Operation, strategy: Strategy, link: Link) -> StrategyCost:
        node, t = operation.node, operation.t
        pairs = list(zip(operation.operands, strategy.inputs, strict=True))
        operands = [local_spec(self._walk.values[v].spec, layout, t) for v, layout in pairs]
        grad = self._training and bool(node.meta.get("grad_enabled", True))
        made: list[Any] = []
        readers: list[int] = []
        steps: list[Step] = []
        sums: list[tuple[TensorSpec, int]] = []
        times = 2 if node.name in self._walk.runs_again else 1

        def look(item: Operand | LocalResult) -> Any:
            return operands[item.number] if isinstance(item, Operand) else made[item.number]

        for call in strategy.calls:
            arguments = substitute((call.args, call.kwargs or {}), look)
            read = _items((call.args, call.kwargs or {}))
            for number in {item.number for item in read if isinstance(item, LocalResult)}:
                readers[number] += 1
            if node.op == "call_module" or (call.target is node.target and self._free(node)):
                outcome = self._walk.outcomes[node.name]
            else:
                outcome = self._outcome(Call(call.target, arguments, grad, tuple(node.meta.get("autocast", ()))), t)
            work = outcome.work
            steps += work.forward * times + max(work.backward, work.backward_input, key=len)
            made.append(pytree.tree_map_only(Result, lambda result: result.spec, outcome.results))
            readers.append(0)
            tracked = bool(work.backward) or any(result.spec.requires_grad for result in outcome.tensors)
            distinct = {pairs[item.number]: operands[item.number] for item in read if isinstance(item, Operand)}
            for (operand, _), spec in distinct.items():
                if spec.requires_grad and (tracked or not self._walk.values[operand].parameter):
                    sums.append((spec, 1))
        for spec, count in zip(made[:-1], readers[:-1], strict=True):
            if isinstance(spec, TensorSpec) and spec.requires_grad:
                sums.append((spec, count - 1))
        for number in range(len(operation.outputs)):
            for value in results_of(node, number):
                spec = local_spec(self._walk.values[value].spec, strategy.outputs[number], t)
                if spec.requires_grad and _read(value):
                    sums.append((spec, -1))
        exchanges = [step for step in steps if isinstance(step, Exchange)]
        return StrategyCost(
            self._kernels_s(steps) + sum(count * self._kernels_s([addition(spec)]) for spec, count in sums),
            sum(exchange.seconds(link) for exchange in exchanges),
            sum(exchange.bytes for exchange in exchanges),
        )

    def _kernels_s(self, steps: Iterable[Step]) -> float:
        found = 0.0
        for step in steps:
            if isinstance(step, Kernel):
                if step not in self._seconds:
                    self._seconds[step] = self._times.kernel(step)
                found += self._seconds[step]
        return found

    def _free(self, node: fx.Node) -> bool:
        """Whether an operator only gives its argument another shape, which starts no kernel on shards either."""
        target = node.target
        view = isinstance(target, torch._ops.OpOverload) and target.is_view and not target._can_decompose()
        return view and self._walk.outcomes[node.name].work == Work()

    def _outcome(self, call: Call, t: int) -> Outcome:
        call = flattened(call)
        key = signature_of(call, t)
        if key not in self._outcomes:
            runner = self._runners.setdefault(t, Runner(self._device.kind, t))
            self._outcomes[key] = runner.run(call)
        return self._outcomes[key]


def flattened(call: Call) -> Call:
    """The same work in one dimension, if its operator goes element by element: so strategies that cut one of several
    dimensions are run once."""
    shapes = {spec.shape for spec in call.tensors if spec.shape}
    alike = torch.Tag.pointwise in getattr(call.target, "tags", ()) and len(shapes) == 1
    if not alike or not all(_contiguous(spec) for spec in call.tensors):
        return call

    def flat(spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=(prod(spec.shape),), stride=(1,)) if spec.shape else spec

    return replace(call, arguments=pytree.tree_map_only(TensorSpec, flat, call.arguments))


def local_spec(spec: TensorSpec, layout: Layout, t: int) -> TensorSpec:
    """What a rank holds of a tensor: the strides of dimensions around the one that is cut shrink with it."""
    shape = local_shape(spec.shape, layout, t)
    if len(shape) > len(spec.shape):  # of every rank
        return replace(spec, shape=shape, stride=(prod(spec.shape), *spec.stride))
    dim = layout.spread
    if dim is None:
        return spec
    before, after, step = spec.shape[dim], shape[dim], spec.stride[dim]
    stride = tuple(s * after // before if s > step > 0 else s for s in spec.stride)
    return replace(spec, shape=shape, stride=stride)


def _contiguous(spec: TensorSpec) -> bool:
    around = [prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
    return all(n == 1 or a == b for n, a, b in zip(spec.shape, spec.stride, around, strict=True))


def _read(value: fx.Node) -> bool:
    """Whether an operator reads a value, not the model's caller alone."""
    return any(user.op != "output" for user in value.users)


def _items(arguments: Any) -> Sequence[Operand | LocalResult]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Operand | LocalResult)]
