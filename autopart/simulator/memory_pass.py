"""What one stage holds for one microbatch: its forward and its backward pass, block by block.

Every node was run by itself (`autopart.costs.Allocations`); here its blocks live as long as something holds them:

- forward, a block is held by the values in it that are still to be read, and by autograd where a backward needs it;
- backward, nodes run in reverse. A gradient is held by the tensors that it is meant for; a second gradient for the same
  tensor is added in place only where nothing else holds the first, and it is no view. Else the sum is a new block of
  the tensor's own size. (Autograd's rule: `InputBuffer::accumulate` in torch/csrc/autograd/input_buffer.cpp.)
- the gradient of a parameter waits until all its uses have given theirs. The first microbatch's becomes `.grad`, later
  ones are added to it and go;
- a call that is recomputed keeps what it was given. Backward runs it once more, up to the last node that saves
  something, before the first of its nodes.

What crosses a boundary lies in the runtime's receive buffers, which exist for the whole step and are counted apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopart.costs import Allocations, NodeAllocations
from autopart.plan import MicrobatchMemory

RANDOM_STATE_BYTES = 5056
"""What a recomputed call keeps on a CPU to draw the same numbers again; a GPU's state stays with the host."""


@dataclass(frozen=True)
class StageProgram:
    """One stage of a graph.

    Attributes:
        nodes: Its calls, in order.
        state: Tensors of parameters, buffers and constants.
        inputs: Tensors of the batch that it reads, of which it makes copies.
        received: Tensors that come from the stage before.
        sent: Tensors that go to the stage after, relayed ones included.
        targets: Tensors whose gradients start its backward: what is sent and carries one, or the loss.
        regions: The calls that backward runs again, each a sequence of nodes.
    """

    nodes: tuple[str, ...]
    state: frozenset[int]
    inputs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    targets: tuple[int, ...]
    regions: tuple[tuple[str, ...], ...] = ()


def stage_pass(allocations: Allocations, stage: StageProgram) -> MicrobatchMemory:
    """Run a stage's forward and backward in memory."""
    run = _Run(allocations, stage)
    run.forward()
    kept = run.heap.live
    sent = run.sent_blocks()
    forward_peak = run.heap.peak
    first = run.backward(first=True)
    run = _Run(allocations, stage)
    run.forward()
    later = run.backward(first=False)
    return MicrobatchMemory(
        kept=kept,
        sent=sum(sent.values()),
        forward_peak=forward_peak,
        backward_peak=later.peak - kept,
        first_backward_peak=first.peak - kept,
        gradients=first.gradients,
        returned=later.returned,
    )


@dataclass
class _Heap:
    """Blocks that are held, each by a number of holders."""

    live: int = 0
    peak: int = 0
    sizes: dict[object, int] = field(default_factory=dict)
    holders: Counter[object] = field(default_factory=Counter)

    def take(self, block: object, size: int) -> None:
        """A new block, held by nothing yet."""
        self.sizes[block] = size
        self.live += size
        self.peak = max(self.peak, self.live)

    def hold(self, block: object) -> None:
        self.holders[block] += 1

    def drop(self, block: object) -> None:
        """One holder less; a block without any is given back."""
        self.holders[block] -= 1
        if self.holders[block] <= 0 and block in self.sizes:
            self.live -= self.sizes.pop(block)

    def reach(self, extra: int) -> None:
        """For a moment there is more."""
        self.peak = max(self.peak, self.live + extra)


@dataclass(eq=False)
class _Gradient:
    """A gradient: a tensor of its own, or a view, in a block; `uses` counts the tensors that it is meant for."""

    block: object
    view: bool
    uses: int = 0


@dataclass(frozen=True)
class _Backward:
    peak: int
    gradients: int
    returned: int


class _Run:
    """One microbatch in one stage.

    Attributes:
        outside: Storages that are held anyway: state, and what was received.
    """

    def __init__(self, allocations: Allocations, stage: StageProgram) -> None:
        self._all = allocations
        self._stage = stage
        self.heap = _Heap()
        tensors = allocations.tensors
        self.outside = {tensors[t] for t in (*stage.state, *stage.received)}
        self._region = {name: region for region in stage.regions for name in region}
        self._made_in = {s: name for name in stage.nodes if name in allocations.nodes for s in self._node(name).makes}
        self._random_bytes = 0 if allocations.block_bytes > 1 else RANDOM_STATE_BYTES
        self._reached = self._nodes_with_backward()
        self._arguments = {region: self._arguments_of(region) for region in stage.regions}

    def _node(self, name: str) -> NodeAllocations:
        return self._all.nodes[name]

    def _calls(self) -> list[str]:
        return [name for name in self._stage.nodes if name in self._all.nodes]

    def _nodes_with_backward(self) -> set[str]:
        """The nodes to which a gradient comes."""
        awaited, found = set(self._stage.targets), set()
        for name in reversed(self._calls()):
            node = self._node(name)
            if node.gradients and not awaited.isdisjoint(node.results):
                found.add(name)
                awaited.update(gradient.tensor for gradient in node.gradients)
        return found

    def _arguments_of(self, region: tuple[str, ...]) -> frozenset[int]:
        """Storages that a recomputed call is given."""
        own = set(region)
        read = {self._all.tensors[t] for name in region if name in self._all.nodes for t in self._node(name).reads}
        return frozenset(s for s in read if s not in self.outside and self._made_in.get(s) not in own)

    def sent_blocks(self) -> dict[object, int]:
        """The blocks that are sent: storages of this stage, and contiguous copies of tensors that are not."""
        found: dict[object, int] = {}
        for tensor in self._stage.sent:
            storage = self._all.tensors[tensor]
            if tensor in self._all.scattered and tensor not in self._stage.received:
                found["copy", tensor] = self._all.rounded(self._all.tensor_bytes[tensor])
            elif storage not in self.outside:
                found[storage] = self._all.storages[storage]
        return found

    def forward(self) -> None:
        heap, tensors, storages = self.heap, self._all.tensors, self._all.storages
        sent, ends = self.sent_blocks(), self._last_reads()
        inputs = [tensors[t] for t in self._stage.inputs]
        for storage in inputs:
            heap.take(storage, storages[storage])
            heap.hold(storage)
        entered: set[tuple[str, ...]] = set()
        cast = 0
        for name in self._calls():
            node, region = self._node(name), self._region.get(name)
            heap.reach(node.forward_bytes + cast)
            for storage in node.makes:
                heap.take(storage, storages[storage])
                heap.hold(storage)
            if region is None:
                self._keep(node.saves if name in self._reached else ())
            else:
                cast += node.cast_bytes
                if region not in entered:
                    entered.add(region)
                    self._keep(self._arguments[region])
                    heap.take(("random", region), self._random_bytes)
                    heap.hold(("random", region))
            for storage in ends[name]:
                heap.drop(storage)
        for block, size in sent.items():
            if isinstance(block, tuple):
                heap.take(block, size)
                heap.hold(block)
        heap.reach(cast)
        for storage in inputs:
            heap.drop(storage)
        for tensor in self._stage.targets:
            if tensor not in self._stage.sent and tensors[tensor] in self._made_in:
                heap.drop(tensors[tensor])

    def _last_reads(self) -> dict[str, list[int]]:
        """Call -> the storages made here that nothing reads after it, but for what is sent, and the loss."""
        tensors = self._all.tensors
        last: dict[int, str] = dict(self._made_in)
        for name in self._calls():
            last.update((tensors[t], name) for t in self._node(name).reads if tensors[t] in last)
        stay = {*self.sent_blocks(), *(tensors[t] for t in self._stage.targets if t not in self._stage.sent)}
        ends: dict[str, list[int]] = defaultdict(list)
        for storage, name in last.items():
            if storage not in stay:
                ends[name].append(storage)
        return ends

    def _keep(self, saved: Iterable[int]) -> None:
        for storage in saved:
            if storage not in self.outside:
                self.heap.hold(storage)

    def backward(self, first: bool) -> _Backward:
        self.heap.peak = self.heap.live
        flow = _Flow(self._all, self.heap, self._stage, self._reached, first)
        left = {region: sum(name in self._reached for name in region) for region in self._stage.regions}
        again: dict[tuple[str, ...], dict[int, object]] = {}
        for name in reversed(self._calls()):
            if name not in self._reached:
                continue
            region = self._region.get(name)
            if region is None:
                flow.node(self._node(name), self._saved(name, {}))
                continue
            if region not in again:
                again[region] = self._run_again(region)
            flow.node(self._node(name), self._saved(name, again[region]))
            left[region] -= 1
            if not left[region]:
                for block in (*self._arguments[region], ("random", region)):
                    self.heap.drop(block)
        for block in self.sent_blocks():
            self.heap.drop(block)
        return flow.end()

    def _saved(self, name: str, blocks: Mapping[int, object]) -> list[object]:
        """The blocks that a node's backward needs, where storages that were made again lie in `blocks`."""
        return [blocks.get(s, s) for s in self._node(name).saves if s not in self.outside]

    def _run_again(self, region: tuple[str, ...]) -> dict[int, object]:
        """Recompute a call: its storages by their blocks now, those that it saves held.

        torch stops at the last tensor that is saved: the node that saves it does not run if that is one of its inputs.
        """
        calls = [name for name in region if name in self._all.nodes]
        saving = [i for i, name in enumerate(calls) if name in self._reached and self._node(name).saves]
        ran = calls[: saving[-1] + 1] if saving else []
        stopped = ran[-1] if ran and not set(self._node(ran[-1]).saves) & set(self._node(ran[-1]).makes) else None
        tensors = self._all.tensors
        last_read = {
            tensors[t]: index
            for index, name in enumerate(ran)
            for t in (*self._node(name).reads, *self._node(name).results)
        }
        blocks: dict[int, object] = {}
        for index, name in enumerate(ran):
            node = self._node(name)
            if name == stopped:
                for block in self._saved(name, blocks):
                    self.heap.hold(block)
            else:
                self._node_again(name, blocks)
            for storage, at in last_read.items():
                if at == index and storage in blocks:
                    self.heap.drop(blocks[storage])
            for storage in set(node.makes) - last_read.keys() if name != stopped else ():
                self.heap.drop(blocks[storage])
        return blocks

    def _node_again(self, name: str, blocks: dict[int, object]) -> None:
        """Run one node of a recomputed call; a holder of each block that it makes is its reader."""
        node = self._node(name)
        self.heap.reach(node.forward_bytes)
        for storage in node.makes:
            blocks[storage] = (name, storage)
            self.heap.take(blocks[storage], self._all.storages[storage])
            self.heap.hold(blocks[storage])
        if name in self._reached:
            for block in self._saved(name, blocks):
                self.heap.hold(block)


class _Flow:
    """Gradients on their way back through a stage."""

    def __init__(
        self, allocations: Allocations, heap: _Heap, stage: StageProgram, reached: set[str], first: bool
    ) -> None:
        self._all, self._heap, self._first = allocations, heap, first
        self._received = stage.received
        self._leaves = stage.state
        self._waiting: dict[int, _Gradient] = {}
        self._awaited: Counter[int] = Counter(
            g.tensor for name in reached for g in allocations.nodes[name].gradients if g.tensor in stage.state
        )
        self._numbers = 0
        self._kept = 0
        for tensor in stage.targets:
            # It lies in a receive buffer (that of a loss is one number): something else holds it.
            self._give(tensor, _Gradient(("buffer", tensor), view=True))

    def node(self, node: NodeAllocations, saved: Sequence[object]) -> None:
        """Run a node backward; then what it saved goes."""
        heap = self._heap
        given = {i: self._waiting.pop(t) for i, t in enumerate(node.results) if t in self._waiting}
        if not given:
            return
        alone = all(g.uses == 1 and heap.holders[g.block] == 1 and g.block in heap.sizes for g in given.values())
        dense = sum(self._all.rounded(self._all.tensor_bytes[node.results[i]]) for i in given)
        heap.reach((node.backward_bytes if alone else node.backward_shared_bytes) - dense)
        made: dict[int, object] = {}
        for gradient in node.gradients:
            if gradient.of == "new" and gradient.index not in made:
                self._numbers += 1
                made[gradient.index] = ("gradient", self._numbers)
                heap.take(made[gradient.index], self._all.rounded(gradient.storage_bytes))
        passed: list[tuple[int, _Gradient]] = []
        for gradient in node.gradients:
            if gradient.of == "new":
                found = _Gradient(made[gradient.index], gradient.view)
                heap.hold(found.block)
            elif gradient.index not in given:
                continue
            elif gradient.view:
                found = _Gradient(given[gradient.index].block, True)
                heap.hold(found.block)
            else:
                found = given[gradient.index]
            found.uses += 1
            passed.append((gradient.tensor, found))
        for gone in given.values():
            self._let_go(gone)
        for block in saved:
            heap.drop(block)
        for tensor, found in passed:
            self._arrive(tensor, found)

    def _give(self, tensor: int, gradient: _Gradient) -> None:
        gradient.uses += 1
        self._heap.hold(gradient.block)
        self._waiting[tensor] = gradient

    def _let_go(self, gradient: _Gradient) -> None:
        gradient.uses -= 1
        if gradient.uses == 0:
            self._heap.drop(gradient.block)

    def _arrive(self, tensor: int, new: _Gradient) -> None:
        """Hand a gradient to a tensor; its use is counted already."""
        old = self._waiting.get(tensor)
        self._waiting[tensor] = new if old is None else self._sum(tensor, old, new)
        if tensor in self._leaves:
            self._awaited[tensor] -= 1
            if not self._awaited[tensor]:
                self._accumulate(tensor, self._waiting.pop(tensor))

    def _sum(self, tensor: int, old: _Gradient, new: _Gradient) -> _Gradient:
        heap = self._heap
        in_place = not old.view and old.uses == 1 and heap.holders[old.block] == 1 and old.block in heap.sizes
        if in_place:
            self._let_go(new)
            return old
        self._numbers += 1
        total = _Gradient(("sum", self._numbers), False, 1)
        heap.take(total.block, self._all.rounded(self._all.tensor_bytes[tensor]))
        heap.hold(total.block)
        self._let_go(old)
        self._let_go(new)
        return total

    def _accumulate(self, tensor: int, gradient: _Gradient) -> None:
        """Into `.grad`: the first becomes it, if nothing else holds it, else a copy does."""
        if not self._first:
            self._let_go(gradient)
            return
        size = self._all.rounded(self._all.tensor_bytes[tensor])
        self._kept += size
        if gradient.uses == 1 and self._heap.holders[gradient.block] == 1 and gradient.block in self._heap.sizes:
            return
        self._numbers += 1
        self._heap.take(("grad", self._numbers), size)
        self._let_go(gradient)

    def end(self) -> _Backward:
        """The gradients of what was received are sent back: as they are, or copied where something else holds them."""
        returned = 0
        for tensor in self._received:
            gradient = self._waiting.get(tensor)
            if gradient is None:
                continue
            size = self._all.rounded(self._all.tensor_bytes[tensor])
            returned += size
            if gradient.block not in self._heap.sizes or gradient.uses > 1 or self._heap.holders[gradient.block] > 1:
                self._numbers += 1
                self._heap.take(("returned", self._numbers), size)
        return _Backward(self._heap.peak, self._kept, returned)
