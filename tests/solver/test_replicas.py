"""Replicated stages: the dynamic program against every plan there is, valued from the definition."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.solver.problem import Net, Problem
from autopart.solver.replicas import DAPPLE, PIPEDREAM, Replication, solve_replicas, value


def random_replication(seed):
    """Up to 7 items with branches and skips, shared states, memory limits, and either rule."""
    rng = random.Random(seed)
    items, devices, microbatches = rng.randint(1, 7), rng.randint(1, 4), rng.choice([1, 2, 4, 8])
    rule = rng.choice([PIPEDREAM, DAPPLE])
    nets = []
    for v in range(items):
        readers = tuple(r for r in range(v + 1, items) if rng.random() < 2.0 / items)
        to_end = rng.random() < 0.1
        if readers or to_end:
            nets.append(Net(v, readers, to_end))
    users = [tuple(sorted(rng.sample(range(items), rng.randint(1, min(2, items))))) for _ in range(rng.randint(0, 4))]

    def draw(count, scale=1.0):
        return np.array([scale * rng.choice([0.0, 1.0, rng.random()]) for _ in range(count)])

    work, saved, size = draw(items), draw(items), draw(len(nets), 0.3)
    total = saved.sum() * 2 + 3 * size.sum() + 4
    repeat, fill_weight = (1.0, 0.0) if rule is PIPEDREAM else (microbatches - 1.0, 1.0)
    problem = Problem(
        work=np.tile(work, (2, 1)),
        fill=np.tile(work, (2, 1)),
        saved=np.tile(saved, (2, 1)),
        workspace=draw(items),
        nets=tuple(nets),
        transfer=draw(len(nets), 0.5).reshape(1, -1),
        send=size.reshape(1, -1),
        receive=2 * size.reshape(1, -1),
        touch=np.zeros((2, len(nets))),
        users=tuple(users),
        state_bytes=draw(len(users)),
        update=np.tile(draw(len(users), 0.2), (2, 1)),
        sync=np.tile(draw(len(users), 0.2), (2, 1)),
        process=(0, 1),
        limits=np.full(2, total * rng.uniform(0.2, 0.9) if rng.random() < 0.5 else np.inf),
        repeat=repeat,
        fill_weight=fill_weight,
        hidden=rule is PIPEDREAM,
    )
    degrees = tuple(r for r in range(1, devices + 1) if rng.random() < 0.8 or r == 1)
    return Replication(problem, devices, draw(len(users)), microbatches, degrees, rule)


def value_by_definition(replication, stage, replicas):
    """Objective of a plan, written from the rules' definitions; infinite where a device has too little memory."""
    p, m = replication.problem, replication.microbatches
    pipedream, stages = replication.rule is PIPEDREAM, len(replicas)
    seconds = [0.0] * (stages + 1)  # of what boundary b - 1 passes, on one device
    bytes_in, bytes_out = [0.0] * (stages + 1), [0.0] * (stages + 1)
    for n, net in enumerate(p.nets):
        last = stages - 1 if net.to_end else max([stage[r] for r in net.readers])
        for s in range(stage[net.producer], last):
            seconds[s + 1] += p.transfer[0][n]
            bytes_out[s] += p.send[0][n]
            bytes_in[s + 1] += p.receive[0][n]
    fill, worst = 0.0, 0.0
    for s, r in enumerate(replicas):
        own = [v for v in range(len(stage)) if stage[v] == s]
        work = sum(p.work[0][v] for v in own) / r
        fill += work + seconds[s] / r
        once, state = 0.0, 0.0
        for q, users in enumerate(p.users):
            holders = {stage[v] for v in users}
            if s in holders:
                state += p.state_bytes[q]
                once += p.update[0][q] + (p.sync[0][q] if len(holders) > 1 else 0.0)
                if not pipedream:
                    once += replication.gradient[q] * (r - 1) / r
            if pipedream and stage[users[0]] == s:
                work += replication.gradient[q] * (r - 1) / r / r
        into, out = seconds[s] / r, seconds[s + 1] / r
        busy = max(work, into, out) if p.hidden else work + into + out
        worst = max(worst, p.repeat * busy + once)
        devices = sum(replicas[s:])
        flying = min(m, math.ceil(devices / r)) if pipedream else min(m, devices - r + 1) / r
        memory = sum(p.saved[0][v] for v in own) * flying + state + (bytes_in[s] + bytes_out[s]) / r
        if memory + max(p.workspace[v] for v in own) > p.limits[0]:
            return math.inf
    return p.fill_weight * fill + worst


def plans(replication):
    """Every legal assignment to non-empty stages, with every choice of replicas that the devices allow."""
    items = replication.problem.work.shape[1]
    edges = [(net.producer, r) for net in replication.problem.nets for r in net.readers]
    for stages in range(1, min(items, replication.devices) + 1):
        choices = [
            replicas
            for replicas in itertools.product(replication.degrees, repeat=stages)
            if sum(replicas) <= replication.devices
        ]
        for stage in itertools.product(range(stages), repeat=items):
            if len(set(stage)) == stages and all(stage[u] <= stage[v] for u, v in edges):
                for replicas in choices:
                    yield stage, replicas


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_no_plan_is_better(seed):
    replication = random_replication(seed)
    best = min(value_by_definition(replication, *plan) for plan in plans(replication))
    found = solve_replicas(replication)
    if math.isinf(best):
        assert found is None
        return
    assert found.value == pytest.approx(value_by_definition(replication, found.assignment, found.replicas), rel=1e-9)
    assert found.value == pytest.approx(best, rel=1e-8, abs=1e-12)
    assert found.bound <= best * (1 + 1e-8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_any_plan_is_valued_by_the_definition(seed):
    replication = random_replication(seed)
    every = list(plans(replication))
    for plan in random.Random(seed).sample(every, min(5, len(every))):
        assert value(replication, *plan) == pytest.approx(value_by_definition(replication, *plan), rel=1e-9)


def one_item():
    """An item of 12 s with a state, in tables of two stages; nothing is limited, nothing sent."""
    return Problem(
        work=np.full((2, 1), 12.0),
        fill=np.full((2, 1), 12.0),
        saved=np.zeros((2, 1)),
        workspace=np.zeros(1),
        nets=(),
        transfer=np.zeros((1, 0)),
        send=np.zeros((1, 0)),
        receive=np.zeros((1, 0)),
        touch=np.zeros((2, 0)),
        users=((0,),),
        state_bytes=np.zeros(1),
        update=np.zeros((2, 1)),
        sync=np.zeros((2, 1)),
        process=(0, 1),
        limits=np.full(2, np.inf),
        repeat=1.0,
        fill_weight=0.0,
        hidden=True,
    )


def test_replicas_of_a_stage_share_its_work_and_pay_for_its_gradients():
    found = solve_replicas(Replication(one_item(), 4, np.array([8.0]), 1, (1, 2, 4), PIPEDREAM))
    assert (found.assignment, found.replicas) == ([0], [4])
    assert found.value == pytest.approx((12 + 8 * 3 / 4) / 4)


def test_a_graph_with_too_many_down_sets_gets_a_plan_without_a_proof():
    """Fourteen independent items have 2 ** 14 down-sets; their prefixes still split the work evenly."""
    items, stateless = 14, np.zeros((2, 0))
    problem = dataclasses.replace(
        one_item(),
        work=np.ones((2, items)),
        fill=np.zeros((2, items)),
        saved=np.zeros((2, items)),
        workspace=np.zeros(items),
        users=(),
        state_bytes=np.zeros(0),
        update=stateless,
        sync=stateless,
    )
    found = solve_replicas(Replication(problem, 2, np.zeros(0), 1, (1,), PIPEDREAM))
    assert found.value == pytest.approx(items / 2)
    assert found.bound == 0.0


def test_gradients_are_paid_once_a_step_by_one_rule_and_with_each_microbatch_by_the_other():
    """One item of 12 s on two replicas, gradients of 8 s, four microbatches."""
    problem = dataclasses.replace(one_item(), repeat=3.0, fill_weight=1.0, hidden=False)
    replication = Replication(problem, 2, np.array([8.0]), 4, (1, 2), DAPPLE)
    assert value(replication, [0], [2]) == pytest.approx(4 * 12 / 2 + 8 / 2)
    replication = Replication(one_item(), 2, np.array([8.0]), 4, (1, 2), PIPEDREAM)
    assert value(replication, [0], [2]) == pytest.approx((12 + 8 / 2) / 2)
