"""Plan files: an exact round trip, and every damaged file refused by name."""

import dataclasses
import json
import random

import pytest

from autopart.cluster import Cluster
from autopart.errors import InputFileError
from autopart.plan import (
    SCHEMA,
    Baseline,
    BlockLayout,
    Layouts,
    MicrobatchMemory,
    Plan,
    StageMemory,
    StagePlan,
    Strategy,
)


def make_plan(**changes):
    stage = StagePlan((0,), 2, 100, 400, 0.5, 1.0, 0.125, 1000, 2000)
    fields = {
        "model": "hf:gpt2",
        "mode": "training",
        "strategy": Strategy(2, 1, 1, 0, "1f1b", 4, 2),
        "status": "optimal",
        "step_time_s": 9.5,
        "lower_bound_s": 9.49,
        "gap": 0.001,
        "stopped_by": "proof",
        "per_stage": (stage, StagePlan((1,), 1, 10, 40, 0.25, 0.5, 0.125, 500, 2000)),
        "balance": 0.75,
        "baselines": (Baseline("one device", None, False, "device 0 would need 3 GiB of 2 GiB"),),
        "assignment": {"linear": 0, "relu": 0, "loss é": 1},
        "signature": "ab" * 32,
        "granularity": "block",
        "optimizer": "adamw",
        "dtype": "float32",
        "cluster": Cluster.parse("4xA100-80G").to_data(),
        "alternatives": {"operator": 9.25},
        "seconds": {"solve": 1.5},
        "notes": ("a note",),
        "versions": {"torch": "2.14.1"},
    }
    return Plan(**(fields | changes))


def make_split_plan(**changes):
    """Two stages of two ranks each."""
    first, second = (
        dataclasses.replace(s, devices=d) for s, d in zip(make_plan().per_stage, ((0, 1), (2, 3)), strict=True)
    )
    strategy = Strategy(2, 2, 1, 0, "1f1b", 4, 2)
    return make_plan(**({"strategy": strategy, "per_stage": (first, second), "layouts": make_layouts()} | changes))


def make_layouts():
    block = BlockLayout("h.0", {"h.0.attn": "column: weight 8 x 4 by 2 on dimension 0"}, {"forward all_reduce": 2}, 512)
    return Layouts({"h.0.attn.weight": "S(0)"}, {"linear": "n: R*, S(0) -> S(1)"}, (block,), 0.5, 0.25, 16)


def refused(text):
    with pytest.raises(InputFileError) as error:
        Plan.from_json(text, where="plan.json")
    assert error.value.exit_status == 7
    assert "plan.json" in error.value.message
    assert len(str(error.value)) < 2000
    return error.value.message


def changed(**changes):
    return json.dumps(json.loads(make_plan().to_json()) | changes)


def test_a_plan_is_read_back_as_it_was_written():
    plan = make_plan()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json().encode()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_a_plan_that_splits_tensors_is_read_back_as_it_was_written():
    plan = make_split_plan(degrees={"1": 10.0, "2": 9.5})
    assert Plan.from_json(plan.to_json()) == plan


def test_layouts_belong_to_plans_that_split_tensors():
    assert "layouts" in refused(make_plan(layouts=make_layouts()).to_json())
    assert "layouts" in refused(make_split_plan(layouts=None).to_json())


def test_a_stage_has_a_device_for_each_tensor_rank():
    for devices in ((0,), (0, 0), (0, 1, 2)):
        stages = [dataclasses.replace(stage, devices=devices) for stage in make_split_plan().per_stage]
        assert "per_stage.0.devices" in refused(make_split_plan(per_stage=tuple(stages)).to_json())


def test_the_file_has_the_names_of_the_contract_in_sorted_order():
    data = json.loads(make_plan().to_json())
    assert data["schema"] == SCHEMA
    names = (
        "model mode strategy status step_time_s lower_bound_s gap stopped_by seconds per_stage balance baselines notes"
    )
    assert set(names.split()) <= set(data)
    assert list(data) == sorted(data)
    stage = "devices nodes parameters parameter_bytes forward_s backward_s communication_s peak_memory_bytes"
    stage += " memory_limit_bytes backward_weight_s update_s sync_s sent_bytes returned_bytes operators sliced"
    stage += " recomputed memory"
    assert set(stage.split()) == set(data["per_stage"][0])


def test_a_missing_key_is_named():
    data = json.loads(make_plan().to_json())
    defaults = {"alternatives", "degrees", "layouts", "seconds", "notes", "times_from", "versions"}
    for key in set(data) - {"schema"} - defaults:
        assert key in refused(json.dumps({k: v for k, v in data.items() if k != key}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": "autopart-plan/99"}, "schema"),
        ({"step_time_s": "9.5"}, "step_time_s"),
        ({"gap": None}, "gap"),
        ({"status": "best"}, "status"),
        ({"stopped_by": 3}, "stopped_by"),
        ({"surprise": 1}, "surprise"),
        ({"assignment": {"linear": 2}}, "assignment.linear"),
        ({"assignment": {"linear": -1}}, "assignment.linear"),
        ({"assignment": {"linear": 0.5}}, "assignment.linear"),
        ({"assignment": {"linear": True}}, "assignment.linear"),
        ({"per_stage": []}, "per_stage"),
        ({"balance": -0.5}, "balance"),
        ({"notes": "text"}, "notes"),
    ],
)
def test_a_wrong_value_is_refused_and_its_key_named(change, named):
    assert named in refused(changed(**change))


def test_a_wrong_value_inside_a_stage_is_named_with_its_path():
    data = json.loads(make_plan().to_json())
    data["per_stage"][1]["nodes"] = "three"
    assert "per_stage.1.nodes" in refused(json.dumps(data))


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("strategy.schedule", "2f2b", "schedule"),
        ("strategy.microbatches", 0, "microbatches"),
        ("strategy.microbatches", 2**63, "microbatches"),
        ("per_stage.1.devices", [4], "per_stage.1.devices"),
        ("per_stage.1.devices", [2**70], "per_stage.1.devices"),
        ("per_stage.0.sent_bytes", [10**400], "per_stage.0.sent_bytes.0"),
        ("per_stage.0.forward_s", 1e308, "per_stage.0.forward_s"),
        ("per_stage.0.backward_weight_s", 1.5, "per_stage.0.backward_weight_s"),
        ("cluster.nodes", [0], "cluster"),
        ("cluster.intra_node.latency_s", 1e308, "cluster"),
        ("cluster.intra_node.bandwidth_bytes_per_s", 5e-324, "cluster"),
        ("cluster", {}, "cluster"),
    ],
)
def test_what_cannot_be_a_plan_of_its_cluster_and_schedule_is_refused(place, value, named):
    data = json.loads(make_plan().to_json())
    *path, last = place.split(".")
    at = data
    for key in path:
        at = at[int(key) if key.isdecimal() else key]
    at[last] = value
    assert named in refused(json.dumps(data))


def test_stages_of_one_process_are_on_the_same_devices():
    strategy = Strategy(2, 1, 1, 0, "zbv", 4, 2)
    first, second = make_plan().per_stage
    together = dataclasses.replace(second, devices=first.devices)
    plan = make_plan(strategy=strategy, per_stage=(first, together))
    assert Plan.from_json(plan.to_json()) == plan
    assert ".devices" in refused(dataclasses.replace(plan, per_stage=(first, second)).to_json())


def test_memory_of_a_step_of_training_is_in_no_plan_for_inference():
    microbatch = MicrobatchMemory(1, 0, 1, 1, 1, 1, 0)
    first, second = make_plan().per_stage
    first = dataclasses.replace(first, memory=StageMemory(1, 0, 1, 1, 0, 0, 0, 1, microbatch))
    plan = make_plan(per_stage=(first, second))
    assert Plan.from_json(plan.to_json()) == plan
    assert "per_stage.0.memory" in refused(dataclasses.replace(plan, mode="inference").to_json())


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(token):
    refused(make_plan().to_json().replace("9.49", token))


def test_a_key_that_stands_twice_is_named():
    assert "'balance'" in refused(make_plan().to_json().replace('"assignment"', '"balance": 1.0, "assignment"', 1))


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", "{", "[" * 200_000, '{"a":' * 200_000, "1" * 100_000, b"\xff\xfe{}"]
)
def test_what_is_not_a_json_object_is_refused(text):
    refused(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputFileError, match=r"missing\.json"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(InputFileError):
        Plan.load(tmp_path)


def damaged(rng, text):
    """Text with characters lost, doubled or replaced, or a value swapped for one of another type."""
    if rng.random() < 0.5:
        data = json.loads(text)
        values = [None, True, -1, 0, 1.5, 10**400, "x", [], {}, [[]], {"a": 1}, "\ud800"]
        at = data
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], (dict, list)) and rng.random() < 0.7:
                at = at[key]
                continue
            if rng.random() < 0.3:
                del at[key]
            else:
                at[key] = rng.choice(values)
            break
        return json.dumps(data)
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(text))
        text = (
            text[:i] + rng.choice(['"', "{", "]", ",", "9", "-", "\0", "\\", "e", ""]) + text[i + rng.randint(0, 3) :]
        )
    return text


def test_ten_thousand_damaged_files_are_read_as_a_plan_or_refused():
    rng = random.Random(0)
    text = make_plan().to_json()
    refusals = 0
    for _ in range(10_000):
        broken = damaged(rng, text)
        try:
            plan = Plan.from_json(broken)
        except InputFileError:
            refusals += 1
        else:
            assert Plan.from_json(plan.to_json()) == plan
    assert refusals > 8_000
