"""The trace is what the Trace Event format allows; its fields are checked one by one, as the document lists them."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

import autopart
from autopart.runtime.schedules import SCHEDULES
from autopart.simulator.trace import trace_json
from tests.simulator.simulated_plans import MEMORY, plan_of, stage_of

# Phase -> keys that an event of it must have, by the document, besides "ph", "pid", "tid", "name".
REQUIRED = {
    "M": {"args"},
    "X": {"ts", "dur", "cat", "args"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
    "C": {"ts", "args"},
}


def trace_of(schedule, memory=None):
    count = 2 * SCHEDULES[schedule].stages_per_process
    stages = [
        stage_of(min(s, count - 1 - s) if schedule in ("zbv", "dualpipev") else s % 2, backward_weight_s=0.5,
                 sent_bytes=(10,), returned_bytes=(10,), update_s=0.25, memory=memory)
        for s in range(count)
    ]  # fmt: skip
    simulation = autopart.simulate(plan_of(stages, schedule, latency_s=0.01, bandwidth=100.0))
    return simulation, json.loads(trace_json(simulation))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_event_has_the_fields_of_its_phase(schedule):
    _, document = trace_of(schedule)
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert REQUIRED[event["ph"]] | {"ph", "pid", "tid", "name"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if "ts" in event:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert set(event["args"]) == ({"sort_index"} if event["name"] == "process_sort_index" else {"name"})


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_slices_of_a_thread_do_not_overlap(schedule):
    _, document = trace_of(schedule)
    threads = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_an_arrow_leads_from_every_message_to_the_action_that_needs_it(schedule):
    simulation, document = trace_of(schedule)
    events = document["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert len(starts) == len(ends) == len(simulation.timeline.transfers)
    for number, start in starts.items():
        end = ends[number]
        sent, needed = slices[start["pid"], start["tid"], start["ts"]], slices[end["pid"], end["tid"], end["ts"]]
        assert sent["cat"] == "message"
        assert (needed["cat"] == "forward") == sent["name"].startswith("values")
        assert sent["ts"] + sent["dur"] <= needed["ts"] + 1e-3
        assert sent["name"].split()[-1] == needed["name"].split()[-1]  # of the same microbatch


def test_memory_is_a_counter_of_its_process():
    simulation, document = trace_of("1f1b", MEMORY)
    counters = [e for e in document["traceEvents"] if e["ph"] == "C"]
    assert {e["pid"] for e in counters} == {0, 1}
    for process in (0, 1):
        shown = [e["args"]["bytes"] for e in counters if e["pid"] == process]
        assert shown[0] == 100 and max(shown) == simulation.peak_memory_bytes(process) >= 200


def test_slices_are_the_seconds_of_the_simulation_in_microseconds():
    simulation, document = trace_of("1f1b")
    computed = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 0 and e["tid"] == 0]
    assert [e["ts"] for e in computed] == [e.start_s * 1e6 for e in simulation.timeline.of(0)]
    assert max(e["ts"] + e["dur"] for e in computed) <= simulation.step_s * 1e6 * (1 + 1e-12)


def test_messages_of_different_boundaries_between_two_processes_have_slices_one_after_the_other():
    """Between the stages of both processes: gradients come back in three tensors, or in one, and one latency each."""
    times = {"forward_s": 0.1, "backward_s": 0.1}
    sizes = zip((1, 1, 0, 0), (0, 1, 3, 0), strict=True)
    stages = [
        stage_of(s % 2, sent_bytes=(1,) * sent, returned_bytes=(1,) * returned, **times)
        for s, (sent, returned) in enumerate(sizes)
    ]
    plan = plan_of(stages, "interleaved1f1b", 4, latency_s=1.0, bandwidth=100.0)
    for event in json.loads(trace_json(autopart.simulate(plan)))["traceEvents"]:
        assert event.get("dur", 0) >= 0
