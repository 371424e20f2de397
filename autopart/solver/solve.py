"""solve(): from what the profiler knows of a graph to the best known plan, with its proof."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from math import inf

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.errors import CaptureError, InfeasibleError, LimitError
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.runtime.schedules import SCHEDULES
from autopart.solver.bounds import simple_bound
from autopart.solver.budget import Budget
from autopart.solver.describe import Choice, describe
from autopart.solver.device_orders import Order, device_orders
from autopart.solver.granularity import Granularity, block_groups
from autopart.solver.infeasible import explain
from autopart.solver.lowering import Lowered, lower
from autopart.solver.reductions import condense
from autopart.solver.request_check import check_options, stage_count
from autopart.solver.search import Answer, first_plan, search_any
from autopart.workload import Workload

# Of the time limit, what the search for fewer stages and the one between blocks may take at most.
SIDE_SHARE = 0.2
# Wall time for finding what would make an infeasible request fit, by default.
EXPLAIN_S = 15.0


def solve(
    graph: Graph,
    costs: Costs,
    cluster: Cluster,
    workload: Workload,
    *,
    model: str | None = None,
    stages: int | str = "auto",
    granularity: str = "auto",
    threshold: float = 0.01,
    tolerance: float = 0.001,
    time_limit_s: float = 30.0,
    explain_s: float = EXPLAIN_S,
    enough: float = inf,
    deadline: float = inf,
) -> Plan:
    """Assign every call of the graph to a pipeline stage so that one step is as fast as possible.

    Args:
        model: How the plan names the model; its class name by default.
        stages: Number of stages; "auto": one for each place the devices have, unless fewer are predicted to be faster.
        granularity: "operator" (cuts anywhere legal), "block" (between blocks only), or "auto": between blocks, unless
            cuts anywhere gain more than `threshold` (a share of the step time).
        tolerance: The gap, (value - bound) / value, at which a plan counts as optimal and the search ends.
        time_limit_s: Wall time after which the best plan so far is returned; limits in work follow from it.
        explain_s: Wall time for finding what would make an infeasible request fit; 0: the error does not say.
        enough: A step time that is known to be possible otherwise: once no plan can be faster, the search ends with the
            plan it has.
        deadline: In seconds of `time.monotonic`, where the clock may end the search before the time limit does.

    Returns:
        The plan. `lower_bound_s` holds for every legal split into that many stages, between blocks or not, unless
        `granularity` is "block"; then for splits between blocks.

    Raises:
        UsageError: An option is wrong, or more stages are asked for than devices.
        CaptureError: The model has fewer places to cut than the stages need.
        InfeasibleError: No split fits the devices' memory; the message names what would.
        LimitError: The time limit was reached without a plan.
    """
    start = time.monotonic()
    check_options(granularity, threshold, tolerance, time_limit_s, workload)
    count = stage_count(cluster, workload, stages)
    request = _Request(graph, costs, cluster, workload, granularity, threshold, enough)
    budget = Budget.of(tolerance, time_limit_s, deadline)
    try:
        choice = request.best(count, budget) if stages != "auto" else request.automatic(count, budget)
    except _DoesNotFit as refusal:
        if not explain_s:
            raise InfeasibleError(f"{graph.name}: {refusal}") from None
        raise explain(graph, costs, cluster, workload, refusal.lowered, explain_s) from None
    return describe(choice, graph, costs, cluster, workload, model, tolerance, time.monotonic() - start)


def first_value(
    graph: Graph,
    costs: Costs,
    cluster: Cluster,
    workload: Workload,
    stages: int,
    granularity: str = "auto",
    to_beat: float = inf,
    order: Sequence[int] | None = None,
    deadline: float = inf,
) -> float:
    """Step time of a first plan with this many stages, found in a moment; on the first devices of the order given.

    Args:
        deadline: In seconds of `time.monotonic`; the plan is the best until then.

    Returns:
        Infinity where no plan was found, or none can be faster than `to_beat`. Cuts fall between blocks where there are
        enough of them, unless `granularity` is "operator".
    """
    lowered = lower(graph, costs, cluster, workload, stages, order)
    if simple_bound(lowered.problem) >= to_beat:
        return inf
    operators = condense(lowered.problem, lowered.groups)[0]
    blocks = map(tuple, block_groups(graph, lowered.calls).values())
    problem = operators if granularity == "operator" else condense(lowered.problem, [*lowered.groups, *blocks])[0]
    if problem.items < stages and granularity == "auto":
        problem = operators
    return first_plan(problem, inf, deadline)[1] if problem.items >= stages else inf


class _DoesNotFit(Exception):
    """Proven: no assignment of `lowered` keeps within the devices' memory."""

    def __init__(self, lowered: Lowered) -> None:
        super().__init__(
            f"{lowered.problem.stages} stages do not fit into the memory of {lowered.problem.processes} devices"
        )
        self.lowered = lowered


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is asked for, whatever the number of stages."""

    graph: Graph
    costs: Costs
    cluster: Cluster
    workload: Workload
    granularity: str
    threshold: float
    enough: float

    def automatic(self, places: int, budget: Budget) -> Choice:
        """As many stages as there are places (or as can be filled), unless fewer are faster."""
        choice, reasons = self._most(places, budget.leaving(SIDE_SHARE))
        most = min([*reasons, places]) if choice is None else choice.lowered.problem.stages
        to_beat = inf if choice is None else choice.value * (1 - budget.tolerance)
        count = self._promising(most, to_beat, budget.leaving(SIDE_SHARE / 2).deadline)
        other = None
        if count:
            try:
                other = self.best(count, budget.part(SIDE_SHARE))
            except (LimitError, _DoesNotFit) as error:
                reasons[count] = error
        if choice is not None and (other is None or other.value >= choice.value):
            return choice
        if other is None:
            raise self._why_none(reasons)
        if choice is None:
            return other.noting(self._used(count, _sentence(reasons[places])))
        reason = f"with {most} stages the step is predicted to take {choice.value:.4g} s instead of {other.value:.4g} s"
        return other.noting(self._used(count, reason))

    def _most(self, places: int, budget: Budget) -> tuple[Choice | None, dict[int, Exception]]:
        """The plan with the most stages that has one, if it is found in time, and why more have none."""
        reasons: dict[int, Exception] = {}
        for stages in range(places, 0, -self._per_process):
            if reasons and budget.left <= 0:
                break
            try:
                choice = self.best(stages, budget)
            except (CaptureError, LimitError, _DoesNotFit) as error:
                reasons[stages] = error
            else:
                return (choice.noting(self._used(stages, _sentence(reasons[places]))) if reasons else choice), reasons
        return None, reasons

    def _promising(self, most: int, to_beat: float, deadline: float) -> int:
        """The number of stages, fewer than `most`, of the fastest first plan; 0 if none is faster than `to_beat`."""
        count = 0
        for fewer in range(most - self._per_process, 0, -self._per_process):
            found = self._first(fewer, to_beat, deadline)
            if found < to_beat:
                count, to_beat = fewer, found
        return count

    def _why_none(self, reasons: dict[int, Exception]) -> Exception:
        """Of numbers of stages that have no plan: the limit, if it was hit, for what others are proven says no more."""
        limits = [reason for reason in reasons.values() if isinstance(reason, LimitError)]
        if not limits and min(reasons) > self._per_process:
            return _limit_hit(f"fewer than {min(reasons)} stages")
        return limits[0] if limits else reasons[min(reasons)]

    @property
    def _per_process(self) -> int:
        return SCHEDULES[self.workload.schedule].stages_per_process

    def _used(self, count: int, reason: str) -> str:
        what = "devices" if self.cluster.inside is None else "groups of devices"
        return f"{count // self._per_process} of {len(self.cluster)} {what} are used: {reason}"

    def _first(self, stages: int, to_beat: float, deadline: float) -> float:
        """Step time of the fastest first plan with so many stages, on any devices; `to_beat` if none is faster."""
        for order in self._orders(stages):
            if time.monotonic() > deadline:
                break
            asked = self.graph, self.costs, self.cluster, self.workload, stages, self.granularity
            to_beat = min(to_beat, first_value(*asked, to_beat, order, deadline))
        return to_beat

    def _orders(self, stages: int) -> list[Order]:
        return device_orders(self.cluster, stages // self._per_process)

    def best(self, stages: int, budget: Budget) -> Choice:
        """The plan with exactly this many stages, cut as the granularity says."""
        shapes = self._shapes(stages)
        groups = shapes[0].groups
        blocks = [tuple(calls) for calls in block_groups(self.graph, shapes[0].calls).values()]
        answers: dict[Granularity, _Found] = {}
        if self.granularity != "operator" and (blocks or self.granularity == "block"):
            found = self._search(shapes, [*groups, *blocks], budget.part(SIDE_SHARE), None)
            if found is not None and (found.answer.assignment is not None or self.granularity == "block"):
                answers["block"] = found
        if self.granularity != "block":
            first = answers.get("block")
            found = self._search(shapes, groups, budget, first)
            if found is not None:
                answers["operator"] = found
        return self._choose(shapes, answers)

    def _shapes(self, stages: int) -> list[Lowered]:
        """The problem for each order of the devices; more than one only where they are not alike."""
        orders = self._orders(stages)
        return [lower(self.graph, self.costs, self.cluster, self.workload, stages, order) for order in orders]

    def _search(
        self, shapes: Sequence[Lowered], groups: Sequence[tuple[int, ...]], budget: Budget, first: _Found | None
    ) -> _Found | None:
        """The best plan with these items united; None if there are too few of them."""
        condensed = [condense(lowered.problem, groups) for lowered in shapes]
        problems, united = [problem for problem, _ in condensed], condensed[0][1]
        if problems[0].items < problems[0].stages:
            return None
        start = None
        if first is not None:
            stage = dict(zip(united, first.by_call, strict=True))
            start = first.which, [stage[item] for item in range(problems[0].items)]
        limits = budget.tolerance, budget.seconds
        which, answer = search_any(problems, *limits, start, enough=self.enough, deadline=budget.deadline)
        return _Found(which, answer, united)

    def _choose(self, shapes: Sequence[Lowered], answers: dict[Granularity, _Found]) -> Choice:
        stages = shapes[0].problem.stages
        if not answers:
            places = condense(shapes[0].problem, shapes[0].groups)[0].items
            between = " between blocks" if self.granularity == "block" else ""
            raise CaptureError(
                f"{self.graph.name} cannot be cut{between} into {stages} stages",
                f"At most {places} stages are possible where cuts may fall anywhere legal; ask for fewer stages"
                + (', or for granularity "operator" or "auto".' if between else "."),
            )
        values = {name: found.answer.value for name, found in answers.items() if found.answer.assignment is not None}
        if not values:
            if next(iter(answers.values())).answer.bound == inf:
                raise _DoesNotFit(shapes[0])
            raise _limit_hit(f"{stages} stages")
        name = min(values, key=lambda n: (values[n], n))
        bound_of = answers.get("operator", answers[name]).answer
        if self.granularity == "auto" and "block" in values:
            # What operators may gain at most: by the proof where there is one, else by the best plan known.
            best = bound_of.bound if bound_of.stopped_by == "proof" else values[name]
            if values["block"] - best <= self.threshold * values["block"]:
                name = "block"
        chosen = answers[name]
        others: dict[str, float] = {other: value for other, value in values.items() if other != name}
        return Choice(
            lowered=shapes[chosen.which],
            assignment=chosen.by_call,
            value=chosen.answer.value,
            bound=min(bound_of.bound, chosen.answer.value),
            stopped_by=bound_of.stopped_by,
            granularity=name,
            alternatives=others,
            best_of_granularity=chosen.answer.bound,
            method=bound_of.method,
        )


def _limit_hit(what: str) -> LimitError:
    return LimitError(
        f"no plan for {what} was found within the time limit, and none was proven impossible",
        "Raise the time limit, or ask for fewer microbatches or more devices.",
    )


def _sentence(reason: Exception) -> str:
    """The first line of an error."""
    return str(reason).partition("\n")[0]


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a search over shapes found: the shape, the answer for its united items, and each call's united item."""

    which: int
    answer: Answer
    united: Sequence[int]

    @property
    def by_call(self) -> tuple[int, ...]:
        """The stage of each call."""
        assert self.answer.assignment is not None
        return tuple(self.answer.assignment[item] for item in self.united)
