"""What a choice of layouts costs, from the choice alone, in floats: every choice, also a forced one, is valued here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.sharding import Layout, Price
from autopart.solver.layout_problem import LayoutProblem, Site


@dataclass(frozen=True)
class Conversions:
    """The same change of layout, made of each of some values.

    Attributes:
        nodes: The values.
        before, after: The layouts.
        price: What one of them sends.
        copies_s: Seconds of one of them beside that.
    """

    nodes: tuple[fx.Node, ...]
    before: Layout
    after: Layout
    price: Price
    copies_s: float

    @property
    def collectives(self) -> Counter[tuple[str, str]]:
        """(direction, collective) -> how many one of them takes."""
        found = (("forward", self.price.forward), ("backward", self.price.backward))
        return Counter((direction, collective) for direction, collective in found if collective is not None)


@dataclass(frozen=True)
class LayoutValue:
    """Seconds and bytes of one rank for one microbatch.

    Attributes:
        compute_s: Forward and backward computing of operators, with the sums of gradients of their arguments.
        copies_s: The same of conversions: copies around collectives.
        forward_s, backward_s: Collectives of values and of gradients.
        inside_s: Exchange inside operators (a vocabulary-parallel loss, batch norm over a split batch).
        forward_bytes, backward_bytes, inside_bytes: What the rank sends.
        collectives: (direction, collective) -> how many, without those inside operators.
        state_bytes: State, gradients and optimizer state.
        saved_bytes: What autograd keeps, for the microbatches in flight.
        converted_bytes: The largest value that a conversion makes.
    """

    compute_s: float
    copies_s: float
    forward_s: float
    backward_s: float
    inside_s: float
    forward_bytes: int
    backward_bytes: int
    inside_bytes: int
    collectives: Counter[tuple[str, str]]
    state_bytes: int
    saved_bytes: int
    converted_bytes: int
    conversions: tuple[Conversions, ...] = field(repr=False)

    @property
    def time_s(self) -> float:
        return self.compute_s + self.copies_s + self.forward_s + self.backward_s + self.inside_s

    @property
    def communication_s(self) -> float:
        return self.forward_s + self.backward_s + self.inside_s

    @property
    def memory_bytes(self) -> int:
        return self.state_bytes + self.saved_bytes + self.converted_bytes


def value_of(problem: LayoutProblem, picks: Sequence[int]) -> LayoutValue:
    """Value a choice: one option for each site."""
    made = _conversions(problem, picks)
    collectives: Counter[tuple[str, str]] = Counter()
    for conversion in made:
        for key, count in conversion.collectives.items():
            collectives[key] += count * len(conversion.nodes)
    chosen = list(zip(problem.sites, picks, strict=True))
    return LayoutValue(
        compute_s=sum(site.compute_s[k] for site, k in chosen),
        copies_s=sum(c.copies_s * len(c.nodes) for c in made),
        forward_s=sum(c.price.forward_s * len(c.nodes) for c in made),
        backward_s=sum(c.price.backward_s * len(c.nodes) for c in made),
        inside_s=sum(site.inside_s[k] for site, k in chosen),
        forward_bytes=sum(c.price.forward_bytes * len(c.nodes) for c in made),
        backward_bytes=sum(c.price.backward_bytes * len(c.nodes) for c in made),
        inside_bytes=sum(site.inside_bytes[k] for site, k in chosen),
        collectives=collectives,
        state_bytes=sum(site.state_bytes[k] for site, k in chosen),
        saved_bytes=_saved_bytes(problem, picks),
        converted_bytes=max((c.price.temporary_bytes for c in made), default=0),
        conversions=made,
    )


def kept_layouts(site: Site, number: int | None) -> list[Layout]:
    """Option -> layout of the tensor that a node of the site keeps: an argument, or its result."""
    return [
        outputs[0] if number is None else inputs[number]
        for inputs, outputs in zip(site.inputs, site.outputs, strict=True)
    ]


def _conversions(problem: LayoutProblem, picks: Sequence[int]) -> tuple[Conversions, ...]:
    found = []
    for value in problem.values:
        for groups, partial in ((value.partial, True), (value.plain, False)):
            for group in groups:
                changes: dict[tuple[Layout, Layout], None] = {}
                for r in group:
                    reading = problem.readings[r]
                    before = problem.sources(reading)[picks[reading.source]]
                    after = problem.targets(reading)[picks[reading.source if reading.user is None else reading.user]]
                    if before != after and before.partial == partial:
                        changes[before, after] = None
                differentiable = problem.readings[group[0]].differentiable
                node = value.nodes[0]
                found += [
                    Conversions(
                        value.nodes,
                        a,
                        b,
                        problem.price(node, a, b, differentiable),
                        problem.copies_s(node, a, b, group),
                    )
                    for a, b in changes
                ]
    return tuple(found)


def _saved_bytes(problem: LayoutProblem, picks: Sequence[int]) -> int:
    total = 0.0
    for saved in problem.saved:
        layouts = [kept_layouts(problem.sites[i], number)[picks[i]] for i, number in saved.savers]
        shares = {1.0 if layout.spread is None else 1.0 / problem.t for layout in layouts} or {1.0}
        total += saved.bytes * sum(shares)
    return round(total)
