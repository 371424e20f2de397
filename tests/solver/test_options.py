"""Stages with degrees and options: the search against every plan there is, valued from the definition."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.solver.knapsack import choose
from autopart.solver.option_search import solve_options
from autopart.solver.options import Edge, Option, OptionProblem


def random_options(seed, nodes=None):
    """Up to 7 nodes, equal ones among them; up to 3 options on 1 or 2 ranks, some of them missing; tight memory."""
    rng = random.Random(seed)
    nodes = nodes or rng.randint(1, 7)
    edges = []
    for u, v in itertools.combinations(range(nodes), 2):
        if rng.random() < 2.0 / nodes:
            edges.append(Edge(u, v, rng.choice([0.0, 1.0, rng.random()])))
    same_bytes = rng.random() < 0.5
    kinds = [
        {
            t: [[rng.choice([1.0, rng.random()]) for _ in range(4)] for _ in range(rng.randint(1, 3))]
            for t in (1, 2)
            if t == 1 or rng.random() < 0.7
        }
        for _ in range(3)
    ]

    def exchanged(others, shared):
        return shared if same_bytes else {o: rng.random() for o in others}

    options = []
    for v in range(nodes):
        before, after = [e.producer for e in edges if e.reader == v], [e.reader for e in edges if e.producer == v]
        node = {}
        for t, table in rng.choice(kinds).items():
            shared = {o: rng.random() * (t - 1) for o in range(nodes)}
            node[t] = tuple(Option(*row, exchanged(before, shared), exchanged(after, shared)) for row in table)
        options.append(node)
    devices, microbatches = rng.randint(1, 4), rng.choice([1, 2, 3, 4, 6])
    limit = rng.uniform(0.5, 2.5) * nodes
    return OptionProblem(tuple(options), tuple(edges), devices, microbatches, rng.choice([0.5, 5.0]), limit)


def stage_by_definition(problem, nodes, tensor, data, behind, choice):
    """Seconds of a stage, infinite where it does not fit."""
    time = flying = fixed = parameters = crossing = 0.0
    for v, o in zip(nodes, choice, strict=True):
        time += o.seconds
        flying += o.in_flight_bytes
        fixed += o.fixed_bytes
        parameters += o.parameter_bytes
        for e in problem.edges:
            if e.reader == v and e.producer not in nodes:
                crossing += e.bytes + o.receive_bytes[e.producer]
            if e.producer == v and e.reader not in nodes:
                crossing += e.bytes + o.send_bytes[e.reader]
    if flying * math.ceil((data + behind) / data) + fixed > problem.limit_bytes:
        return math.inf
    sync = 4 * (data - 1) / data * parameters / problem.microbatches
    return time / data + (2 * crossing / data + sync) / problem.bandwidth_bytes_per_s


def optimum(problem):
    """The least time of all plans."""
    nodes, devices, m = len(problem.options), problem.devices, problem.microbatches
    splits = [(t, d) for t in (1, 2) for d in range(1, m + 1) if t * d <= devices and m % d == 0]
    known = {}

    def stage(own, t, d, behind):
        key = own, t, d, behind
        if key not in known:
            choices = itertools.product(*(problem.options[v].get(t, ()) for v in own))
            known[key] = min((stage_by_definition(problem, own, t, d, behind, c) for c in choices), default=math.inf)
        return known[key]

    best = math.inf
    for stages in range(1, min(nodes, devices) + 1):
        chosen = [
            s
            for s in itertools.product(splits, repeat=stages)
            if sum(t * d for t, d in s) <= devices and sum(d for _, d in s) <= min(m, devices)
        ]
        for where in itertools.product(range(stages), repeat=nodes):
            if len(set(where)) < stages or any(where[e.producer] > where[e.reader] for e in problem.edges):
                continue
            sets = [tuple(v for v in range(nodes) if where[v] == s) for s in range(stages)]
            for split in chosen:
                behind = [sum(d for _, d in split[s + 1 :]) for s in range(stages)]
                best = min(best, max(stage(own, *sd, b) for own, sd, b in zip(sets, split, behind, strict=True)))
    return best


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_no_plan_is_faster(seed):
    problem = random_options(seed)
    best, found = optimum(problem), solve_options(problem)
    if math.isinf(best):
        assert found is None
        return
    assert found.seconds == pytest.approx(best, rel=1e-8)
    assert found.bound <= best * (1 + 1e-9)
    behind, slowest = 0, 0.0
    for stage in reversed(found.stages):
        choice = [problem.options[v][stage.tensor][o] for v, o in zip(stage.nodes, stage.option, strict=True)]
        seconds = stage_by_definition(problem, stage.nodes, stage.tensor, stage.data, behind, choice)
        slowest, behind = max(slowest, seconds), behind + stage.data
    assert found.seconds == pytest.approx(slowest, rel=1e-12)
    assert sum(stage.tensor * stage.data for stage in found.stages) <= problem.devices
    assert behind <= min(problem.microbatches, problem.devices)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_no_choice_in_a_knapsack_is_faster(seed):
    rng = random.Random(seed)
    items, options = rng.randint(1, 7), rng.randint(1, 3)
    kinds = [[(rng.random(), rng.choice([1.0, rng.random()])) for _ in range(options)] for _ in range(3)]
    rows = [rng.choice(kinds) for _ in range(items)]
    room = rng.uniform(0.2, 0.8) * items
    table = np.array(rows)
    fitting = [c for c in itertools.product(*rows) if sum(size for _, size in c) <= room]
    choice = choose(table[:, :, 0], table[:, :, 1], room)
    if not fitting:
        assert choice is None
        return
    assert table[np.arange(items), choice, 1].sum() <= room
    assert table[np.arange(items), choice, 0].sum() == pytest.approx(min(sum(t for t, _ in c) for c in fitting))


def test_recomputation_is_chosen_only_where_memory_asks_for_it():
    """Two equal nodes, one stage of each: the earlier one has two microbatches in flight."""
    keep, again = Option(1.0, 0.0, 4.0, 0.0, {0: 0.0}, {1: 0.0}), Option(1.5, 0.0, 1.0, 1.0, {0: 0.0}, {1: 0.0})
    problem = OptionProblem(({1: (keep, again)},) * 2, (Edge(0, 1, 0.0),), 2, 4, 1.0, 5.0)
    found = solve_options(problem)
    assert [(stage.nodes, stage.option) for stage in found.stages] == [((0,), (1,)), ((1,), (0,))]
    assert found.seconds == pytest.approx(1.5)
