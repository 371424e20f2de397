"""Small steps worked out by hand, and what must hold of every step."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.runtime.schedules import SCHEDULES
from autopart.simulator.actions import Action, Message, Post, Wait, actions, programs
from autopart.simulator.events import Deadlock, replay
from autopart.simulator.network import Network, Wire

FORWARD, BACK = Message(0, 1, 0), Message(1, 0, 0)


def network(latency_s=0.0, bandwidth=math.inf, by_host=False):
    return Network(lambda source, target: Wire(latency_s, bandwidth), by_host)


def told(timeline, process):
    return [(e.kind, e.start_s, e.end_s) for e in timeline.of(process)]


def test_two_stages_and_one_microbatch():
    """Forward 2 s, backward 3 s, messages of 10 bytes at 10 bytes a second and half a second of latency."""
    timeline = replay(
        programs("gpipe", 2, 1), lambda a: {"F": 2.0, "B": 3.0}[a.kind], lambda m: [10.0], network(0.5, 10.0)
    )
    # The first process waits for its send, then for the gradient; the second for the value.
    assert told(timeline, 0) == [("F", 0, 2), ("wait", 2, 3.5), ("wait", 3.5, 10), ("B", 10, 13)]
    assert told(timeline, 1) == [("wait", 0, 3.5), ("F", 3.5, 5.5), ("B", 5.5, 8.5), ("wait", 8.5, 10)]
    assert timeline.step_s == 13
    assert timeline.bubble(0) == pytest.approx(8 / 13)
    assert timeline.transfer_s(0) == 3


def test_a_send_waits_until_its_receipt_is_posted():
    late = (Action(1, "F", 0), Post(1, (), (FORWARD,)), Wait(1))
    timeline = replay([(Post(1, (FORWARD,), ()), Wait(1)), late], lambda a: 4.0, lambda m: [10.0], network(0.0, 10.0))
    assert told(timeline, 0) == [("wait", 0, 5)]
    assert [(t.start_s, t.end_s) for t in timeline.transfers] == [(4, 5)]


def crossing(by_host, sizes):
    """Both processes post a send, compute for 1 s, and post their receipts at the same time."""
    both = [
        (Post(1, (message,), ()), Action(stage, "F", 0), Post(2, (), (other,)), Wait(1), Wait(2))
        for stage, (message, other) in enumerate(((FORWARD, BACK), (BACK, FORWARD)))
    ]
    timeline = replay(both, lambda a: 1.0, sizes.__getitem__, network(0.0, 10.0, by_host))
    return {t.message: t.end_s for t in timeline.transfers}


@pytest.mark.parametrize(("by_host", "end_s"), [(False, 2.0), (True, 3.0)])
def test_messages_that_cross_share_a_port_where_the_host_copies(by_host, end_s):
    assert crossing(by_host, {FORWARD: [10.0], BACK: [10.0]}) == {FORWARD: end_s, BACK: end_s}


def test_a_transfer_speeds_up_when_the_other_direction_is_done():
    """10 bytes against 30 at 10 bytes a second through one port: 2 s together at half the rate, then 2 s alone."""
    assert crossing(True, {FORWARD: [10.0], BACK: [30.0]}) == {FORWARD: 3.0, BACK: 5.0}


@pytest.mark.parametrize("by_host", [False, True])
def test_the_host_copies_a_send_whose_receipt_is_posted_before_it_goes_on(by_host):
    sender = (Action(0, "F", 0), Post(1, (FORWARD,), ()), Action(0, "F", 1), Wait(1))
    receiver = (Post(1, (), (FORWARD,)), Wait(1))
    timeline = replay([sender, receiver], lambda a: 3.0, lambda m: [10.0], network(0.0, 10.0, by_host))
    held = [("send", 3, 4), ("F", 4, 7)] if by_host else [("F", 3, 6)]
    assert told(timeline, 0) == [("F", 0, 3), *held]
    assert told(timeline, 1) == [("wait", 0, 4)]


def test_a_fused_batch_that_is_held_posts_its_receipts_when_its_sends_have_moved():
    both = [(Post(1, (FORWARD,), (BACK,)), Wait(1)), (Action(1, "F", 0), Post(1, (BACK,), (FORWARD,)), Wait(1))]
    timeline = replay(both, lambda a: 2.0, lambda m: [10.0], network(0.0, 10.0, by_host=True))
    assert {t.message: (t.start_s, t.end_s) for t in timeline.transfers} == {BACK: (2, 3), FORWARD: (3, 4)}


def test_messages_of_one_direction_follow_each_other():
    second = Message(0, 1, 1)
    ends = [(Post(1, (FORWARD, second), ()), Wait(1)), (Post(1, (), (FORWARD, second)), Wait(1))]
    timeline = replay(ends, lambda a: 0.0, lambda m: [10.0], network(0.0, 10.0))
    assert [t.end_s for t in timeline.transfers] == [1.0, 2.0]


def test_every_tensor_of_a_message_costs_latency():
    ends = [(Post(1, (FORWARD,), ()), Wait(1)), (Post(1, (), (FORWARD,)), Wait(1))]
    assert replay(ends, lambda a: 0.0, lambda m: [5.0, 5.0, 10.0], network(0.5, 10.0)).step_s == 3.5


def test_a_message_of_few_tensors_does_not_overtake_the_one_before_it():
    small = Message(2, 3, 0)
    ends = [(Post(1, (FORWARD, small), ()), Wait(1)), (Post(1, (), (FORWARD, small)), Wait(1))]
    timeline = replay(ends, lambda a: 0.0, lambda m: [10.0] * (3 if m == FORWARD else 1), network(5.0, 10.0))
    assert {t.message: t.end_s for t in timeline.transfers} == {FORWARD: 18.0, small: 18.0}


def test_a_process_computes_while_a_message_it_does_not_wait_for_moves():
    sender = (Post(1, (FORWARD,), ()), Action(0, "F", 1), Wait(1))
    timeline = replay([sender, (Post(1, (), (FORWARD,)), Wait(1))], lambda a: 3.0, lambda m: [10.0], network(0.0, 10.0))
    assert told(timeline, 0) == [("F", 0, 3)]
    assert told(timeline, 1) == [("wait", 0, 1)]


def test_tied_gradients_are_summed_when_the_last_of_their_processes_arrives():
    rows = [(Action(0, "F", 0),), (Action(1, "F", 0),), (Action(2, "F", 0),)]
    timeline = replay(
        rows, lambda a: a.stage + 1.0, lambda m: [], network(), sync_s=(0.5, 0.0, 0.5), update_s=(1.0, 1.0, 1.0)
    )
    assert told(timeline, 0) == [("F", 0, 1), ("sync", 1, 3.5), ("update", 3.5, 4.5)]
    assert told(timeline, 1) == [("F", 0, 2), ("update", 2, 3)]
    assert timeline.step_s == 4.5


def test_a_message_that_is_never_sent_is_a_deadlock():
    with pytest.raises(Deadlock, match=r"\[0\]"):
        replay([(Post(1, (), (BACK,)), Wait(1)), ()], lambda a: 0.0, lambda m: [], network())


SECONDS = st.floats(0.01, 10.0)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.data(), st.booleans())
def test_every_step_keeps_order_and_dependencies(name, processes, data, by_host):
    stages = processes * SCHEDULES[name].stages_per_process
    microbatches = 2 * processes
    seconds = {(s, kind): data.draw(SECONDS) for s in range(stages) for kind in "FBIW"}
    latency, bandwidth = data.draw(st.floats(0, 1)), data.draw(st.floats(1, 100))
    timeline = replay(
        programs(name, stages, microbatches),
        lambda a: seconds[a.stage, a.kind],
        lambda m: [10.0],
        network(latency, bandwidth, by_host),
    )
    for process, row in enumerate(actions(name, stages, microbatches)):
        mine = timeline.of(process)
        assert [(e.stage, e.kind, e.microbatch) for e in mine if e.kind in "FBIW"] == list(row)
        for earlier, later in itertools.pairwise(mine):
            assert earlier.end_s <= later.start_s  # never two things at once
        assert timeline.busy_s(process) + timeline.wait_s(process) <= timeline.step_s * (1 + 1e-12)
    _check_dependencies(timeline, stages)
    for transfer in timeline.transfers:
        assert transfer.end_s - transfer.start_s >= (latency + 10.0 / bandwidth) * (1 - 1e-9)
    busiest = max(timeline.busy_s(p) for p in range(processes))
    through = sum(seconds[s, "F"] + min(seconds[s, "B"], seconds[s, "I"]) for s in range(stages))
    assert timeline.step_s >= max(busiest, through) * (1 - 1e-12)


def _check_dependencies(timeline, stages):
    at = {(e.stage, "B" if e.kind == "I" else e.kind, e.microbatch): e for e in timeline.events}
    sent = {(t.message.source, t.message.target, t.message.microbatch): t for t in timeline.transfers}
    for (stage, kind, microbatch), event in at.items():
        if kind == "W":
            assert event.start_s >= at[stage, "B", microbatch].end_s
        if kind not in "FB":
            continue
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "B":
            assert event.start_s >= at[stage, "F", microbatch].end_s
        if 0 <= source < stages:
            before = at[source, kind, microbatch]
            assert event.start_s >= before.end_s
            if before.process != event.process:
                transfer = sent[source, stage, microbatch]
                assert before.end_s <= transfer.start_s
                assert transfer.end_s <= event.start_s
