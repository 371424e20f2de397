"""The paths of a sweep are the legal labellings of one stage, each once, and cost what the definition says."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import legal
from random_problems import random_problem

from autopart.solver import sweep as module
from autopart.solver.score import score
from autopart.solver.sweep import AFTER, BEFORE, IN, TooWideError, narrow_order, sweep

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**9)
TRAVEL = st.sampled_from(["relayed", "direct", "both"])
ORDERS = st.sampled_from(["program", "narrow", "shuffled", "shuffled"])
ANY = 10**6  # more states than seven items have


@PROPERTY
@given(SEEDS, TRAVEL, ORDERS, st.booleans())
def test_the_paths_are_the_legal_labellings_at_the_cost_of_the_definition(seed, travel, kind, restricted):
    rng = random.Random(seed)
    problem = _problem(seed, travel, items=rng.randint(3, 7))
    stage = rng.randrange(problem.stages)
    allowed = _some_labels(rng, problem.items) if restricted else np.ones((problem.items, 3), dtype=bool)
    expected = {
        labels: _seconds(problem, stage, labels)
        for labels in itertools.product((BEFORE, IN, AFTER), repeat=problem.items)
        if all(allowed[v, label] for v, label in enumerate(labels)) and _monotone(problem, labels)
    }
    paths = _paths(sweep(problem, stage, allowed, _order(problem, kind, rng), ANY))
    found = dict(paths)
    assert len(found) == len(paths)
    assert set(found) == set(expected)
    for labels, seconds in expected.items():
        assert found[labels] == pytest.approx(seconds, rel=1e-12, abs=1e-12)


@PROPERTY
@given(SEEDS, TRAVEL, st.sampled_from(["1f1b", "zbv"]), ORDERS)
def test_no_stage_costs_more_than_its_share_of_the_load_of_a_plan(seed, travel, schedule, kind):
    rng = random.Random(seed)
    problem = _problem(seed, travel, items=rng.randint(4, 5), schedule=schedule)
    free = np.ones((problem.items, 3), dtype=bool)
    order = _order(problem, kind, rng)
    costs = [dict(_paths(sweep(problem, s, free, order, ANY))) for s in range(problem.stages)]
    # What a sweep leaves out: backward nets, and all but the first user of a state.
    whole = not any(net.backward for net in problem.nets) and all(len(users) == 1 for users in problem.users)
    plans = [p for p in itertools.product(range(problem.stages), repeat=problem.items) if legal(problem, p)]
    for plan in rng.sample(plans, min(len(plans), 40)):
        loads = score(problem, plan).loads_s
        for p, own in enumerate(problem.stages_of_process):
            cost = sum(costs[s][tuple(1 + (at > s) - (at < s) for at in plan)] for s in own)
            assert cost <= loads[p] * (1 + 1e-12) + 1e-12
            if whole:
                assert cost == pytest.approx(loads[p], rel=1e-12, abs=1e-12)


@PROPERTY
@given(SEEDS, TRAVEL, ORDERS)
def test_it_keeps_the_states_between_two_items_within_the_number_asked_for(seed, travel, kind):
    rng = random.Random(seed)
    problem = _problem(seed, travel, items=rng.randint(3, 7))
    free, order = np.ones((problem.items, 3), dtype=bool), _order(problem, kind, rng)
    stage = rng.randrange(problem.stages)
    widest = int(np.diff(sweep(problem, stage, free, order, ANY).begin).max())
    assert np.diff(sweep(problem, stage, free, order, widest).begin).max() == widest
    with pytest.raises(TooWideError):
        sweep(problem, stage, free, order, widest - 1)


@pytest.mark.parametrize("most_arcs, deadline", [(10, math.inf), (10**6, -math.inf)])
def test_it_ends_where_there_are_too_many_arcs_or_no_time(monkeypatch, most_arcs, deadline):
    problem, free = _chain(5), np.ones((5, 3), dtype=bool)
    monkeypatch.setattr(module, "MOST_ARCS", most_arcs)
    with pytest.raises(TooWideError):
        sweep(problem, 1, free, range(5), ANY, deadline)


@PROPERTY
@given(SEEDS)
def test_a_narrow_order_has_every_item_once(seed):
    problem = _problem(seed, "relayed", items=random.Random(seed).randint(3, 7))
    assert sorted(narrow_order(problem)) == list(range(problem.items))


@pytest.mark.parametrize("length", [5, 40])
def test_a_chain_has_as_many_states_however_long_it_is(length):
    """One net is open at a time; at most its producer's label matters."""
    problem = _chain(length)
    found = sweep(problem, 1, np.ones((length, 3), dtype=bool), range(length), 3)
    assert found.states == 3 * (length - 1) + 2


def _problem(seed, travel, items, schedule="1f1b"):
    """A random problem whose tables differ from stage to stage, with nets that cost a transfer, a touch, or both."""
    rng = random.Random(seed)
    stages = 4 if schedule == "zbv" else rng.randint(2, min(items, 4))
    # Only problems with direct sends have backward nets, and these cost no transfer.
    base = "direct" if travel == "direct" or rng.random() < 0.5 else "relayed"
    base = base if schedule == "1f1b" else None
    problem = random_problem(seed, items, stages, tight=False, schedule=schedule, travel=base)
    nets = [dataclasses.replace(net, to_end=not net.backward and rng.random() < 0.25) for net in problem.nets]
    forward = np.array([not net.backward for net in nets], dtype=float)

    def table(rows, columns, zeros):
        return np.array([[rng.uniform(0.1, 2) * (rng.random() > zeros) for _ in range(columns)] for _ in range(rows)])

    shape = (stages, len(nets))
    transfer = table(stages - 1, len(nets), 0.2) if travel != "direct" else np.zeros((stages - 1, len(nets)))
    touch = table(*shape, 0.2) if travel != "relayed" else np.zeros(shape)
    return dataclasses.replace(
        problem,
        work=table(stages, items, 0.1),
        nets=tuple(nets),
        transfer=transfer.reshape(stages - 1, len(nets)) * forward,
        touch=touch.reshape(shape),
        update=table(stages, len(problem.users), 0.2).reshape(stages, len(problem.users)),
        repeat=rng.choice([0.0, 1.0, 3.0, 7.0]),
    )


def _chain(length):
    problem = random_problem(0, items=length, stages=3, schedule="1f1b", travel="relayed", tight=False)
    net = dataclasses.replace(problem.nets[0], to_end=False)
    return dataclasses.replace(
        problem,
        nets=tuple(dataclasses.replace(net, producer=v, readers=(v + 1,)) for v in range(length - 1)),
        transfer=np.ones((2, length - 1)),
        touch=np.zeros((3, length - 1)),
        users=(),
    )


def _some_labels(rng, items):
    """For each item one or more of the labels."""
    return np.array([rng.choice([(1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 1, 0)]) for _ in range(items)]) > 0


def _order(problem, kind, rng):
    if kind == "program":
        return range(problem.items)
    return narrow_order(problem) if kind == "narrow" else rng.sample(range(problem.items), problem.items)


def _paths(graph):
    """(labels of all items, seconds) of each path."""
    assert len(graph.begin) == len(graph.order) + 2 and len(graph.first) == graph.states + 1
    assert graph.begin[0] == 0 and graph.begin[1] == 1
    here = {0: [((), 0.0)]}
    for step in range(len(graph.order)):
        there = {}
        for state in range(graph.begin[step + 1], graph.begin[step + 2]):
            there[state] = [
                ((*labels, int(graph.label[arc])), seconds + graph.seconds[arc])
                for arc in range(graph.first[state], graph.first[state + 1])
                for labels, seconds in here[int(graph.source[arc])]
            ]
        here = there
    assert len(here) <= 1
    place = np.argsort(graph.order)
    return [(tuple(labels[i] for i in place), seconds) for paths in here.values() for labels, seconds in paths]


def _monotone(problem, labels):
    return all(labels[net.producer] <= labels[r] for net in problem.nets if not net.backward for r in net.readers)


def _seconds(problem, s, labels):
    """What the labelling costs stage s: its work, its forward nets, and the updates of its states' first users."""
    busy = sum(problem.work[s][v] for v, label in enumerate(labels) if label == IN)
    for n, net in enumerate(problem.nets):
        if net.backward:
            continue
        pins = {labels[net.producer], *(labels[r] for r in net.readers)}
        if IN in pins and len(pins) > 1:
            busy += problem.touch[s][n]
        # The furthest place that needs the value; the end of the pipeline is never before a stage.
        enters = labels[net.producer] == BEFORE and (net.to_end or max(pins) >= IN)
        leaves = labels[net.producer] <= IN and (net.to_end or max(pins) == AFTER)
        if enters and s > 0:
            busy += problem.transfer[s - 1][n]
        if leaves and s < len(problem.process) - 1:
            busy += problem.transfer[s][n]
    return problem.repeat * busy + sum(
        problem.update[s][r] for r, users in enumerate(problem.users) if labels[users[0]] == IN
    )
