"""Analytic costs: walk the graph once, run each distinct node in isolation on fake tensors, and price what it did.

Memory: every storage of the graph has an owner, the node that made it; views and in-place operators pass it on. A
storage that autograd keeps is counted once, with all nodes whose backward needs it. State (parameters, buffers) is
resident anyway and never counted.

Time: the node's kernels on the roofline of each device, and its collectives on the link of the tensor group. Two costs
of the backward pass belong to no operator and are charged where they arise: adding up the gradients of a value with
several readers (to the value), and adding a weight gradient to `.grad` (to the node that uses the weight). A node in a
checkpointed region runs forward once more; the region keeps what it reads from outside, and holds what its own nodes
save only while backward runs it again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.cluster import Cluster, Link
from autopart.costs import Allocations, Costs, NodeAllocations, NodeMemory, NodeTime, SavedTensor, added_up
from autopart.graph import Graph, StateEntry
from autopart.profiler.call_times import CallTimes, Seconds
from autopart.profiler.growth import Growth, batch_dependent, resized
from autopart.profiler.isolated import Call, Outcome, Place, Result, Runner, TensorSpec, estimate
from autopart.profiler.kernels import Kernel
from autopart.profiler.known import Known
from autopart.profiler.recomputation import recomputed_regions
from autopart.sharding import LocalGraph

CUDA_BLOCK_BYTES = 512
"""The CUDA allocator rounds every block up to a multiple of this (`kMinBlockSize` in CUDACachingAllocator.cpp)."""


@dataclass(eq=False)
class _Storage:
    """A storage of the graph: `owner` is None for state; `shard` is what backward keeps of it, to gather it again."""

    bytes: int
    owner: str | None
    savers: dict[str, None] = field(default_factory=dict)
    shard: _Storage | None = None
    values: list[Value] = field(default_factory=list)
    number: int = -1


@dataclass(eq=False)
class Value:
    """A tensor of the graph; its description changes when an operator makes it require grad in place.

    Attributes:
        parameter: Whether its gradient is added to that of a parameter as it is.
    """

    spec: TensorSpec
    storage: _Storage
    parameter: bool = False
    number: int = -1


MOSTLY = 0.5
"""Costs with a larger share of the time unmeasured are corrected formulas, not measurements."""

Outcomes: TypeAlias = dict[Any, Outcome]
"""What calls do on one kind of device, by signature."""


def profile(
    graph: Graph,
    cluster: Cluster,
    tensor_link: Link | None = None,
    outcomes: Outcomes | None = None,
    known: Known | None = None,
) -> Costs:
    """Predicted time and memory of every node of the graph's primary capture, for one microbatch.

    For a local graph they are those of one of its ranks, collectives included.

    Args:
        cluster: Each device that may run the graph (of a local graph: the first of each group).
        tensor_link: Between the ranks of a local graph; None: the cluster's link inside a machine.
        outcomes: What was found before for other graphs on the same kind of device; what is new is added.
        known: What was measured on the cluster's devices; what it lacks has its formula's times.

    Never fails on an operator: what cannot be analysed (an opaque node, an operator without a fake implementation) is
    estimated by the bytes it touches, and `Costs.notes` says so.
    """
    walk = Walk(graph, cluster.devices[0].kind, outcomes)
    walk.run()
    return _costs(walk, cluster, tensor_link, {}, known)


def profile_rows(
    graph: Graph,
    cluster: Cluster,
    growths: Sequence[float],
    outcomes: Outcomes | None = None,
    known: Known | None = None,
) -> Iterator[Costs]:
    """As `profile`, estimated for microbatches of so many times the graph's rows (see `growth`)."""
    walk = Walk(graph, cluster.devices[0].kind, outcomes)
    walk.run()
    depends = batch_dependent(graph)
    for rows in growths:
        yield _costs(walk, cluster, None, dict.fromkeys(depends, rows), known)


def _costs(walk: Walk, cluster: Cluster, tensor_link: Link | None, growth: Growth, known: Known | None) -> Costs:
    kinds = list(dict.fromkeys(device.kind for device in cluster.devices))
    link = tensor_link or cluster.intra_node
    devices = {device.name: device for device in cluster.devices}
    notes, source = walk.notes, known.source if known is not None else "analytic"
    if len(kinds) > 1:
        notes = [*notes, f"Saved activations are those of a {kinds[0]} device on every device."]
    times = {}
    for name, device in devices.items():
        prices = CallTimes(device, link, walk.ranks, known)
        times[name] = walk.times(prices, growth)
        if prices.has_measurements:
            missing, share = walk.unmeasured(prices, times[name])
            if missing:
                notes = [*notes, _unmeasured_note(missing, len(walk.outcomes), share, walk.ranks)]
            if source == "measured" and share > MOSTLY:
                source = "corrected"
        elif source == "measured":
            notes = [*notes, f"{name} was not measured: its times are those of formulas."]
    return Costs(
        times=times,
        memory={name: resized(memory, growth.get(name, 1.0)) for name, memory in walk.memory.items()},
        saved=walk.saved(CUDA_BLOCK_BYTES if kinds[0] == "cuda" else 1, growth),
        source=source,
        notes=tuple(notes),
        allocations=None if growth else walk.allocations(),
        updates={} if known is None else {name: found.updates for name, found in known.corrections.items()},
    )


def _unmeasured_note(missing: int, operators: int, share: float, ranks: int) -> str:
    why = ", as tensors are split" if ranks > 1 else ""
    return (
        f"{missing} of {operators} operators, {share:.1%} of the predicted time, were not measured{why}: their times "
        "are those of formulas, corrected by the profile."
    )


class Walk:
    """One pass over the graph.

    Attributes:
        values: Node -> its `Value`, nested as the node's value is.
        ranks: How many ranks hold the graph's model together.
        outcomes: Name of a call node -> what it does.
        calls: Name of a node that calls an operator -> the call.
        sums, weight_sums: Node name -> values whose gradients are added up, once for each time they stand here.
        runs_again: Names of the nodes that backward runs once more.
        memory: Node name -> bytes.
        notes: What had to be estimated.
    """

    def __init__(self, graph: Graph, kind: str, outcomes: Outcomes | None = None) -> None:
        self._graph = graph
        self._kind = kind
        self.ranks = graph.tensor if isinstance(graph, LocalGraph) else 1
        self._runner = Runner(kind, self.ranks)
        self._training = graph.mode == "training"
        self._regions = recomputed_regions(graph.primary) if self._training else []
        self.values: dict[fx.Node, Any] = {}
        self._storages: list[_Storage] = []
        self._tensors: list[Value] = []
        self._allocations: dict[str, NodeAllocations] = {}
        self._state: dict[int, _Storage] = {}
        self._seen: Outcomes = {} if outcomes is None else outcomes
        self.outcomes: dict[str, Outcome] = {}
        self.calls: dict[str, Call] = {}
        self.sums: dict[str, list[TensorSpec]] = {}
        self.weight_sums: dict[str, list[TensorSpec]] = {}
        self._reads: dict[str, list[_Storage]] = {}
        self.runs_again: set[str] = set()
        self._gathered: dict[str, int] = {}
        self.memory: dict[str, NodeMemory] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        """Visit every node."""
        handlers: dict[str, Callable[[fx.Node], Any]] = {
            "placeholder": self._placeholder,
            "get_attr": self._get_attr,
            "call_function": self._call_function,
            "call_module": self._call_module,
        }
        for node in self._graph.primary.graph.nodes:
            if node.op == "output":
                continue
            self.values[node] = value = handlers[node.op](node)
            self._charge_gradient_sums(node, value)
            tensors = [leaf.spec for leaf in pytree.tree_leaves(value) if isinstance(leaf, Value)]
            outcome = self.outcomes.get(node.name)
            self.memory[node.name] = NodeMemory(
                output_bytes=sum(spec.bytes for spec in tensors),
                gradient_bytes=sum(spec.bytes for spec in tensors if spec.requires_grad),
                temporary_bytes=(outcome.temporary_bytes if outcome else 0) + self._gathered.get(node.name, 0),
            )
        for region in self._regions:
            self._recompute(region)

    def times(self, prices: CallTimes, growth: Growth) -> dict[str, NodeTime]:
        """Seconds of every node at such prices; equal nodes are priced once."""
        priced: dict[tuple[int, float, int], Seconds] = {}
        times = {}
        for node in self.values:
            outcome = self.outcomes.get(node.name)
            rows = growth.get(node.name, 1.0)
            own = Seconds()
            if outcome is not None:
                key = id(outcome), rows, self._state_bytes(node.name)
                if key not in priced:
                    priced[key] = prices.call(self.calls.get(node.name), outcome.work, rows, key[-1])
                own = priced[key]
            again = own.forward_s if node.name in self.runs_again else 0.0
            sums, weight_sums = self.sums.get(node.name, ()), self.weight_sums.get(node.name, ())
            added_s = sum(prices.addition(spec, rows) for spec in sums)
            weight_added_s = sum(prices.addition(spec, 1.0) for spec in weight_sums)
            times[node.name] = NodeTime(
                forward_s=own.forward_s,
                backward_input_s=again + own.backward_input_s + added_s,
                backward_weight_s=own.backward_weight_s + weight_added_s,
                operators=_by_operator(own, node.name in self.runs_again, added_s + weight_added_s),
            )
        return times

    def unmeasured(self, prices: CallTimes, times: Mapping[str, NodeTime]) -> tuple[int, float]:
        """How many nodes' times are not measured, and their share of all the time."""
        names = [name for name in self.outcomes if prices.measured(self.calls.get(name)) is None]
        share, whole = (sum(times[name].forward_s + times[name].backward_s for name in of) for of in (names, times))
        return len(names), share / whole if whole else 0.0

    def saved(self, block_bytes: int, growth: Growth) -> tuple[SavedTensor, ...]:
        """Every storage that autograd keeps, each rounded up to the allocator's block."""
        found = []
        for storage in self._storages:
            if storage.owner is not None and storage.savers and storage.bytes:
                size = int(storage.bytes * growth.get(storage.owner, 1.0))
                found.append(SavedTensor(-(-size // block_bytes) * block_bytes, storage.owner, tuple(storage.savers)))
        return tuple(found)

    def allocations(self) -> Allocations:
        """Every storage and tensor of the graph, and what its nodes do with them."""
        block = CUDA_BLOCK_BYTES if self._kind == "cuda" else 1
        return Allocations(
            storages=tuple(-(-storage.bytes // block) * block for storage in self._storages),
            tensors=tuple(value.storage.number for value in self._tensors),
            tensor_bytes=tuple(value.spec.bytes for value in self._tensors),
            scattered=frozenset(value.number for value in self._tensors if not value.spec.contiguous),
            values={node.name: _numbers(value) for node, value in self.values.items()},
            nodes=self._allocations,
            regions=tuple(tuple(n.name for n in region) for region in self._regions),
            block_bytes=block,
        )

    def _state_bytes(self, name: str) -> int:
        """Bytes of the state that a node reads."""
        return sum(storage.bytes for storage in dict.fromkeys(self._reads[name]) if storage.owner is None)

    def _placeholder(self, node: fx.Node) -> Any:
        def value(tensor: torch.Tensor, requires_grad: bool) -> Value:
            spec = _spec(tensor, requires_grad and self._training)
            return self._place(spec, self._storage(spec.bytes, node.name))

        return _zip_gradients(value, node)

    def _get_attr(self, node: fx.Node) -> Value:
        entry: StateEntry = self._graph.state[str(node.target)]
        tensor = entry.tensor
        address = tensor.untyped_storage()._cdata
        if address not in self._state:
            self._state[address] = self._storage(entry.bytes, None)
        storage = self._state[address]
        spec = _spec(tensor, entry.requires_grad and self._training)
        return self._place(replace(spec, weight=True), storage, parameter=True)

    def _call_function(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self._resolve(node.args[0])[node.args[1]]
        arguments = self._resolve((node.args, node.kwargs))
        call = self.calls[node.name] = self._call(node, arguments)
        key = signature_of(call, self.ranks)
        outcome = self._seen.get(key)
        if outcome is None:
            try:
                outcome = self._runner.run(call)
            except Exception as error:
                reason = f"{node.target} could not be analysed ({_first_line(error)})"
                outcome = self._estimate(node, call, reason)
            self._seen[key] = outcome
        return self._apply(node, outcome, arguments)

    def _call_module(self, node: fx.Node) -> Any:
        arguments = self._resolve((node.args, node.kwargs))
        opaque = self._graph.opaque[str(node.target)]
        call = self._call(node, arguments)
        where = f"'{opaque.path}' " if opaque.path else ""
        outcome = self._estimate(node, call, f"{where}is kept whole ({opaque.reason})")
        subject = opaque.subject
        if isinstance(subject, torch.nn.Module):
            outcome = replace(outcome, work=_with_parameters(outcome.work, subject, call))
        return self._apply(node, outcome, arguments)

    def _estimate(self, node: fx.Node, call: Call, reason: str) -> Outcome:
        results = _zip_gradients(lambda tensor, grad: _spec(tensor, grad and self._training), node)
        self.notes.append(f"{node.name}: {reason}; its time and memory are estimated from its inputs and outputs.")
        return estimate(call, results, self._kind, reason)

    def _call(self, node: fx.Node, arguments: Any) -> Call:
        described = pytree.tree_map_only(Value, lambda value: value.spec, arguments)
        grad = self._training and node.meta.get("grad_enabled", True)
        return Call(node.target, described, grad, tuple(node.meta.get("autocast", ())))

    def _apply(self, node: fx.Node, outcome: Outcome, arguments: Any) -> Any:
        """Give the outcome of a signature to one node: its storages become storages of the graph."""
        self.outcomes[node.name] = outcome
        inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Value)]
        self._reads[node.name] = [value.storage for value in inputs]
        new = [self._storage(size, node.name) for size in outcome.new_bytes]

        def storage(place: Place) -> _Storage:
            return inputs[place.index].storage if place.of == "input" else new[place.index]

        parameter = not outcome.work.backward and all(value.parameter for value in inputs)

        def value(result: Result) -> Value:
            return self._place(result.spec, storage(result.place), parameter and result.spec.weight)

        for place in outcome.saved:
            self._keep(storage(place), node)
        result = pytree.tree_map_only(Result, value, outcome.results)
        saved = [storage(place) for place in outcome.saved]
        gathered = sum(kept.bytes for kept in saved if kept.shard is not None)
        self._allocations[node.name] = NodeAllocations(
            reads=_numbers(arguments),
            results=_numbers(result),
            makes=tuple(made.number for made in new),
            saves=tuple(dict.fromkeys((kept.shard or kept).number for kept in saved)),
            forward_bytes=outcome.forward_bytes,
            cast_bytes=outcome.cast_bytes,
            backward_bytes=outcome.backward.peak_bytes + gathered,
            backward_shared_bytes=outcome.backward.shared_peak_bytes + gathered,
            backward_input_bytes=outcome.backward.input_peak_bytes + gathered,
            backward_weight_bytes=outcome.backward.weight_peak_bytes + gathered,
            gradients=tuple(replace(g, tensor=inputs[g.tensor].number) for g in outcome.backward.gradients),
        )
        if node.kwargs.get("again", False):
            result.storage.shard = inputs[0].storage
        self._spread_requires_grad(node, inputs, result)
        if outcome.work.backward:
            self.weight_sums[node.name] = [
                value.spec for value in inputs if value.parameter and value.spec.requires_grad
            ]
        return result

    def _keep(self, storage: _Storage, node: fx.Node) -> None:
        """Backward of `node` needs a storage: of one that is gathered again, its shard is kept meanwhile."""
        if storage.shard is None:
            storage.savers[node.name] = None
            return
        assert storage.owner is not None
        self.runs_again.add(storage.owner)
        self._gathered[node.name] = self._gathered.get(node.name, 0) + storage.bytes
        storage.shard.savers[node.name] = None

    def _spread_requires_grad(self, node: fx.Node, inputs: list[Value], result: Any) -> None:
        """An in-place operator that writes a tracked value makes every view of the storage tracked."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for value in pytree.tree_leaves(result):
            if isinstance(value, Value) and value.spec.requires_grad and value.storage.owner is not None:
                for other in value.storage.values:
                    other.spec = replace(other.spec, requires_grad=True)

    def _charge_gradient_sums(self, node: fx.Node, value: Any) -> None:
        """A value with r readers gets r gradients, which are added up in r - 1 operations."""
        if not isinstance(value, Value) or not value.spec.requires_grad or value.parameter:
            return
        readers = sum(1 for user in node.users if user.op != "output")
        if readers > 1:
            sums = self.weight_sums if value.spec.weight else self.sums
            sums.setdefault(node.name, []).extend([value.spec] * (readers - 1))

    def _recompute(self, region: list[fx.Node]) -> None:
        """Backward runs a region again up to the last node that saves something (torch stops it there)."""
        names = [node.name for node in region]
        saving = [i for i, name in enumerate(names) if name in self.outcomes and self.outcomes[name].saved]
        again = names[: saving[-1] + 1] if saving else []
        self.runs_again.update(again)
        inside = set(names)
        own = [storage for storage in self._storages if storage.owner in inside]
        saved_by: dict[str, int] = dict.fromkeys(names, 0)
        for storage in own:
            savers = [name for name in storage.savers if name in inside]
            if savers:
                saved_by[savers[0]] += storage.bytes
            for name in savers:
                del storage.savers[name]
        held = 0
        for name in again:
            held += saved_by[name]
            memory = self.memory[name]
            self.memory[name] = replace(memory, temporary_bytes=memory.temporary_bytes + held)
        for name in names:
            for storage in self._reads.get(name, ()):
                if storage.owner not in inside:
                    storage.savers[name] = None

    def _resolve(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda node: self.values[node])

    def _storage(self, size: int, owner: str | None) -> _Storage:
        storage = _Storage(size, owner, number=len(self._storages))
        self._storages.append(storage)
        return storage

    def _place(self, spec: TensorSpec, storage: _Storage, parameter: bool = False) -> Value:
        value = Value(spec, storage, parameter, len(self._tensors))
        self._tensors.append(value)
        storage.values.append(value)
        return value


def _by_operator(own: Seconds, again: bool, added_s: float) -> Mapping[str, float]:
    """Seconds by operator, with a second forward, and with the gradients that are added up."""
    return added_up([own.forward, own.backward, own.forward if again else {}, {"add_": added_s} if added_s else {}])


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(leaf.number for leaf in pytree.tree_leaves(values) if isinstance(leaf, Value))


def _spec(tensor: torch.Tensor, requires_grad: bool) -> TensorSpec:
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    return TensorSpec(tuple(tensor.shape), stride, tensor.dtype, requires_grad)


def _zip_gradients(make: Callable[[torch.Tensor, bool], Any], node: fx.Node) -> Any:
    """`make(val, requires_grad)` for each tensor of a node's value, nested as it is."""
    value, tracked = node.meta["val"], node.meta.get("requires_grad", False)
    if isinstance(value, torch.Tensor):
        return make(value, bool(tracked))
    if isinstance(value, list | tuple):
        flags = tracked if isinstance(tracked, list | tuple) else [tracked] * len(value)
        pairs = zip(value, flags, strict=True)
        return [make(item, bool(flag)) if isinstance(item, torch.Tensor) else item for item, flag in pairs]
    return value


def _with_parameters(work: Any, module: torch.nn.Module, call: Call) -> Any:
    """An opaque module is taken to multiply each of its rows with each of its parameters."""
    parameters = list(module.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    rows = max((torch.Size(spec.shape[:-1]).numel() for spec in call.tensors if len(spec.shape) > 1), default=1)

    def grown(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
        return tuple(
            replace(kernel, family="matmul", flops=2.0 * size * rows, bytes=kernel.bytes + 4.0 * size)
            for kernel in kernels
        )

    return replace(
        work, forward=grown(work.forward), backward=grown(work.backward), backward_input=grown(work.backward_input[:1])
    )


def signature_of(call: Call, ranks: int) -> Any:
    """What tells calls apart that do different things; torch's own operators do the same among any number of ranks."""
    among = None if hasattr(call.target, "_schema") else ranks
    return call.target, among, _frozen(call.arguments), call.grad, call.autocast


def _frozen(arguments: Any) -> Any:
    """A hashable form of call arguments; types are part of it, because 1, 1.0 and True are equal to Python."""
    if isinstance(arguments, list | tuple):
        return (type(arguments) is tuple, *(_frozen(item) for item in arguments))
    if isinstance(arguments, dict):
        return tuple((key, _frozen(item)) for key, item in arguments.items())
    if isinstance(arguments, slice):
        return ("slice", arguments.start, arguments.stop, arguments.step)
    if isinstance(arguments, float) and arguments != arguments:
        return (float, "nan")
    return (type(arguments), arguments)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
