"""A plan is simulated as the package would run it; the table and the JSON say what the timeline says."""

import json
import math

import pytest

import autopart
from autopart.simulator.actions import Action, Message
from autopart.simulator.step import step_of_plan
from tests.simulator.simulated_plans import MEMORY, plan_of, stage_of


def test_1f1b_of_equal_stages_takes_the_textbook_time():
    simulation = autopart.simulate(plan_of([stage_of(s) for s in range(4)], microbatches=8))
    assert simulation.step_s == (8 + 4 - 1) * 3
    assert simulation.bubble == pytest.approx(3 / 11)


def test_messages_take_the_bytes_of_their_boundary_over_its_link():
    stages = [stage_of(0, sent_bytes=(4, 6), returned_bytes=(2,)), stage_of(1)]
    step = step_of_plan(plan_of(stages, latency_s=0.5, bandwidth=10.0))
    assert step.sizes(Message(0, 1, 0)) == (4, 6)
    assert step.sizes(Message(1, 0, 0)) == (2,)
    transfers = step.replay().transfers
    assert {(t.message.source, round(t.end_s - t.start_s, 9)) for t in transfers} == {(0, 2.0), (1, 0.7)}


def test_the_host_copies_messages_between_cpus():
    stages = [stage_of(0), stage_of(1)]
    assert not step_of_plan(plan_of(stages)).by_host
    assert step_of_plan(plan_of(stages, kind="cpu")).by_host


def test_the_first_stage_does_its_split_backward_with_the_weight_gradient():
    stages = [stage_of(device, backward_s=5.0, backward_weight_s=2.0) for device in (0, 1, 1, 0)]
    step = step_of_plan(plan_of(stages, "zbv"))
    assert [step.seconds(Action(0, kind, 0)) for kind in "FBIW"] == [1, 5, 0, 5]
    assert [step.seconds(Action(1, kind, 0)) for kind in "FBIW"] == [1, 5, 3, 2]


def test_a_stage_that_recomputes_does_its_whole_backward_with_the_input_gradient():
    stages = [stage_of(d, backward_s=5.0, backward_weight_s=2.0, recomputed=("block",)) for d in (0, 1, 1, 0)]
    step = step_of_plan(plan_of(stages, "zbv"))
    assert [step.seconds(Action(0, kind, 0)) for kind in "IW"] == [5, 0]


def test_one_stage_runs_every_microbatch_forward_and_backward_whatever_the_schedule():
    simulation = autopart.simulate(plan_of([stage_of(0, update_s=0.5)], "gpipe", microbatches=3))
    assert [e.kind for e in simulation.timeline.events] == ["F", "B"] * 3 + ["update"]
    assert simulation.step_s == 9.5


def test_inference_runs_forwards_alone_and_waits_for_no_send_before_the_end():
    """Two microbatches of 1 s through two stages; a message of 10 bytes takes 1 s."""
    stages = [stage_of(0, sent_bytes=(10,)), stage_of(1)]
    simulation = autopart.simulate(plan_of(stages, microbatches=2, mode="inference", bandwidth=10.0))
    first, second = ([(e.kind, e.start_s, e.end_s) for e in simulation.timeline.of(process)] for process in range(2))
    assert first == [("F", 0, 1), ("F", 1, 2), ("wait", 2, 4)]
    assert second == [("wait", 0, 2), ("F", 2, 3), ("wait", 3, 4), ("F", 4, 5)]


def test_the_table_and_the_document_say_what_the_timeline_says():
    simulation = autopart.simulate(plan_of([stage_of(0), stage_of(1)], step_time_s=15.0))
    document = json.loads(simulation.to_json())
    assert document["step_s"] == 15.0
    assert document["plan_step_s"] == 15.0
    assert [row["busy_s"] for row in document["rows"]] == [12.0, 12.0]
    assert [row["bubble"] for row in document["rows"]] == pytest.approx([0.2, 0.2])
    assert [row["peak_memory_bytes"] for row in document["rows"]] == [1000, 1001]
    assert "1.000 of the simulated one" in str(simulation)
    assert "20.0 %" in str(simulation)


def test_memory_of_actions_is_put_where_they_run():
    simulation = autopart.simulate(plan_of([stage_of(0, update_s=1.0, memory=MEMORY)], microbatches=1))
    assert simulation.memory == (((0, 100), (0, 150), (1, 130), (1, 200), (3, 110), (3, 160), (4, 110)),)
    assert simulation.peak_memory_bytes(0) == 200


def test_busy_and_waiting_never_exceed_the_step():
    simulation = autopart.simulate(plan_of([stage_of(s, forward_s=s + 1.0) for s in range(4)], "gpipe"))
    for row in simulation.rows():
        assert row["busy_s"] + row["wait_s"] <= simulation.step_s
        assert math.isclose(row["bubble"], 1 - row["busy_s"] / simulation.step_s)
