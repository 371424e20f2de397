"""Published inputs become problems that mean the same: plans solved from a file are the best that its scorer knows."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.solver.option_search import solve_options
from autopart.solver.replicas import solve_replicas
from benchmarks.split_inputs import ANTICHAIN, Nodes, pipedream, piper
from benchmarks.split_scorer import Stage, pipedream_seconds, piper_time


def random_edges(rng, ids):
    pairs = itertools.combinations(ids, 2)
    return [{"src": u, "dst": v, "bytes": rng.random()} for u, v in pairs if rng.random() < 2.0 / len(ids)]


def legal_plans(instance, ids, devices, splits):
    """Stages as lists of ids, with every choice of replicas."""
    for stages in range(1, min(len(ids), devices) + 1):
        for where in itertools.product(range(stages), repeat=len(ids)):
            place = dict(zip(ids, where, strict=True))
            if len(set(where)) < stages:
                continue
            if any(e["src"] in place and place[e["src"]] > place[e["dst"]] for e in instance["edges"]):
                continue
            for split in itertools.product(splits, repeat=stages):
                if sum(t * d for t, d in split) <= devices:
                    yield [([v for v in ids if place[v] == s], *split[s]) for s in range(stages)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_pipedreams_rule(seed):
    rng = random.Random(seed)
    ids = rng.sample(range(20), rng.randint(2, 6))
    instance = {
        "nodes": [
            {"id": v, "param_bytes": rng.choice([0.0, 1.0]), "act_bytes": rng.random()}
            | {"time_fwd": 500 * rng.random(), "time_bwd": 500 * rng.random()}
            for v in ids
        ],
        "edges": random_edges(rng, ids),
    }
    instance["nodes"][0]["input"] = True
    antichain, devices = rng.random() < 0.5, rng.randint(1, 3)
    entry = {
        "bandwidth_Bps": rng.choice([1.0, 5.0]),
        "devices": {"accelerators": devices},
        "replication": rng.random() < 0.7,
        "boundary": ANTICHAIN if antichain else "true producers with a consumer outside",
    }
    nodes = Nodes.of(instance)
    plan = solve_replicas(pipedream(nodes, entry))
    found = [
        Stage({v: 0 for v, stage in zip(nodes.ids, plan.assignment, strict=True) if stage == s}, r)
        for s, r in enumerate(plan.replicas)
    ]

    def value(stages):
        return pipedream_seconds(instance, stages, devices, entry["bandwidth_Bps"], antichain)

    splits = [(1, d) for d in range(1, devices + 1 if entry["replication"] else 2)]
    plans = legal_plans(instance, ids[1:], devices, splits)
    best = min(value([Stage(dict.fromkeys(own, 0), d) for own, _, d in stages]) for stages in plans)
    assert plan.value == pytest.approx(value(found), rel=1e-9)
    assert plan.value == pytest.approx(best, rel=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_pipers_rule(seed):
    rng = random.Random(seed)
    ids = rng.sample(range(20), rng.randint(1, 4))
    edges = random_edges(rng, ids)

    def option(v, tensor, again):
        return {
            "tensor_degree": tensor,
            "recompute": again,
            "time": (1.5 if again else 1.0) * rng.random(),
            "param_bytes": rng.random(),
            "mem_per_inflight": rng.random() / (3 if again else 1),
            "mem_fixed": rng.random() / 3,
            "sync_fwd": {str(e["src"]): rng.random() * (tensor - 1) for e in edges if e["dst"] == v},
            "sync_bwd": {str(e["dst"]): rng.random() * (tensor - 1) for e in edges if e["src"] == v},
        }

    instance = {
        "nodes": [{"id": v, "options": [option(v, t, a) for t in (1, 2) for a in (False, True)]} for v in ids],
        "edges": edges,
        "microbatches": rng.choice([1, 2, 4]),
    }
    devices = rng.randint(1, 3)
    entry = {
        "devices": {"accelerators": devices},
        "bandwidth_Bps": rng.choice([1.0, 5.0]),
        "mem_limit_bytes": rng.uniform(0.3, 1.5) * len(ids),
    }
    nodes = Nodes.of(instance)
    plan = solve_options(piper(instance, nodes, entry))

    def value(stages):
        try:
            return piper_time(instance, stages, entry)
        except ValueError:
            return math.inf

    best = math.inf
    for stages in legal_plans(instance, ids, devices, [(1, 1), (1, 2), (2, 1)]):
        for places in itertools.product((0, 1), repeat=len(ids)):
            again = dict(zip(ids, places, strict=True))
            tried = [Stage({v: 2 * (t - 1) + again[v] for v in own}, d, t) for own, t, d in stages]
            best = min(best, value(tried))
    if math.isinf(best):
        assert plan is None
        return
    found = [
        Stage(
            {nodes.ids[v]: 2 * (stage.tensor - 1) + o for v, o in zip(stage.nodes, stage.option, strict=True)},
            stage.data,
            stage.tensor,
        )
        for stage in plan.stages
    ]
    assert plan.seconds == pytest.approx(value(found), rel=1e-9)
    assert plan.seconds == pytest.approx(best, rel=1e-8)
