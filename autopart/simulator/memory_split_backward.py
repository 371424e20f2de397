"""A stage's backward in two actions: gradients of its inputs (I), and later those of its weights (W).

torch (`torch/distributed/pipelining/_backward.py`, 2.14) calls the nodes between the received tensors and what is sent
the path. Where a branch of parameters meets it, a node of the path is an *intermediate*; parameters that meet it at the
same node form a group.

- I runs the path alone, with `retain_graph`: nothing that was saved goes, and a hook keeps the gradients that arrive at
  each intermediate. Then what is sent is detached: a node that no intermediate leads to goes, with what it saved.
- W takes the groups in the order of the parameters. For each it runs the intermediate once more, for its parameters
  alone, and their branch; what these nodes saved goes, and the kept gradients do after them. All other nodes stay until
  no intermediate of this group or a later one leads to them. Gradients of weights become `.grad` as they are, or are
  added to it; then they stay until the next group has its own.

Received tensors keep the gradients that are returned as their `.grad`, until the next step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopart.costs import Allocations, NodeAllocations
from autopart.plan import SplitBackwardMemory
from autopart.simulator.memory_gradients import Gradient, GradientFlow, let_go
from autopart.simulator.memory_heap import Heap
from autopart.simulator.memory_program import StageProgram


@dataclass(frozen=True)
class Group:
    """Parameters that meet the path in one place.

    Attributes:
        meets: The node of the path; None where the branch is sent itself.
        starts: The tensors of the branch that get gradients there.
        branch: The nodes beside the path, in the order of backward.
    """

    meets: str | None
    starts: frozenset[int]
    branch: tuple[str, ...]


class SplitBackward:
    """The two actions of one microbatch in one stage.

    Args:
        heap: As the forward left it.
        reached: The nodes to which a gradient comes.
        saved: Node -> the blocks that its backward needs.
        sent: Blocks that are sent on: they stay until W.
    """

    def __init__(
        self,
        allocations: Allocations,
        stage: StageProgram,
        heap: Heap,
        reached: set[str],
        saved: Callable[[str], Sequence[object]],
        sent: Sequence[object],
    ) -> None:
        self._all, self._stage, self._heap = allocations, stage, heap
        self._saved, self._sent = saved, sent
        self._calls = [name for name in stage.nodes if name in reached]
        self._order = {name: index for index, name in enumerate(self._calls)}
        self._makers = {tensor: name for name in self._calls for tensor in self._node(name).results}
        self._path = self._tensors_of_path()
        self._groups = self._groups_in_order()
        self._last = self._last_groups()
        self._held: dict[str | None, dict[int, Gradient]] = {}

    def run(self, first: bool) -> SplitBackwardMemory:
        """Both actions, where `first` says whether there are no gradients of parameters yet."""
        heap, kept = self._heap, self._heap.live
        heap.peak = kept
        returned = self._input_gradients()
        input_peak, waiting = heap.peak - kept, heap.live
        heap.peak = waiting
        self._weight_gradients(first)
        return SplitBackwardMemory(
            input_peak=input_peak,
            waiting=waiting,
            returned=returned,
            weight_peak=heap.peak - waiting,
            first_weight_peak=heap.peak - waiting,
            gradients=heap.live - returned,
        )

    def _node(self, name: str) -> NodeAllocations:
        return self._all.nodes[name]

    def _tensors_of_path(self) -> set[int]:
        path = set(self._stage.received)
        for name in self._calls:
            node = self._node(name)
            if any(gradient.tensor in path for gradient in node.gradients):
                path.update(node.results)
        return path

    def _on_path(self, name: str) -> bool:
        return not self._path.isdisjoint(self._node(name).results)

    def _beside(self, name: str) -> frozenset[int]:
        """Tensors off the path to which a node gives gradients."""
        return frozenset(g.tensor for g in self._node(name).gradients if g.tensor not in self._path)

    def _groups_in_order(self) -> list[Group]:
        """By their first parameters: a stage's module has them in the order in which it reads them."""
        reads = [t for name in self._calls for t in self._node(name).reads if t in self._stage.state]
        rank = {tensor: index for index, tensor in enumerate(dict.fromkeys(reads))}
        found: list[tuple[int, Group]] = []
        starts: list[tuple[str | None, frozenset[int]]] = [
            (name, self._beside(name)) for name in self._calls if self._on_path(name)
        ]
        starts.append((None, frozenset(t for t in self._stage.targets if t not in self._path)))
        for meets, tensors in starts:
            if tensors:
                branch = self._below(tensors)
                leaves = tensors.union(*(self._beside(name) for name in branch))
                first = min((rank[t] for t in leaves if t in rank), default=len(rank))
                found.append(
                    (first, Group(meets, tensors, tuple(sorted(branch, key=self._order.__getitem__, reverse=True))))
                )
        return [group for _, group in sorted(found, key=lambda item: item[0])]

    def _below(self, tensors: frozenset[int], known: set[str] | None = None) -> set[str]:
        """The nodes through which gradients of these tensors flow on, but for those known, which are added to."""
        known = set() if known is None else known
        found: set[str] = set()
        waiting = list(tensors)
        while waiting:
            name = self._makers.get(waiting.pop())
            if name is not None and name not in known:
                known.add(name)
                found.add(name)
                waiting += [gradient.tensor for gradient in self._node(name).gradients]
        return found

    def _last_groups(self) -> dict[str, int]:
        """Node -> the last group whose intermediate leads to it."""
        known: set[str] = set()
        found: dict[str, int] = {}
        for index in reversed(range(len(self._groups))):
            group = self._groups[index]
            tops = group.starts if group.meets is None else frozenset(self._node(group.meets).results)
            found.update(dict.fromkeys(self._below(tops, known), index))
        return found

    def _input_gradients(self) -> int:
        flow = _PathFlow(self._all, self._heap, self._stage)
        intermediates = {group.meets for group in self._groups}
        for name in reversed(self._calls):
            if self._on_path(name):
                node = self._node(name)
                if name in intermediates:
                    self._held[name] = flow.kept(node.results)
                flow.node(self._half(node, path=True), ())
        self._held[None] = flow.kept([t for t in self._stage.targets if t not in self._path])
        for name in self._calls:
            if name not in self._last:
                self._let_go(name)
        return flow.returned()

    def _weight_gradients(self, first: bool) -> None:
        lasting: list[Gradient] = []
        gone: set[str] = set()
        for index, group in enumerate(self._groups):
            for name, last in self._last.items():
                if last == index - 1 and name not in gone:
                    gone.add(name)
                    self._let_go(name)
            flow = _WeightFlow(self._all, self._heap, self._stage, group, self._held.pop(group.meets))
            for name in (*([] if group.meets is None else [group.meets]), *group.branch):
                gone.add(name)
                node = self._node(name)
                flow.node(self._half(node, path=False) if name == group.meets else node, self._saved(name))
            flow.close()
            if not first:
                for gradient in lasting:
                    let_go(self._heap, gradient)
                lasting = flow.made
        for name in self._last.keys() - gone:
            self._let_go(name)
        for block in self._sent:
            self._heap.drop(block)
        for gradient in lasting:
            let_go(self._heap, gradient)

    def _half(self, node: NodeAllocations, path: bool) -> NodeAllocations:
        """A node that gives gradients to tensors of the path alone, or to the others."""
        gradients = tuple(g for g in node.gradients if (g.tensor in self._path) == path)
        if len(gradients) == len(node.gradients):
            return node
        size = node.backward_input_bytes if path else node.backward_weight_bytes
        return replace(node, gradients=gradients, backward_bytes=size, backward_shared_bytes=size)

    def _let_go(self, name: str) -> None:
        for block in self._saved(name):
            self._heap.drop(block)


class _PathFlow(GradientFlow):
    """Gradients of the path, which hooks keep where they are told to."""

    def __init__(self, allocations: Allocations, heap: Heap, stage: StageProgram) -> None:
        super().__init__(allocations, heap, stage, set(), first=False)

    def kept(self, tensors: Sequence[int]) -> dict[int, Gradient]:
        """Keep the gradients that wait for tensors."""
        found = {tensor: self._waiting[tensor] for tensor in tensors if tensor in self._waiting}
        for gradient in found.values():
            gradient.uses += 1
        return found

    def returned(self) -> int:
        """Bytes of the gradients that are sent back as they are."""
        blocks = {gradient.block for gradient in self._gated().values()}
        return sum(self._heap.sizes.get(block, 0) for block in blocks)


class _WeightFlow(GradientFlow):
    """Gradients of one group, from those that were kept.

    Attributes:
        made: Gradients of parameters.
    """

    def __init__(
        self, allocations: Allocations, heap: Heap, stage: StageProgram, group: Group, held: dict[int, Gradient]
    ) -> None:
        below = {*group.branch} if group.meets is None else {group.meets, *group.branch}
        super().__init__(allocations, heap, replace(stage, targets=(), received=()), below, first=False)
        self.made: list[Gradient] = []
        self._roots = held
        for tensor, gradient in held.items():
            gradient.uses += 1
            self._waiting[tensor] = gradient

    def _accumulate(self, tensor: int, gradient: Gradient) -> None:
        self.made.append(gradient)

    def close(self) -> None:
        """What was kept for the group goes."""
        for gradient in self._roots.values():
            let_go(self._heap, gradient)
