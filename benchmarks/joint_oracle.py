"""The best layouts and the best cut into two stages, chosen at once: exact dynamic programming over a graph's nodes.

What is minimised is what a user is given: `rewrite` -> `profile` -> `lower` -> `score`. That value is a sum over the
items of the local graph (operators, conversions), its nets and its held tensors, and of each there is a local rule:

- an item costs what the profiler makes of its call's signature: target, arguments, and shape, strides and flags of its
  tensors (`Pricing` asks the profiler's own `Runner`, once for each signature);
- a net is paid once if it crosses, a held tensor once in each stage that uses it (and both pay if both do);
- a value's second reader, and each after it, costs one addition of gradients;
- a storage is kept once, by its owner's stage, if anybody saves it.

So when the nodes up to v are decided, what they do to the rest is in the values that are still to be read: layout,
signature, stage, whether they have crossed, been read and been saved, and which conversions of them exist. That is the
state of the program. A step decides, for one node, the layouts of the tensors that it is the first to read, its
strategy, and the stages of itself and of each new conversion; every legal combination is tried. With f the fill and l_p
the load of stage p, the step time is max(f + l_0, f + l_1): both terms are sums, so of the ways to reach one state only
those are kept that no other beats in both (and in the bytes of each stage: what is kept, and the largest workspace).
Nothing else is left out. `value` walks one given choice by the same rules; `truth` values it as the planner does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from torch import fx
from torch.utils import _pytree as pytree

from autopart.cluster import Cluster
from autopart.graph import Graph
from autopart.profiler import profile
from autopart.profiler.analytic import CUDA_BLOCK_BYTES
from autopart.profiler.isolated import Call, Outcome, Result, Runner, TensorSpec
from autopart.profiler.kernels import Kernel
from autopart.profiler.roofline import seconds
from autopart.runtime import collectives
from autopart.sharding import Choice, Edge, Layout, Program, R, Strategy, conversion, local_shape, results_of, rewrite
from autopart.sharding.operation import Operand, Operation, substitute
from autopart.solver import group_link, lower, usable_bytes
from autopart.solver.pipeline import IN_FLIGHT, repeats
from autopart.solver.score import Score, score
from autopart.workload import OPTIMIZER_STATES, Workload

# Ways that differ by less than this share of the time to beat are taken to be equal.
EQUAL = 1e-11


class Value(NamedTuple):
    """A tensor of the local graph.

    Attributes:
        item: Key of the item that makes it; None for held tensors and inputs.
        stage: Of that item.
        crossed: Whether it is sent to stage 1.
        read: Whether an item reads it.
        held: Whether each stage holds it (held tensors and inputs).
        kept: Whether its item keeps something for itself.
        storage: Where it lives, if an item made that.
    """

    layout: Layout
    spec: TensorSpec
    parameter: bool
    item: Hashable = None
    stage: int | None = None
    crossed: bool = False
    read: bool = False
    held: tuple[bool, bool] = (False, False)
    kept: bool = False
    storage: Hashable = None


class Cell(NamedTuple):
    """A value of the whole graph with its conversions: (layout, whether a gradient flows) -> value."""

    base: Value
    converted: frozenset[tuple[tuple[Layout, bool], Value]] = frozenset()


class Storage(NamedTuple):
    """A storage that an item of a stage made. `sent`: bytes that it holds only because the item's value was sent."""

    bytes: int
    stage: int
    saved: bool
    sent: int = 0


class Reference(NamedTuple):
    """Which tensor an argument is: a cell, and the key of a conversion or None."""

    slot: Hashable
    converted: tuple[Layout, bool] | None = None


class Pricing:
    """Outcomes of calls by signature, for one kind of device and one tensor degree; shared by clusters."""

    def __init__(self, kind: str, t: int) -> None:
        self._runner = Runner(kind, t)
        self._outcomes: dict[str, Outcome] = {}

    def outcome(self, call: Call) -> Outcome:
        key = repr(call)
        if key not in self._outcomes:
            self._outcomes[key] = self._runner.run(call)
        return self._outcomes[key]


@dataclass
class Draft:
    """A node's step, half decided: what has changed, what it costs, and what was decided."""

    slots: dict[Hashable, Any]
    cost: list[float]
    decided: tuple[tuple[Hashable, Any], ...] = ()
    operands: tuple[Reference, ...] = ()

    def copy(self) -> Draft:
        return Draft(dict(self.slots), list(self.cost), self.decided, self.operands)

    def value(self, reference: Reference) -> Value:
        cell = self.slots[reference.slot]
        return cell.base if reference.converted is None else dict(cell.converted)[reference.converted]

    def put(self, reference: Reference, value: Value) -> None:
        cell = self.slots.get(reference.slot)
        if reference.converted is None:
            self.slots[reference.slot] = Cell(value, cell.converted if cell else frozenset())
        else:
            others = {**dict(cell.converted), reference.converted: value}
            self.slots[reference.slot] = cell._replace(converted=frozenset(others.items()))


@dataclass(frozen=True)
class Fixed:
    """One choice and one assignment (item key -> stage): what `Oracle.value` walks."""

    choice: Choice
    stages: Mapping[Hashable, int]


@dataclass(frozen=True)
class Optimum:
    """The best of all.

    Attributes:
        step_s: Its step time; infinite if nothing fits.
        fixed: The layouts and the stages; None if nothing fits.
        bytes: Of each stage, if memory was counted.
        states: How many states were met.
        ways: How many ways were kept.
    """

    step_s: float
    fixed: Fixed | None
    bytes: tuple[float, float] | None
    states: int
    ways: int


@dataclass
class Oracle:
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
    _options: dict[Hashable, list[Any]] = field(init=False, default_factory=dict)
    _cells: list[tuple[Hashable, Any]] = field(init=False, default_factory=list)
    _number: dict[tuple[Hashable, Any], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        t = self.program.t
        places = self.cluster.grouped(t)
        self.device, self.link, self.tensor_link = places.devices[0], places.link(0, 1), group_link(self.cluster, t)
        assert len(places) == 2 and places.devices[0] == places.devices[1] and not self.graph.opaque
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

    # The program.

    def optimum(self, to_beat_s: float = inf) -> Optimum:
        """The best layouts and stages.

        Args:
            to_beat_s: A step time that is known to be reached.
        """
        width = 6 if self.memory else 2
        ways = {(frozenset(), (False, False)): (np.zeros((1, width)), np.zeros(1, dtype=np.int64))}
        trail: list[tuple[list[Any], np.ndarray, np.ndarray]] = []
        states = kept = 0
        for step in range(len(self.steps)):
            options: list[Any] = []
            reached: dict[Hashable, list[tuple[np.ndarray, np.ndarray, int]]] = defaultdict(list)
            for (slots, used), (costs, labels) in ways.items():
                near, changes = self._changes(step, slots)
                rest = slots - near
                for cost, new, touched, decided in changes:
                    total = costs + cost
                    if self.memory:
                        np.maximum(costs[:, 4:], cost[4:], out=total[:, 4:])
                    key = rest | new, (used[0] or touched[0], used[1] or touched[1])
                    reached[key].append((total, labels, len(options)))
                    options.append(decided)
            ways, parents, chosen, label = {}, [], [], 0
            for key, found in reached.items():
                total = np.concatenate([f[0] for f in found])
                parent = np.concatenate([f[1] for f in found])
                option = np.concatenate([np.full(len(f[1]), f[2]) for f in found])
                alive = np.flatnonzero(self._alive(total, to_beat_s))
                alive = alive[_unbeaten(total[alive], EQUAL * (to_beat_s if to_beat_s < inf else 0.0))]
                if len(alive):
                    ways[key] = total[alive], np.arange(label, label + len(alive))
                    parents.append(parent[alive])
                    chosen.append(option[alive])
                    label += len(alive)
            if not ways:
                return Optimum(inf, None, None, states, kept)
            trail.append((options, np.concatenate(parents), np.concatenate(chosen)))
            states, kept = states + len(ways), kept + label
        ends = [way for (_, used), (c, i) in ways.items() if self._full(used) for way in zip(c, i, strict=True)]
        if not ends:
            return Optimum(inf, None, None, states, kept)
        cost, label = min(ends, key=lambda end: end[0][:2].max())
        size = (cost[2] + cost[4], cost[3] + cost[5]) if self.memory else None
        return Optimum(float(cost[:2].max()), self._traced(trail, int(label)), size, states, kept)

    def _full(self, used: tuple[bool, bool]) -> bool:
        """Whether no stage is empty that should not be."""
        return all(used[: self.stages])

    def _alive(self, total: np.ndarray, to_beat_s: float) -> np.ndarray:
        alive = total[:, :2].max(axis=1) <= to_beat_s * (1 + 1e-9)
        if self.memory and self.fixed is None:
            alive &= (total[:, 2:4] + total[:, 4:] <= self.limit).all(axis=1)
        return alive

    def _traced(self, trail: list[Any], label: int) -> Fixed:
        decided: dict[Hashable, Any] = {}
        for options, parents, chosen in reversed(trail):
            decided.update(options[chosen[label]])
            label = int(parents[label])
        held = {key[1]: x for key, x in decided.items() if isinstance(key, tuple) and key[0] == "held"}
        strategies = {key[1]: x for key, x in decided.items() if isinstance(key, tuple) and key[0] == "strategy"}
        stages = {key[1]: x for key, x in decided.items() if isinstance(key, tuple) and key[0] == "stage"}
        return Fixed(Choice(held, strategies), stages)

    def _changes(self, step: int, slots: frozenset[int]) -> tuple[frozenset[int], list[Any]]:
        """What a step may do to a state: the cells near it, and every (cost, new cells, stages used, decisions)."""
        node, cells = self.steps[step], dict(self._cells[number] for number in slots)
        sources = node.all_input_nodes if node.op == "output" else self.program.operations[node].operands
        near = {source: cells[source] for source in sources if source in cells}
        if node.name in self.group and ("group", self.group[node.name]) in cells:
            near["group", self.group[node.name]] = cells["group", self.group[node.name]]
        for cell in [*near.values()]:
            for value in [cell.base, *(v for _, v in cell.converted)] if isinstance(cell, Cell) else ():
                if value.storage is not None:
                    near[value.storage] = cells[value.storage]
        elsewhere = {
            value.storage
            for slot, cell in cells.items()
            if isinstance(cell, Cell) and slot not in near
            for value in (cell.base, *(v for _, v in cell.converted))
        }
        needed = frozenset(near.keys() & elsewhere)
        items = self._numbered(near)
        key = step, items, needed
        if key not in self._options:
            self._options[key] = list(self._tried(step, near, needed))
        return items, self._options[key]

    def _numbered(self, cells: Mapping[Hashable, Any]) -> frozenset[int]:
        """Cells as numbers, which are quickly compared."""
        numbers = []
        for pair in cells.items():
            number = self._number.setdefault(pair, len(self._cells))
            if number == len(self._cells):
                self._cells.append(pair)
            numbers.append(number)
        return frozenset(numbers)

    def _tried(self, step: int, near: dict[Hashable, Any], needed: frozenset[Hashable]) -> Iterator[Any]:
        """Every way to decide a step, without those that another beats in everything."""
        node = self.steps[step]
        start = Draft(near, [0.0] * (6 if self.memory else 2))
        drafts = self._outputs(start, node) if node.op == "output" else self._operator(start, node)
        found: dict[Hashable, list[Draft]] = defaultdict(list)
        for draft in drafts:
            touched = [False, False]
            for (kind, _), decision in draft.decided:
                if kind == "stage":
                    touched[decision] = True
            self._forget(draft, step, needed)
            found[self._numbered(draft.slots), tuple(touched)].append(draft)
        for (slots, touched), same in found.items():
            costs = np.array([draft.cost for draft in same])
            for i in _unbeaten(costs, 0.0):
                yield costs[i], slots, touched, same[i].decided

    def _forget(self, draft: Draft, step: int, needed: frozenset[Hashable]) -> None:
        """Drop what nobody will read any more."""
        for slot in [*draft.slots]:
            if self._over(slot, step):
                del draft.slots[slot]
        values = [v for c in draft.slots.values() if isinstance(c, Cell) for v in (c.base, *dict(c.converted).values())]
        used = {value.storage for value in values} | needed
        for slot, cell in [*draft.slots.items()]:
            if isinstance(cell, Storage) and slot not in used:
                del draft.slots[slot]

    def _over(self, slot: Any, step: int) -> bool:
        if isinstance(slot, fx.Node):
            return self.last_reader.get(slot, -1) <= step
        return slot[0] == "local" or (slot[0] == "group" and self.last_member[slot[1]] <= step)

    # One node.

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
        for new, values in self._item(draft, key, id(call), self.group.get(node.name), call.target, args, kwargs):
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
                size = _gradient(value) + sum(map(_gradient, values))
                draft.cost[4 + stage] = max(draft.cost[4 + stage], size)

    def _item(
        self, draft: Draft, key: Hashable, call: Hashable, group: int | None, target: Any, args: Any, kwargs: Any
    ) -> Iterator[tuple[Draft, list[Value]]]:
        """A call in each stage where it may be: the draft, and its values, whose layouts are to be set."""
        references = _references((args, kwargs))
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
            yield new, self._values(new, key, stage, outcome, before)

    def _outcome(self, call: Hashable, target: Any, args: Any, kwargs: Any, read: Mapping[Reference, Value]) -> Outcome:
        """What a call does. `call`: what tells it from others whose tensors look alike."""
        signature = call, tuple(read[reference].spec for reference in _references((args, kwargs)))
        known = self._signatures.get(signature)
        if known is None:
            described = pytree.tree_map(
                lambda x: read[x].spec if _is_reference(x) else x, (args, kwargs), is_leaf=_is_reference
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
                draft.cost[stage] += size * (3 + 2 * states) / self.device.memory_bandwidth_bytes_per_s
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
        forward, backward = value.spec.bytes, _gradient(value)
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
        self, draft: Draft, key: Hashable, stage: int, outcome: Outcome, inputs: Sequence[Value]
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
        ends = {value.item or id(value.spec): _gradient(value) for value in inputs}
        workspace = outcome.temporary_bytes + sum(ends.values()) + sum(map(_gradient, values))
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
            forward, backward, backward_input = (seconds(p, self.device, self.tensor_link) for p in parts)
            self._seconds[id(outcome)] = forward + max(backward, backward_input)
        return self._seconds[id(outcome)]

    def _addition(self, spec: TensorSpec) -> float:
        kernel = Kernel("add_", "pointwise", spec.dtype, 0.0, 3.0 * spec.bytes)
        return seconds((kernel,), self.device, self.tensor_link)


def value(oracle: Oracle, fixed: Fixed) -> Optimum:
    """One choice and assignment, by the program's rules; memory included."""
    names = ("graph", "program", "cluster", "workload", "pricing")
    return Oracle(**{name: getattr(oracle, name) for name in names}, memory=True, fixed=fixed).optimum()


def truth(oracle: Oracle, fixed: Fixed) -> tuple[Score, bool]:
    """One choice and assignment, by the functions that plan; and whether it fits."""
    t = oracle.program.t
    places = oracle.cluster.grouped(t)
    local = rewrite(oracle.graph, fixed.choice, t)
    costs = profile(local, places, group_link(oracle.cluster, t))
    lowered = lower(local, costs, places, oracle.workload, 2)
    keys = item_keys(oracle.program, local)
    found = score(lowered.problem, [fixed.stages[keys[node]] for node in lowered.calls])
    return found, found.fits(lowered.problem)


def item_keys(program: Program, local: Graph) -> dict[fx.Node, Hashable]:
    """Call node of a local graph -> key of the item in the oracle."""
    known = {node.name for node in program.capture.calls}
    keys: dict[fx.Node, Hashable] = {}
    inner = 0
    for node in local.primary.calls:
        if node.name in known:
            keys[node], inner = node.name, 0
        elif getattr(node.target, "__module__", "") == collectives.__name__:
            keys[node] = node.args[0].name, node.target.__name__, repr(tuple(node.args[1:])), repr(dict(node.kwargs))
        else:
            keys[node], inner = (node.name.partition("_local")[0], inner), inner + 1
    assert len(set(keys.values())) == len(keys)
    return keys


def _gradient(value: Value) -> int:
    return value.spec.bytes if value.spec.requires_grad else 0


def _references(arguments: Any) -> list[Reference]:
    """The tensors among arguments, in order."""
    if _is_reference(arguments):
        return [arguments]
    if isinstance(arguments, Mapping):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return []
    return [found for item in arguments for found in _references(item)]


def _is_reference(item: Any) -> bool:
    return isinstance(item, Reference)


def _unbeaten(costs: np.ndarray, equal: float) -> np.ndarray:
    """Rows that no other row beats, or equals and comes before, in every column.

    Args:
        equal: Times (the first two columns) that differ by less are equal.
    """
    order = np.lexsort(costs.T[::-1])
    if costs.shape[1] == 2:
        second = costs[order, 1]
        best = np.minimum.accumulate(second)
        return order[np.concatenate([[True], second[1:] < best[:-1] - equal])] if len(order) else order
    slack = np.zeros(costs.shape[1])
    slack[:2] = equal
    alive: list[int] = []
    for row in order:
        if not alive or not (costs[alive] <= costs[row] + slack).all(axis=1).any():
            alive.append(int(row))
    return np.array(alive, dtype=np.int64)
