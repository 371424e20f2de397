"""Published inputs become problems with the values of their rules: against brute force over the files' own nodes."""

import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import optimum, value_and_memory

from benchmarks.instances import MAX_LOAD, SUM_LOAD, Instance, max_load, read, sum_load


def _placement(seed):
    """Forward nodes, their gradients in groups with them, some without, now and then a gradient alone."""
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    nodes = [_node(rng, i, "fwd", 10 * rng.randint(1, count)) for i in range(count)]
    for i in range(count):
        if rng.random() < 0.6:
            group = nodes[i]["group"] if rng.random() < 0.7 else 1000 + rng.randint(0, 1)
            nodes.append(_node(rng, 100 + i, "bwd", group))
    for node in nodes:
        if rng.random() < 0.2:
            del node["group"]
    seconds = {node["id"]: rng.choice([0.0, rng.uniform(0.1, 2.0)]) for node in nodes}
    edges = []
    for a, b in itertools.combinations(nodes, 2):
        if rng.random() < 0.5 and (a["role"], b["role"]) != ("bwd", "fwd"):
            if a["role"] == b["role"] == "bwd":
                a, b = b, a
            edges.append({"src": a["id"], "dst": b["id"], "time": seconds[a["id"]], "bytes": 0.0})
    limit = rng.choice([100.0, sum(n["mem_bytes"] for n in nodes) * rng.uniform(0.4, 1.0)])
    return {"nodes": nodes, "edges": edges, "mem_limit_bytes": limit, "published": [], "reference": []}


def _node(rng, number, role, group):
    time = rng.choice([0.0, rng.uniform(0.1, 3.0)])
    return {
        "id": number,
        "role": role,
        "time": time,
        "time_cpu": time * rng.choice([1.0, 10.0]),
        "mem_bytes": rng.uniform(0, 5),
        "group": group,
    }


def _least_load(data, accelerators, cpu):
    """Every placement of the nodes on devices in a row, the CPU being number `cpu` of them."""
    nodes, edges = data["nodes"], data["edges"]
    devices = range(accelerators + (cpu is not None))
    groups = {}
    for node in nodes:
        groups.setdefault(node.get("group", node["id"]), []).append(node)
    headed = {n["id"] for group in groups.values() for n in group if any(m["role"] == "fwd" for m in group)}
    role = {node["id"]: node["role"] for node in nodes}
    best = math.inf
    for places in itertools.product(devices, repeat=len(groups)):
        at = {n["id"]: p for p, group in zip(places, groups.values(), strict=True) for n in group}
        right = True
        for edge in edges:
            a, b = edge["src"], edge["dst"]
            if role[a] == role[b] == "fwd":
                right &= at[a] <= at[b]
            elif role[a] == role[b] == "bwd" and (a not in headed or b not in headed):
                right &= at[b] <= at[a]
        loads, bytes_of = [0.0] * len(devices), [0.0] * len(devices)
        for node in nodes:
            on = at[node["id"]]
            loads[on] += node["time_cpu" if on == cpu else "time"]
            bytes_of[on] += node["mem_bytes"]
        for producer in role:
            sent = [e for e in edges if e["src"] == producer]
            touched = {at[producer], *(at[e["dst"]] for e in sent)}
            if len(touched) > 1:
                for on in touched - {cpu}:
                    loads[on] += sent[0]["time"]
        right &= all(b <= data["mem_limit_bytes"] for on, b in enumerate(bytes_of) if on != cpu)
        if right:
            best = min(best, max(loads))
    return best


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 3), st.booleans())
def test_placement_has_the_value_of_its_rule(seed, accelerators, with_cpu):
    data = _placement(seed)
    places = range(accelerators + 1) if with_cpu else [None]
    expected = min(_least_load(data, accelerators, cpu) for cpu in places)
    problems, items = max_load(Instance("random", data), accelerators, int(with_cpu))
    assert len(problems) == len(places)
    assert len(items) == len(data["nodes"])
    assert min(optimum(p) for p in problems) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(2, 3))
def test_training_profiles_count_activations_twice_and_inputs_not(seed, stages):
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    nodes = [
        {"id": 7 * i, "time_fwd": rng.random(), "time_bwd": rng.random(), "act_bytes": rng.uniform(0, 1e6)}
        for i in range(count)
    ]
    edges = [
        {"src": 7 * a, "dst": 7 * b, "bytes": 1.0}
        for a, b in itertools.combinations(range(count), 2)
        if rng.random() < 0.5
    ]
    problem, items = sum_load(Instance("random", {"nodes": nodes, "edges": edges}), stages, 1e9)
    stage = sorted(rng.randrange(stages) for _ in range(count))
    loads = [0.0] * stages
    read_by = {e["dst"] for e in edges}
    for i, node in enumerate(nodes):
        if node["id"] not in read_by:
            continue
        loads[stage[i]] += node["time_fwd"] + node["time_bwd"]
        touched = {stage[i], *(stage[e["dst"] // 7] for e in edges if e["src"] == node["id"])}
        for s in touched if len(touched) > 1 else ():
            loads[s] += 2 * node["act_bytes"] / 1e9 * 1e3
    assignment = [0] * problem.items
    for i, item in enumerate(items):
        assignment[item] = stage[i]
    _, _, found = value_and_memory(problem, assignment)
    assert found == pytest.approx(loads)


def test_a_folder_is_read_with_its_known_values(tmp_path):
    data = {
        **_placement(1),
        "schema": "autopart-bench/1",
        "name": "tiny",
        "published": [
            {
                "objective": "max_load_contiguous",
                "devices": {"accelerators": 6, "cpus": 1},
                "value": 2.0,
                "method": "m",
            },
            {"objective": "max_load_contiguous", "value": 3.0, "method": "no devices: not comparable"},
            {"objective": "something else", "devices": {"accelerators": 6}, "value": 2.0, "method": "m"},
        ],
        "reference": [
            {
                "objective": "sum_load_ms",
                "devices": {"accelerators": 4},
                "value": 2.0,
                "bound": 1.0,
                "method": "m",
                "bandwidth_Bps": 1e9,
            },
            {"objective": "max_load_contiguous", "devices": {"accelerators": 2}, "value": None, "method": "m"},
        ],
    }
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    (tmp_path / "other.json").write_text(json.dumps({"schema": "another/1"}))
    (instance,) = read(tmp_path)
    known = [
        (k.rule, k.accelerators, k.cpus, k.value, k.exact, k.bound, k.bandwidth_bytes_per_s) for k in instance.known
    ]
    assert known == [
        (MAX_LOAD, 6, 1, 2.0, True, None, None),
        (SUM_LOAD, 4, 0, 2.0, False, 1.0, 1e9),
        (MAX_LOAD, 2, 0, None, True, None, None),
    ]
