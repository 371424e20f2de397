"""What one stage holds for one microbatch: its forward and its backward pass, block by block.

Every node was run by itself (`autopart.costs.Allocations`); here its blocks live as long as something holds them:

- forward, a block is held by the values in it that are still to be read, and by autograd where a backward needs it;
- backward, nodes run in reverse, and gradients flow by the rules of `memory_gradients`;
- a call that is recomputed keeps what it was given. Backward runs it once more, up to the last node that saves
  something, before the first of its nodes.

What crosses a boundary lies in the runtime's receive buffers, which exist for the whole step and are counted apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopart.costs import Allocations, NodeAllocations
from autopart.plan import MicrobatchMemory, SplitBackwardMemory
from autopart.simulator.memory_gradients import BackwardPass, GradientFlow
from autopart.simulator.memory_heap import Heap
from autopart.simulator.memory_program import StageProgram
from autopart.simulator.memory_split_backward import SplitBackward

RANDOM_STATE_BYTES = 5056
"""What a recomputed call keeps on a CPU to draw the same numbers again; a GPU's state stays with the host."""


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


def split_pass(allocations: Allocations, stage: StageProgram) -> SplitBackwardMemory:
    """Run a stage's forward, and its backward in two parts, in memory."""
    found = []
    for first in (True, False):
        run = _Run(allocations, stage)
        run.forward()
        found.append(run.split_backward(first))
    return replace(found[1], first_weight_peak=found[0].weight_peak, gradients=found[0].gradients)


class _Run:
    """One microbatch in one stage.

    Attributes:
        outside: Storages that are held anyway: state, and what was received.
    """

    def __init__(self, allocations: Allocations, stage: StageProgram) -> None:
        self._all = allocations
        self._stage = stage
        self.heap = Heap()
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

    def backward(self, first: bool) -> BackwardPass:
        self.heap.peak = self.heap.live
        flow = GradientFlow(self._all, self.heap, self._stage, self._reached, first)
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

    def split_backward(self, first: bool) -> SplitBackwardMemory:
        def saved(name: str) -> list[object]:
            return self._saved(name, {})

        sent = list(self.sent_blocks())
        return SplitBackward(self._all, self._stage, self.heap, self._reached, saved, sent).run(first)

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
