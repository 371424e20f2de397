"""The rules of the joint oracle: what one node of a graph may do in which stage, and what that costs.

An item is an operator's local call, or a conversion. The rules are those of `rewrite` (which conversions there are),
`profile` (times, what is saved), `lower` (what crosses, what is held where) and `score`, stated anew for one node.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from autopart.cluster import Cluster
from autopart.graph import Graph
from autopart.profiler.analytic import CUDA_BLOCK_BYTES
from autopart.profiler.isolated import Call, Outcome, Result, Step, TensorSpec
from autopart.profiler.kernels import Kernel
from autopart.profiler.roofline import kernel_seconds
from autopart.sharding import Edge, Layout, Program, R, Strategy, conversion, local_shape, results_of
from autopart.sharding.operation import Operand, Operation, substitute
from autopart.solver import usable_bytes
from autopart.solver.pipeline import IN_FLIGHT, repeats
from autopart.workload import OPTIMIZER_STATES, Workload
from benchmarks.joint_draft import (
    Cell,
    Draft,
    Fixed,
    Pricing,
    Reference,
    Storage,
    Value,
    gradient_bytes,
    is_reference,
    references_in,
)


@dataclass
class Rules:
    """All layouts and two-stage cuts of a training graph on one pair of groups of t equal ranks.

    Attributes:
        stages: 2; or 1, for the best layouts without a cut.
        memory: Whether bytes are counted and limited.
        fixed: Walk this alone.
    """

    graph: Graph
    program: Program
    cluster: Cluster
    workload: Workload
    pricing: Pricing
    stages: int = 2
    memory: bool = False
    fixed: Fixed | None = None

    def __post_init__(self) -> None:
        t = self.program.t
        places = self.cluster.grouped(t)
        self.device, self.link, self.tensor_link = places.devices[0], places.link(0, 1), self.cluster.group_link(t)
        assert len(places) == 2 and places.devices[0] == places.devices[1] and not self.graph.opaque
        for node in self.program.operations:
            assert node.meta["grad_enabled"] and not node.meta["autocast"] and node.meta["checkpoint"] is None
        self.repeat, weight = repeats(self.workload.schedule, self.workload.microbatches)
        assert weight == 1.0
        self.in_flight = [IN_FLIGHT[self.workload.schedule](self.workload.microbatches, s, 2) for s in range(2)]
        self.limit = usable_bytes(self.device)
        self.block_bytes = CUDA_BLOCK_BYTES if self.device.kind == "cuda" else 1
        self.group = {name: i for i, names in enumerate(self.program.capture.colocated) for name in names}
        self.steps = [n for n in self.program.capture.graph.nodes if n in self.program.operations or n.op == "output"]
        self._seconds: dict[int, float] = {}
        self._signatures: dict[Hashable, Outcome] = {}

    @cached_property
    def last_reader(self) -> dict[fx.Node, int]:
        number = {node: i for i, node in enumerate(self.steps)}
        last: dict[fx.Node, int] = {}
        for edge in self.program.edges():
            last[edge.source] = max(last.get(edge.source, 0), number[edge.user])
        return last

    @cached_property
    def last_member(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for i, node in enumerate(self.steps):
            if node.name in self.group:
                last[self.group[node.name]] = i
        return last

    def _operator(self, start: Draft, node: fx.Node) -> Iterator[Draft]:
        operation = self.program.operations[node]
        for strategy in self.program.strategies[node]:
            if self.fixed is not None and self.fixed.choice.strategies[node.name] != strategy:
                continue
            drafts: Iterable[Draft] = [Draft(start.slots, start.cost, ((("strategy", node.name), strategy),))]
            for number, (source, layout) in enumerate(zip(operation.operands, strategy.inputs, strict=True)):
                edge = Edge(source, node, number)
                drafts = [new for draft in drafts for new in self._read(draft, edge, layout)]
            for draft in drafts:
                yield from self._calls(draft, operation, strategy, 0)

    def _outputs(self, start: Draft, node: fx.Node) -> Iterator[Draft]:
        drafts = [start]
        for number, source in enumerate(node.args[0]):
            if isinstance(source, fx.Node):
                drafts = [new for draft in drafts for new in self._read(draft, Edge(source, node, number), None)]
        for draft in drafts:
            end = draft.copy()
            for reference in dict.fromkeys(draft.operands):
                self._cross(end, reference)
            yield end

    def _read(self, draft: Draft, edge: Edge, wanted: Layout | None) -> Iterator[Draft]:
        """The draft with one more operand, in the layout in which the reader takes it (None: as a result)."""
        source = edge.source
        if source not in draft.slots:
            for first in self._held(draft, source):
                yield from self._read(first, edge, wanted)
            return
        before, flows = draft.slots[source].base.layout, self.program.differentiable(edge)
        after = self.program.result(edge.number, before) if wanted is None else wanted
        if not flows:
            before, after = before.without_gradient(), after.without_gradient()
        if after.owned is not None and before != after:
            return
        plain = Reference(source)
        call = conversion(before, after, tuple(source.meta["val"].shape), self.program.t, flows)
        if call.target is None:
            yield Draft(draft.slots, draft.cost, draft.decided, (*draft.operands, plain))
            return
        if self.program.fixed(edge):
            return
        assert not self.program.aliases.version(source, self.steps[-1])
        made = Reference(source, (after, flows))
        if made.converted in dict(draft.slots[source].converted):
            yield Draft(draft.slots, draft.cost, draft.decided, (*draft.operands, made))
            return
        key = source.name, call.target.__name__, repr(call.args), repr(dict(call.kwargs))
        for new, (made_value,) in self._item(
            draft, key, key, None, call.target, (plain, *call.args), dict(call.kwargs)
        ):
            new.put(made, made_value._replace(layout=after))
            new.operands = (*draft.operands, made)
            yield new

    def _held(self, draft: Draft, node: fx.Node) -> Iterator[Draft]:
        """A held tensor or an input in each of its layouts."""
        for layout in self.program.layouts[node]:
            if self.fixed is not None and layout != self._fixed_layout(node):
                continue
            new = draft.copy()
            tensor = node.meta["val"] if node.op == "placeholder" else self.graph.state[str(node.target)].tensor
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            if layout.split is not None:
                shape = local_shape(shape, layout, self.program.t)
                stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
            weight = node.op == "get_attr"
            grad = weight and tensor.requires_grad
            new.slots[node] = Cell(Value(layout, TensorSpec(shape, stride, tensor.dtype, grad, weight), weight))
            if weight:
                new.decided = (*new.decided, (("held", str(node.target)), layout))
            yield new

    def _fixed_layout(self, node: fx.Node) -> Layout:
        return R if node.op == "placeholder" else self.fixed.choice.state.get(str(node.target), R)

    def _calls(self, draft: Draft, operation: Operation, strategy: Strategy, number: int) -> Iterator[Draft]:
        """The local calls of a strategy, from the given one on."""
        node, call = operation.node, strategy.calls[number]
        last = number == len(strategy.calls) - 1

        def look(item: Any) -> Reference:
            return draft.operands[item.number] if isinstance(item, Operand) else Reference(("local", item.number))

        args, kwargs = substitute(call.args, look), substitute(call.kwargs or {}, look)
        key = node.name if last else (node.name, number)
        group = self.group.get(node.name) if last else None
        for new, values in self._item(draft, key, id(call), group, call.target, args, kwargs):
            if not last:
                new.slots["local", number] = Cell(values[0])
                yield from self._calls(new, operation, strategy, number + 1)
                continue
            for output, (value, layout) in enumerate(zip(values, strategy.outputs, strict=True)):
                for result in results_of(node, output):
                    self._result(new, node, result, value._replace(layout=layout), values)
            yield new

    def _result(self, draft: Draft, node: fx.Node, result: fx.Node, value: Value, values: list[Value]) -> None:
        draft.slots[result] = Cell(value)
        if result is not node:
            stage = value.stage
            draft.decided = (*draft.decided, (("stage", result.name), stage))
            if self.memory:
                size = gradient_bytes(value) + sum(map(gradient_bytes, values))
                draft.cost[4 + stage] = max(draft.cost[4 + stage], size)

    def _item(
        self, draft: Draft, key: Hashable, call: Hashable, group: int | None, target: Any, args: Any, kwargs: Any
    ) -> Iterator[tuple[Draft, list[Value]]]:
        """A call in each stage where it may be: the draft, and its values, whose layouts are to be set."""
        references = references_in((args, kwargs))
        read = {reference: draft.value(reference) for reference in references}
        low = max((value.stage or 0 for value in read.values()), default=0)
        together = draft.slots.get(("group", group))
        outcome = self._outcome(call, target, args, kwargs, read)
        work_s = self._work(outcome)
        for stage in range(low, self.stages):
            if together not in (None, stage) or (self.fixed is not None and self.fixed.stages[key] != stage):
                continue
            new = draft.copy()
            new.decided = (*new.decided, (("stage", key), stage))
            if group is not None:
                new.slots["group", group] = stage
            for reference in read:
                self._attach(new, reference, stage)
            before = [new.value(reference) for reference in references]
            additions = [v.spec for v in before if v.parameter and v.spec.requires_grad]
            extra_s = sum(map(self._addition, additions)) if outcome.work.backward else 0.0
            self._busy(new, stage, work_s + extra_s)
            yield new, self._values(new, key, stage, outcome, references, before)

    def _outcome(self, call: Hashable, target: Any, args: Any, kwargs: Any, read: Mapping[Reference, Value]) -> Outcome:
        """What a call does. `call`: what tells it from others whose tensors look alike."""
        signature = call, tuple(read[reference].spec for reference in references_in((args, kwargs)))
        known = self._signatures.get(signature)
        if known is None:
            described = pytree.tree_map(
                lambda x: read[x].spec if is_reference(x) else x, (args, kwargs), is_leaf=is_reference
            )
            known = self._signatures[signature] = self.pricing.outcome(Call(target, described, True, ()))
        return known

    def _attach(self, draft: Draft, reference: Reference, stage: int) -> None:
        """An item of a stage reads a value."""
        value = draft.value(reference)
        if value.stage is None:
            self._hold(draft, reference, stage)
            return
        if stage > value.stage:
            self._cross(draft, reference)
            value = draft.value(reference)
        if value.read and value.spec.requires_grad and not value.parameter:
            self._busy(draft, value.stage, self._addition(value.spec))
        draft.put(reference, value._replace(read=True))

    def _passes(self, size: int) -> int:
        """How often an update reads or writes a parameter: once each thing in a CPU's cache, else for each operator."""
        once, each = {"sgd": (3, 3), "sgd-momentum": (5, 8), "adam": (7, 18), "adamw": (7, 20)}[self.workload.optimizer]
        held = (2 + OPTIMIZER_STATES[self.workload.optimizer]) * size
        return once if self.device.kind == "cpu" and held <= self.device.cache_bytes else each

    def _hold(self, draft: Draft, reference: Reference, stage: int) -> None:
        """A stage holds a tensor of the model, or an input."""
        value, node = draft.value(reference), reference.slot
        if value.held[stage]:
            return
        size = value.spec.bytes
        if node.op == "placeholder":
            spec = next(spec for spec in self.graph.inputs if spec.name == node.name)
            held_bytes = size * (self.workload.microbatches if spec.batch_dim is not None else 1)
        else:
            states, trained = OPTIMIZER_STATES[self.workload.optimizer], value.spec.requires_grad
            held_bytes = size * (2 + states if trained else 1)
            if trained:
                draft.cost[stage] += size * self._passes(size) / self.device.memory_bandwidth_bytes_per_s
                if value.held[1 - stage]:
                    sync_s = self.link.latency_s + 2 * size / self.link.bandwidth_bytes_per_s
                    draft.cost[0] += sync_s
                    draft.cost[1] += sync_s
        if self.memory:
            draft.cost[2 + stage] += held_bytes
        held = (stage == 0 or value.held[0], stage == 1 or value.held[1])
        draft.put(reference, value._replace(held=held))

    def _cross(self, draft: Draft, reference: Reference) -> None:
        """A value is needed in stage 1: sent, if it is made in stage 0 and was not sent before."""
        value = draft.value(reference)
        if value.stage != 0 or value.crossed:
            return
        forward, backward = value.spec.bytes, gradient_bytes(value)
        time_s = (1 + (backward > 0)) * self.link.latency_s + (forward + backward) / self.link.bandwidth_bytes_per_s
        draft.cost[0] += (1 + self.repeat) * time_s
        draft.cost[1] += (1 + self.repeat) * time_s
        draft.put(reference, value._replace(crossed=True))
        if self.memory:
            storage = draft.slots.get(value.storage)
            own = storage is not None and value.storage[1] == value.item
            if not value.kept and not (own and storage.saved):
                draft.cost[2] += self.in_flight[0] * forward
                if own:
                    draft.slots[value.storage] = storage._replace(sent=forward)
            draft.cost[2] += self.workload.microbatches * backward
            draft.cost[3] += (self.workload.microbatches + 1) * forward

    def _values(
        self,
        draft: Draft,
        key: Hashable,
        stage: int,
        outcome: Outcome,
        references: Sequence[Reference],
        inputs: Sequence[Value],
    ) -> list[Value]:
        """The results of an item, and what is kept because of it."""
        results = [leaf for leaf in pytree.tree_leaves(outcome.results) if isinstance(leaf, Result)]
        values = [Value(R, r.spec, r.spec.weight and not outcome.work.backward, key, stage) for r in results]
        if not self.memory:
            return values
        new = [Storage(size, stage, False) for size in outcome.new_bytes]
        for place in outcome.saved:
            if place.of == "new":
                new[place.index] = self._save(draft, new[place.index])
            elif inputs[place.index].storage is not None:
                at = inputs[place.index].storage
                draft.slots[at] = self._save(draft, draft.slots[at])
        ends = dict(zip(references, inputs, strict=True)).values()
        workspace = outcome.temporary_bytes + sum(map(gradient_bytes, [*ends, *values]))
        draft.cost[4 + stage] = max(draft.cost[4 + stage], workspace)
        for i, result in enumerate(results):
            if result.place.of == "input":
                at = inputs[result.place.index].storage
            else:
                at = ("storage", key, result.place.index)
                draft.slots[at] = new[result.place.index]
            values[i] = values[i]._replace(storage=at, kept=any(storage.saved for storage in new))
        return values

    def _save(self, draft: Draft, storage: Storage) -> Storage:
        if not storage.saved:
            blocks = -(-storage.bytes // self.block_bytes)
            draft.cost[2 + storage.stage] += self.in_flight[storage.stage] * blocks * self.block_bytes
            draft.cost[2] -= self.in_flight[0] * storage.sent
        return storage._replace(saved=True, sent=0)

    def _busy(self, draft: Draft, stage: int, time_s: float) -> None:
        draft.cost[stage] += (1 + self.repeat) * time_s
        draft.cost[1 - stage] += time_s

    def _work(self, outcome: Outcome) -> float:
        if id(outcome) not in self._seconds:
            parts = (outcome.work.forward, outcome.work.backward, outcome.work.backward_input)
            forward, backward, backward_input = map(self._steps_s, parts)
            self._seconds[id(outcome)] = forward + max(backward, backward_input)
        return self._seconds[id(outcome)]

    def _addition(self, spec: TensorSpec) -> float:
        kernel = Kernel("add_", "pointwise", spec.dtype, 0.0, 3.0 * spec.bytes)
        return self._steps_s((kernel,))

    def _steps_s(self, steps: Iterable[Step]) -> float:
        """Kernels on the device, exchanges on the link between ranks."""
        return sum(
            kernel_seconds(step, self.device) if isinstance(step, Kernel) else step.seconds(self.tensor_link)
            for step in steps
        )
