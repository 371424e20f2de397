"""Records: every damaged file is refused by its key; what they come to; what is corrected by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import make_plan
from split_package import MICROBATCHES
from torch import nn

import autopart
from autopart import corrections
from autopart.cluster import Cluster
from autopart.comparison import compare
from autopart.corrections import REST
from autopart.errors import InputFileError, UsageError
from autopart.plan import Layouts
from autopart.profiler import known_of
from autopart.records import Record

STEPS = 2
ROWS = [[0.0] * MICROBATCHES] * STEPS


def make_stage(stage: int, forward_s: float, backward_s: float, **changes: Any) -> dict[str, Any]:
    """Under the profiler everything takes twice as long."""
    made = {
        "stage": stage,
        "forward_s": [[forward_s for _ in row] for row in ROWS],
        "backward_s": [[backward_s for _ in row] for row in ROWS],
        "weights_s": [[] for _ in ROWS],
        "profiled_s": {"forward": 2 * forward_s * MICROBATCHES, "backward": 2 * backward_s * MICROBATCHES},
        "operators": {
            "forward": {"addmm": {"count": 8, "seconds": 1.5 * forward_s * MICROBATCHES}},
            "backward": {
                "mm": {"count": 16, "seconds": 1.9 * backward_s * MICROBATCHES},
                "cudnn_batch_norm_backward": {"count": 8, "seconds": 1e-5 * backward_s},
            },
        },
    }
    return made | changes


def make_record(kind: str = "cpu", **changes: Any) -> dict[str, Any]:
    processes = [
        {
            "number": number,
            "place": number,
            "rank": 0,
            "device": "a processor",
            "kind": kind,
            "threads": 1,
            "optimizer_s": [0.001] * STEPS,
            "wait_s": [0.002] * STEPS,
            "resident_bytes": 1000,
            "peak_bytes": 2000,
            "stages": [make_stage(number, 0.004, 0.01)],
        }
        for number in range(2)
    ]
    record = {
        "schema": "autopart-record/1",
        "plan": json.loads(make_plan(2, 1, "1f1b").to_json()),
        "schedule": "1f1b",
        "microbatches": MICROBATCHES,
        "optimizer": "adamw",
        "dtype": "float64",
        "torch": "2.14.1",
        "step_s": [0.2] * STEPS,
        "processes": processes,
    }
    return record | changes


def read(data: Mapping[str, Any]) -> Record:
    return Record.from_json(json.dumps(data), where="record.json")


def first(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["processes"][0]
    return found


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another schema": (lambda d: d.update(schema="autopart-record/0"), "schema"),
    "no plan": (lambda d: d.pop("plan"), "plan"),
    "half a plan": (lambda d: d["plan"].pop("signature"), "signature"),
    "a plan of another version": (lambda d: d["plan"].update(schema="autopart-plan/1"), "schema"),
    "an unknown key": (lambda d: d.update(more=1), "more"),
    "text for a number": (lambda d: first(d).update(place="0"), "place"),
    "a negative time": (lambda d: d.update(step_s=[-1.0, 1.0]), "step_s"),
    "no steps": (lambda d: d.update(step_s=[]), "step_s"),
    "an unknown schedule": (lambda d: d.update(schedule="rm -rf"), "schedule"),
    "a process twice": (lambda d: first(d).update(number=1), "processes"),
    "a stage twice": (lambda d: first(d)["stages"][0].update(stage=1), "processes"),
    "a stage of no plan": (lambda d: first(d)["stages"][0].update(stage=7), "processes"),
    "a place far away": (lambda d: first(d).update(place=10**9), "place"),
    "a step too few": (lambda d: first(d)["wait_s"].pop(), "wait_s"),
    "a microbatch too few": (lambda d: first(d)["stages"][0]["forward_s"][0].pop(), "forward_s"),
    "no forward": (lambda d: first(d)["stages"][0]["forward_s"][0].clear(), "forward_s"),
    "half a backward": (lambda d: first(d)["stages"][0]["weights_s"][0].append(1.0), "weights_s"),
    "the rest of no backward": (
        lambda d: first(d)["stages"][0].update(backward_s=[[]] * STEPS, weights_s=ROWS),
        "weights_s",
    ),
    "a place without a process": (lambda d: first(d).update(place=1), "processes"),
    "memory beyond all numbers": (lambda d: first(d).update(peak_bytes=10**400), "peak_bytes"),
    "times beyond all numbers": (lambda d: d.update(step_s=[1e308] * STEPS), "step_s"),
    "a third direction": (lambda d: first(d)["stages"][0]["operators"].update(sideways={}), "operators"),
    "a microbatch that is none": (lambda d: d.update(microbatches=0), "microbatches"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused_by_its_key(damage: str) -> None:
    change, key = DAMAGES[damage]
    data = make_record()
    change(data)
    with pytest.raises(InputFileError, match=key) as error:
        read(data)
    assert error.value.exit_status == 7 and len(str(error.value)) < 1000


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b'{"schema": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(InputFileError):
        Record.from_json(text)


def test_a_stage_takes_its_median_and_both_parts_of_its_backward() -> None:
    data = make_record()
    rows = [[float(i + step) for i in range(MICROBATCHES)] for step in range(STEPS)]
    first(data)["stages"][0] |= {"backward_s": rows, "weights_s": rows}
    stage = read(data).processes[0].stages[0]
    assert stage.backward.median == 8.0  # twice the median of 0..7 and 1..8
    assert stage.forward.median == 0.004 and stage.forward.spread == 0.0


@pytest.mark.parametrize(("kind", "scale"), [("cpu", 0.5), ("cuda", 1.0)])
def test_the_profiler_slows_calls_down_but_not_the_kernels_of_a_gpu(kind: str, scale: float) -> None:
    record = read(make_record(kind))
    found = record.processes[0].stages[0].operator_seconds(MICROBATCHES, kind)
    assert found["addmm"] == pytest.approx(1.5 * 0.004 * scale)
    assert found["mm"] == pytest.approx(1.9 * 0.01 * scale)
    assert "native_batch_norm_backward" in found and "cudnn_batch_norm_backward" not in found


@pytest.fixture
def predicted() -> dict[str, float]:
    """Seconds by operator that the plan predicts of each of its stages (3 ms in the first, 6 ms in the second)."""
    return {"addmm": 0.001, "mm": 0.001, "native_batch_norm_backward": 1e-9, "never_seen": 0.0005}


def predicting(operators: dict[str, float]) -> Record:
    data = make_record()
    for stage in data["plan"]["per_stage"]:
        stage["operators"] = operators
    return read(data)


def test_corrected_predictions_add_up_to_what_was_measured(predicted: dict[str, float]) -> None:
    found = corrections.corrections(predicting(predicted))
    assert list(found) == ["CPU"]
    factors = found["CPU"]
    assert factors.operators == pytest.approx({"addmm": 3.0, "mm": 9.5})
    rest = 0.003 + 0.006 - 2 * sum(predicted.values())
    corrected = 2 * sum(s * factors.factor(name) for name, s in predicted.items()) + rest * factors.factor("other")
    assert corrected == pytest.approx(2 * 0.014)


def test_collectives_keep_their_formula_and_the_rest_makes_up_for_it(predicted: dict[str, float]) -> None:
    found = corrections.corrections(predicting({**predicted, "all_reduce": 0.0004}))["CPU"]
    rest = 0.003 + 0.006 - 2 * (sum(predicted.values()) + 0.0004)
    corrected = 2 * sum(s * found.factor(name) for name, s in predicted.items()) + rest * found.factor("other")
    assert corrected + 2 * 0.0004 == pytest.approx(2 * 0.014)


def test_operators_too_small_to_be_measured_are_left_alone(predicted: dict[str, float]) -> None:
    factors = corrections.corrections(predicting(predicted))["CPU"]
    assert factors.factor("native_batch_norm_backward") == factors.factor("never_seen") == factors.overall


def test_differences_of_operators_make_up_that_of_the_stage(predicted: dict[str, float]) -> None:
    record = predicting(predicted)
    found = compare(record.plan, record).operators
    for number, planned in enumerate(record.plan.per_stage):
        of_stage = [figure for figure in found if figure.stage == number]
        assert sum(f.difference_s for f in of_stage) == pytest.approx(0.014 - planned.forward_s - planned.backward_s)
        assert {figure.name for figure in of_stage} == {*predicted, REST}
        assert [abs(f.difference_s) for f in of_stage] == sorted((abs(f.difference_s) for f in of_stage), reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "gpipe"}, "gpipe"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"plan": json.loads(make_plan(2, 1, "gpipe").to_json())}, "strategy"),
        ({"plan": json.loads(make_plan(2, 1, "1f1b").to_json()) | {"signature": "cd" * 32}}, "signature"),
    ],
)
def test_a_record_of_something_else_is_not_compared(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare(make_plan(2, 1, "1f1b"), read(make_record(**changes)))


def test_a_record_is_not_compared_with_a_plan_that_splits_tensors_otherwise_or_computes_others_again() -> None:
    record = read(make_record())
    plan = record.plan
    again = replace(plan, per_stage=(replace(plan.per_stage[0], recomputed=("layers.0",)), *plan.per_stage[1:]))
    split = replace(plan, layouts=Layouts({"weight": "split(0)"}, {}, (), 0.0, 0.0, 0))
    for other, message in ((again, "recomputation"), (split, "layouts")):
        with pytest.raises(UsageError, match=message):
            compare(other, record)


def test_the_optimizer_is_corrected_where_the_run_was_the_plans() -> None:
    """0.5 ms were predicted for each process, and each took 1 ms."""

    def updates(**changes: Any) -> Mapping[str, float]:
        return corrections.corrections(read(make_record(**changes)))["CPU"].updates

    assert updates() == pytest.approx({"adamw": 2.0})
    assert updates(optimizer="sgd") == {}
    alone = first(make_record())
    alone["stages"] = [make_stage(stage, 0.004, 0.01) for stage in range(2)]
    assert updates(processes=[alone], schedule=None) == {}
    slow = [process | {"optimizer_s": [1.0] * STEPS} for process in make_record()["processes"]]
    assert updates(processes=slow) == {}


def planned(**options: Any) -> autopart.Partition:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    rows = options.pop("rows", 12)
    inputs = {"example_inputs": (torch.zeros(rows, 8),), "stages": 2, "tensor": 1, "time_limit_s": 5}
    return autopart.partition(model, "2xCPU", **inputs, **options)


def test_a_plan_has_the_corrected_time_of_the_optimizer_that_was_recorded() -> None:
    record = read(make_record())
    for optimizer, factor in (("adamw", 2.0), ("sgd", 1.0)):
        options = {"microbatches": 6, "optimizer": optimizer}
        plain, corrected = planned(**options), planned(**options, profile=record)
        assert plain.assignment == corrected.assignment
        for before, after in zip(plain.per_stage, corrected.per_stage, strict=True):
            assert after.update_s == pytest.approx(factor * before.update_s) and before.update_s > 0


def test_a_record_decides_the_rows_of_a_microbatch() -> None:
    found = planned(profile=read(make_record()))
    assert found.strategy.microbatch_size == 2 and found.times_from == "corrected"
    assert any("microbatches have 2 rows, as those of the record" in note for note in found.notes)
    assert not any("extrapolated" in note for note in found.notes)


@pytest.mark.parametrize(
    ("rows", "named", "advice"), [(12, 3, "--microbatches 6 takes as many"), (5, 5, "5 rows cannot be cut into such")]
)
def test_a_plan_with_other_rows_than_the_record_says_so(rows: int, named: int, advice: str) -> None:
    found = planned(rows=rows, microbatches=named, profile=read(make_record()))
    assert found.strategy.microbatches == named
    (note,) = (note for note in found.notes if "extrapolated from microbatches of 2 rows" in note)
    assert advice in note


def test_a_record_of_a_plan_that_was_measured_itself_corrects_nothing() -> None:
    data = make_record()
    data["plan"]["times_from"] = "measured"
    record = read(data)
    with pytest.raises(UsageError, match="can only correct formulas"):
        known_of(record, Cluster.from_data(record.plan.cluster))
