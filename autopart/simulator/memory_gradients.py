"""Gradients on their way back through a stage, by the rules of autograd's engine.

A gradient is held by the tensors that it is meant for; a second gradient for the same tensor is added in place only
where nothing else holds the first, and it is no view. Else the sum is a new block of the tensor's own size
(`InputBuffer::accumulate` in torch/csrc/autograd/input_buffer.cpp). The gradient of a parameter waits until all its
uses have given theirs; the first microbatch's becomes `.grad`, later ones are added to it and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.costs import Allocations, NodeAllocations
from autopart.simulator.memory_heap import Heap
from autopart.simulator.memory_program import StageProgram


@dataclass(eq=False)
class Gradient:
    """A gradient: a tensor of its own, or a view, in a block; `uses` counts the tensors that it is meant for."""

    block: object
    view: bool
    contiguous: bool = True
    uses: int = 0


def let_go(heap: Heap, gradient: Gradient) -> None:
    """One tensor less holds a gradient."""
    gradient.uses -= 1
    if gradient.uses == 0:
        heap.drop(gradient.block)


@dataclass(frozen=True)
class BackwardPass:
    peak: int
    gradients: int
    returned: int


class GradientFlow:
    """Gradients on their way back through a stage."""

    def __init__(
        self, allocations: Allocations, heap: Heap, stage: StageProgram, reached: set[str], first: bool
    ) -> None:
        self._all, self._heap, self._first = allocations, heap, first
        self._received = stage.received
        self._leaves = stage.state
        self._waiting: dict[int, Gradient] = {}
        self._awaited: Counter[int] = Counter(
            g.tensor for name in reached for g in allocations.nodes[name].gradients if g.tensor in stage.state
        )
        self._numbers = heap.taken
        self._kept = 0
        for tensor in stage.targets:
            # It lies in a receive buffer (that of a loss is one number): something else holds it.
            self._give(tensor, Gradient(("buffer", tensor), view=True))

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
                heap.leave(made[gradient.index], self._all.rounded(gradient.storage_bytes))
        passed: list[tuple[int, Gradient]] = []
        for gradient in node.gradients:
            if gradient.of == "new":
                found = Gradient(made[gradient.index], gradient.view, gradient.contiguous)
                heap.hold(found.block)
            elif gradient.index not in given:
                continue
            elif gradient.view:
                found = Gradient(given[gradient.index].block, True, gradient.contiguous)
                heap.hold(found.block)
            else:
                found = given[gradient.index]
            found.uses += 1
            passed.append((gradient.tensor, found))
        for gone in given.values():
            let_go(self._heap, gone)
        for block in saved:
            heap.drop(block)
        heap.reach(0)
        for tensor, found in passed:
            self._arrive(tensor, found)

    def _give(self, tensor: int, gradient: Gradient) -> None:
        gradient.uses += 1
        self._heap.hold(gradient.block)
        self._waiting[tensor] = gradient

    def _arrive(self, tensor: int, new: Gradient) -> None:
        """Hand a gradient to a tensor; its use is counted already."""
        old = self._waiting.get(tensor)
        self._waiting[tensor] = new if old is None else self._sum(tensor, old, new)
        if tensor in self._leaves:
            self._awaited[tensor] -= 1
            if not self._awaited[tensor]:
                self._accumulate(tensor, self._waiting.pop(tensor))

    def _sum(self, tensor: int, old: Gradient, new: Gradient) -> Gradient:
        heap = self._heap
        in_place = not old.view and old.uses == 1 and heap.holders[old.block] == 1 and old.block in heap.sizes
        if in_place:
            let_go(self._heap, new)
            return old
        self._numbers += 1
        total = Gradient(("sum", self._numbers), False, uses=1)
        heap.take(total.block, self._all.rounded(self._all.tensor_bytes[tensor]))
        heap.hold(total.block)
        let_go(self._heap, old)
        let_go(self._heap, new)
        return total

    def _accumulate(self, tensor: int, gradient: Gradient) -> None:
        """Into `.grad`: the first becomes it, if nothing else holds it, else a copy does."""
        if not self._first:
            let_go(self._heap, gradient)
            return
        size = self._all.rounded(self._all.tensor_bytes[tensor])
        self._kept += size
        if gradient.uses == 1 and self._heap.holders[gradient.block] == 1 and gradient.block in self._heap.sizes:
            return
        self._numbers += 1
        self._heap.take(("grad", self._numbers), size)
        let_go(self._heap, gradient)

    def end(self) -> BackwardPass:
        """The gradients of what was received are sent back, views with all of their storage.

        Those that something else holds are copied.
        """
        found = self._gated()
        for tensor, gradient in found.items():
            if gradient.block not in self._heap.sizes or gradient.uses > 1:
                found[tensor] = self._copy(tensor)
                let_go(self._heap, gradient)
        returned = sum(self._heap.sizes[block] for block in {gradient.block for gradient in found.values()})
        return BackwardPass(self._heap.peak, self._kept, returned)

    def _gated(self) -> dict[int, Gradient]:
        """The gradients of what was received, which the gate of the boundary makes contiguous, all at once."""
        found = {t: self._waiting[t] for t in self._received if t in self._waiting}
        scattered = {t: gradient for t, gradient in found.items() if not gradient.contiguous}
        for tensor in scattered:
            found[tensor] = self._copy(tensor)
        for gradient in scattered.values():
            let_go(self._heap, gradient)
        return found

    def _copy(self, tensor: int) -> Gradient:
        self._numbers += 1
        copy = Gradient(("returned", self._numbers), view=False, uses=1)
        self._heap.take(copy.block, self._all.rounded(self._all.tensor_bytes[tensor]))
        self._heap.hold(copy.block)
        return copy
