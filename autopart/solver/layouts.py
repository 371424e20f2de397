"""The choice of layouts as a mixed-integer program: what every operator and every held tensor looks like on t ranks.

Sets
    i in I sites (decisions, shared by tied nodes); k in K(i) their options: strategies, or layouts of held tensors
    r in E readings: a value of site src(r), read by site usr(r); a in A(r), b in B(r): the layouts in which the source
    gives it and the user takes it; v in V values; g in G(v, a) the readings of v that share one conversion from a
    s in S saved storages; readers of s: (site, argument or result)

Variables
    x[i,k]      1 if site i takes option k                                             binary
    y[r,a,b]    1 if reading r goes from layout a to layout b                          in [0, 1]
    z[v,g,a,b]  1 if group g of value v is converted from a to b; y itself where g is one reading     in [0, 1]
    u[s,h]      1 if storage s is kept whole (h = 1), or in shards (h = 1/t)           in [0, 1]
    W           the largest converted value, bytes                                     >= 0

Objective, seconds of one microbatch, forward and backward
    minimise  sum_i,k (compute[i,k] + inside[i,k]) x[i,k]  +  sum_v,g,a,b price[v,g,a,b] z[v,g,a,b]  +  tie-break

Constraints
    (1) sum_k x[i,k] = 1                                                               `_add_choices`
    (2) sum_b y[r,a,b] = sum of x[src(r),k] over the options k that give a             `_add_reading`
    (3) sum_a y[r,a,b] = sum of x[usr(r),k] over the options k that take b             `_add_reading`
    (4) y[r,a,b] absent where a cannot become b, or must not                           `_add_reading`
    (5) z[v,g,a,b] >= y[r,a,b] for r in g; at most their sum, where its price is negative `_add_conversions`
    (6) u[s,h] >= sum of x[i,k] over the options k in which reader i holds s as h      `_add_memory`
    (7) W >= temporary[v,a,b] z[v,g,a,b]                                               `_add_memory`
    (8) sum_i,k state[i,k] x[i,k] + sum_s,h h bytes[s] u[s,h] + W <= memory            `_add_memory`

(2) and (3) are a flow from the producer's choice to the reader's; with x integral, y is their product. It makes the
relaxation nearly integral, where y >= x + x - 1 leaves it loose.

The tie-break is at most `TIE_SHARE` of the unsplit computing time over t: it prefers, among plans of equal time, splits
in one part to splits in many, few collectives, and held tensors that are split. The bound is lowered by as much, so
that it is a bound of the time alone. It holds for all layouts that are alike in identical blocks (`tie`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from ortools.math_opt.python import mathopt
from torch import fx

from autopart.blocks import find_blocks
from autopart.cluster import Cluster
from autopart.errors import InfeasibleError, LimitError
from autopart.graph import Graph
from autopart.plan import BlockLayout
from autopart.sharding import Choice, Layout, Price, Program, Strategy, convertible, describe, sent_to_experts
from autopart.solver.layout_problem import Allow, LayoutProblem, Prices, Reading
from autopart.solver.layout_value import LayoutValue, kept_layouts, value_of
from autopart.units import format_bytes

TIE_SHARE = 1e-5
# The objective is counted in this many units of the unsplit computing time, which suits the solver's tolerances.
RESOLUTION = 1e5

Linear: TypeAlias = mathopt.LinearBase | float
Term = tuple[float, mathopt.Variable]


@dataclass(frozen=True)
class LayoutChoice:
    """Layouts of everything, with their cost and proof. Seconds and bytes are of one microbatch on one rank.

    Attributes:
        tensor: Number of ranks.
        strategies: Call node -> strategy.
        state: State key -> layout.
        value: What it costs, piece by piece.
        time_s: The objective: computing and collectives, forward and backward.
        lower_bound_s: No choice (alike in identical blocks) is faster.
        gap: (time - bound) / time.
        status: "optimal" when the gap is closed within the tolerance, else "feasible".
        seconds: Wall time of stating and solving the program.
        stopped_by: "proof" or "time limit"; "given" where nothing was solved.
        variables: Number of variables of the program.
        blocks: How each block is split.
        program: What was chosen from.
    """

    tensor: int
    strategies: Mapping[str, Strategy]
    state: Mapping[str, Layout]
    value: LayoutValue
    lower_bound_s: float
    gap: float
    status: str
    seconds: float
    stopped_by: str
    variables: int
    blocks: tuple[BlockLayout, ...] = field(repr=False)
    program: Program = field(repr=False, compare=False)

    @property
    def time_s(self) -> float:
        return self.value.time_s

    @property
    def choice(self) -> Choice:
        """The layouts, as `sharding.rewrite` takes them."""
        return Choice(self.state, self.strategies, self.program)


def choose_layouts(
    graph: Graph,
    prices: Prices,
    cluster: Cluster,
    t: int,
    *,
    optimizer: str = "adamw",
    in_flight: int = 1,
    memory_bytes: float | None = None,
    allow: Allow | None = None,
    tie: bool = True,
    tolerance: float = 1e-4,
    time_limit_s: float = 30.0,
) -> LayoutChoice:
    """The fastest layouts of a graph's primary capture on t ranks.

    Args:
        prices: See `profiler.pricing.LayoutPrices`.
        optimizer: A key of `workload.OPTIMIZER_STATES`; its state is split as the parameter is.
        in_flight: Microbatches whose saved activations are held at once.
        memory_bytes: What state, saved activations and the largest converted value may take on a rank; None: anything.
        allow: Which strategies a node may take; None: all.
        tie: Lay out identical blocks alike.
        tolerance: Gap at which the answer counts as optimal.
        time_limit_s: Wall time after which the best choice so far is returned.

    Raises:
        UsageError: The cluster has fewer than t devices, or `allow` leaves a node no strategy.
        InfeasibleError: No layouts fit into `memory_bytes`; the message names the least memory that would do.
        LimitError: The time limit was hit before any layouts were found.
    """
    start = time.monotonic()
    problem = LayoutProblem(graph, prices, cluster, t, optimizer=optimizer, in_flight=in_flight, allow=allow, tie=tie)
    program = _Program(problem, memory_bytes)
    result = program.solve(tolerance, time_limit_s)
    if not result.has_primal_feasible_solution():
        raise _no_layouts(problem, result, memory_bytes, time_limit_s)
    picks = program.picks(result)
    value = value_of(problem, picks)
    bound = program.bound(result)
    assert bound <= value.time_s * (1 + 1e-6), "the program's bound is above the value of its own solution"
    bound = min(bound, value.time_s)
    gap = (value.time_s - bound) / value.time_s if value.time_s else 0.0
    strategies, state = _unfolded(problem, picks)
    proven = result.termination.reason == mathopt.TerminationReason.OPTIMAL
    return LayoutChoice(
        t,
        strategies,
        state,
        value,
        bound,
        gap,
        "optimal" if gap <= tolerance + TIE_SHARE else "feasible",
        time.monotonic() - start,
        "proof" if proven else "time limit",
        program.model.get_num_variables(),
        block_layouts(graph, Choice(state, strategies), value, t),
        problem.program,
    )


class _Program:
    """Builds the model; one method for each group of constraints."""

    def __init__(self, problem: LayoutProblem, memory_bytes: float | None, least_memory: bool = False) -> None:
        self.problem = problem
        self.model = mathopt.Model(name="layouts")
        self.unit = (sum(site.compute_s[0] for site in problem.sites) or 1.0) / RESOLUTION
        self.most_tie = TIE_SHARE * RESOLUTION / problem.t
        self.terms: list[Term] = []
        self.constant = 0.0
        self.ties: list[Term] = []
        self.used: Linear = 0.0
        self.x = self._add_choices()
        self.y = [self._add_reading(reading) for reading in problem.readings]
        self.z = list(self._add_conversions())
        if memory_bytes is not None or least_memory:
            self._add_memory(memory_bytes)
        if least_memory:
            self.model.minimize(self.used)
            return
        most = sum(weight for weight, _ in self.ties) or 1.0
        self.tie_unit = self.most_tie / most
        objective = mathopt.fast_sum(c / self.unit * v for c, v in self.terms)
        preferences = mathopt.fast_sum(self.tie_unit * c * v for c, v in self.ties)
        self.model.minimize(objective + preferences + self.constant / self.unit)

    def solve(self, tolerance: float, time_limit_s: float) -> mathopt.SolveResult:
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=max(time_limit_s, 0.01)),
            threads=1,
            random_seed=0,
            relative_gap_tolerance=tolerance * 1e-3,
        )
        return mathopt.solve(self.model, mathopt.SolverType.GSCIP, params=parameters)

    def bound(self, result: mathopt.SolveResult) -> float:
        """A bound of the time alone, seconds."""
        dual = result.termination.objective_bounds.dual_bound
        return max(0.0, (dual - self.most_tie) * self.unit)

    def picks(self, result: mathopt.SolveResult) -> list[int]:
        """Site -> option."""
        values = result.variable_values()
        chosen = []
        for row in self.x:
            weights = [values[x] if isinstance(x, mathopt.Variable) else x for x in row]
            chosen.append(max(range(len(row)), key=lambda k: (weights[k], -k)))
        return chosen

    def _add_choices(self) -> list[list[Linear]]:
        rows: list[list[Linear]] = []
        most = sum(max(site.state_bytes) for site in self.problem.sites) or 1
        for i, site in enumerate(self.problem.sites):
            costs = [a + b for a, b in zip(site.compute_s, site.inside_s, strict=True)]
            if len(costs) == 1:
                self.constant += costs[0]
                rows.append([1.0])
                continue
            row = [self.model.add_binary_variable(name=f"x[{i},{k}]") for k in range(len(costs))]
            self.model.add_linear_constraint(mathopt.fast_sum(row) == 1)
            self.terms += zip(costs, row, strict=True)
            for k, x in enumerate(row):
                parts = max(_parts((*site.inputs[k], *site.outputs[k])) - 1, 0) / 64
                held = len(self.problem.sites) * site.state_bytes[k] / most
                self.ties.append((len(site.nodes) * parts + held, x))
            rows.append(list(row))
        return rows

    def _share(self, site: int, layouts: Sequence[Layout]) -> dict[Layout, Linear]:
        """Layout -> sum of x over the options of a site that have it."""
        share: dict[Layout, list[Linear]] = defaultdict(list)
        for layout, x in zip(layouts, self.x[site], strict=True):
            share[layout].append(x)
        return {layout: row[0] if len(row) == 1 else mathopt.fast_sum(row) for layout, row in share.items()}

    def _add_reading(self, reading: Reading) -> dict[tuple[Layout, Layout], Linear]:
        """y of one reading; sums of x where one side has no choice."""
        sources, targets = self.problem.sources(reading), self.problem.targets(reading)
        before = self._share(reading.source, sources)
        if reading.user is None:
            return {(a, b): before[a] for a, b in dict.fromkeys(zip(sources, targets, strict=True))}
        after = self._share(reading.user, targets)
        if reading.fixed:
            for layout in dict.fromkeys([*before, *after]):
                difference = before.get(layout, 0.0) - after.get(layout, 0.0)
                self.model.add_linear_constraint(lb=0.0, expr=difference, ub=0.0)
            return {}
        pairs = [(a, b) for a in before for b in after if convertible(a, b)]
        if len(before) == 1 or len(after) == 1:
            y = {(a, b): after[b] if len(before) == 1 else before[a] for a, b in pairs}
        else:
            y = {pair: self.model.add_variable(lb=0.0, ub=1.0) for pair in pairs}
        for side, shares in enumerate((before, after)):
            for layout, x in shares.items():
                flow = mathopt.fast_sum(value for pair, value in y.items() if pair[side] == layout)
                self.model.add_linear_constraint(lb=0.0, expr=flow - x, ub=0.0)
        return y

    def _add_conversions(self) -> Iterator[tuple[Price, Linear]]:
        """z of every possible conversion, with the price of one; their costs become terms of the objective."""
        problem = self.problem
        for value in problem.values:
            for group, partial in [*((g, True) for g in value.partial), *((g, False) for g in value.plain)]:
                pairs: dict[tuple[Layout, Layout], list[Linear]] = defaultdict(list)
                for r in group:
                    for (a, b), y in self.y[r].items():
                        if a != b and a.partial == partial:
                            pairs[a, b].append(y)
                for (a, b), ys in pairs.items():
                    price = problem.price(value.nodes[0], a, b, problem.readings[group[0]].differentiable)
                    time_s = price.time_s + problem.copies_s(value.nodes[0], a, b, group)
                    z = ys[0] if len(ys) == 1 else self._at_least(ys)
                    if time_s < 0 and len(ys) > 1:
                        self.model.add_linear_constraint(mathopt.fast_sum(ys) - z >= 0.0)
                    steps = 1 + (price.forward is not None) + (price.backward is not None)
                    self._charge(time_s * len(value.nodes), steps * len(value.nodes), z)
                    yield price, z

    def _at_least(self, values: Sequence[Linear]) -> mathopt.Variable:
        z = self.model.add_variable(lb=0.0, ub=1.0)
        for y in values:
            self.model.add_linear_constraint(z - y >= 0.0)
        return z

    def _charge(self, time_s: float, tie: float, share: Linear) -> None:
        """Add a share (a variable, a sum of variables, or a constant) to the objective."""
        if isinstance(share, mathopt.Variable):
            self.terms.append((time_s, share))
            self.ties.append((tie, share))
            return
        flat = mathopt.as_flat_linear_expression(share)
        self.constant += time_s * flat.offset
        for variable, coefficient in flat.terms.items():
            self.terms.append((time_s * coefficient, variable))
            self.ties.append((tie * coefficient, variable))

    def _add_memory(self, memory_bytes: float | None) -> None:
        """Memory in units of what everything takes unsplit, so that coefficients are near one."""
        problem = self.problem
        whole = sum(site.state_bytes[0] for site in problem.sites) + sum(saved.bytes for saved in problem.saved) or 1
        used: list[Linear] = []
        for site, row in zip(problem.sites, self.x, strict=True):
            used += [size / whole * x for size, x in zip(site.state_bytes, row, strict=True) if size]
        for saved in problem.saved:
            held: dict[float, list[Linear]] = defaultdict(list)
            for saver, number in saved.savers:
                for share, x in self._kept(saver, number).items():
                    held[share].append(x)
            if not saved.savers:
                used.append(saved.bytes / whole)
            for share, xs in held.items():
                used.append(saved.bytes * share / whole * (xs[0] if len(xs) == 1 else self._at_least(xs)))
        largest = self.model.add_variable(lb=0.0, name="W")
        for price, z in self.z:
            if price.temporary_bytes:
                self.model.add_linear_constraint(largest - price.temporary_bytes / whole * z >= 0.0)
        self.used = mathopt.fast_sum([*used, largest])
        self.whole_bytes = whole
        if memory_bytes is not None:
            self.model.add_linear_constraint(self.used <= memory_bytes / whole)

    def _kept(self, site: int, number: int | None) -> dict[float, Linear]:
        """Share of a storage that a saver keeps -> sum of x over the options in which it does."""
        layouts = kept_layouts(self.problem.sites[site], number)
        held: dict[float, list[Linear]] = defaultdict(list)
        for layout, x in zip(layouts, self.x[site], strict=True):
            held[1.0 if layout.spread is None else 1.0 / self.problem.t].append(x)
        return {share: mathopt.fast_sum(xs) for share, xs in held.items()}


def _parts(layouts: Sequence[Layout]) -> int:
    return max((len(layout.split.parts) for layout in layouts if layout.split is not None), default=0)


def _no_layouts(
    problem: LayoutProblem, result: mathopt.SolveResult, memory_bytes: float | None, time_limit_s: float
) -> Exception:
    infeasible = mathopt.TerminationReason.INFEASIBLE
    if memory_bytes is None or result.termination.reason != infeasible:
        return LimitError(
            f"no layouts on {problem.t} ranks were found in {time_limit_s:g} s ({result.termination.reason})"
        )
    least = _Program(problem, None, least_memory=True)
    found = least.solve(0.0, time_limit_s)
    message = f"{problem.graph.name} on {problem.t} ranks does not fit into {format_bytes(memory_bytes)} a rank"
    if not found.has_primal_feasible_solution():
        return InfeasibleError(message)
    needed = value_of(problem, least.picks(found)).memory_bytes
    return InfeasibleError(message, f"It fits into {format_bytes(needed)}.")


def _unfolded(problem: LayoutProblem, picks: Sequence[int]) -> tuple[dict[str, Strategy], dict[str, Layout]]:
    """Strategies of all call nodes by name, and layouts of all held tensors by key."""
    strategies: dict[str, Strategy] = {}
    state: dict[str, Layout] = {}
    for site, k in zip(problem.sites, picks, strict=True):
        for node, pick in zip(site.nodes, site.picks[k], strict=True):
            if isinstance(pick, Strategy):
                strategies[node.name] = pick
            elif node.op == "get_attr":
                state[str(node.target)] = pick
    return strategies, state


def block_layouts(graph: Graph, choice: Choice, value: LayoutValue, t: int) -> tuple[BlockLayout, ...]:
    """Each block's splits, and the conversions of values that it makes."""
    labels = find_blocks(graph, graph.primary)
    splits: dict[str, dict[str, str]] = {label: {} for label in labels.values()}
    for path, words in describe(graph, choice, t).items():
        label = next((label for label in splits if path == label or path.startswith(f"{label}.")), path)
        splits.setdefault(label, {})[path] = words
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    sent: Counter[str] = Counter()
    for conversion in value.conversions:
        for node in conversion.nodes:
            label = labels.get(node.name) or _reader(node, labels)
            sent[label] += conversion.price.forward_bytes + conversion.price.backward_bytes
            counts[label] += Counter({f"{way} {name}": n for (way, name), n in conversion.collectives.items()})
    for node in graph.primary.calls:
        for rows in sent_to_experts(node, choice.strategies[node.name], t) if node.name in choice.strategies else ():
            ways = {"forward": rows.forward, "backward": rows.backward}
            counts[labels[node.name]] += Counter(f"{way} {name}" for way, name in ways.items() if name is not None)
            sent[labels[node.name]] += rows.forward_bytes + rows.backward_bytes
    return tuple(
        BlockLayout(label, splits[label], dict(counts[label]), sent[label])
        for label in splits
        if splits[label] or counts[label]
    )


def _reader(held: fx.Node, labels: Mapping[str, str]) -> str:
    """The block of the first reader of a held tensor."""
    return next((labels[user.name] for user in held.users if user.name in labels), held.name)
