"""The solver's closed form of a step beside the simulation of the program that runs.

With w_s the work of stage s for one microbatch, the form is (1/V) sum w_s + (m - 1/V) max load (`solver/pipeline.py`).
It is exact for stages alike where the backward is whole. Where they differ it is a bound for the schedules of one stage
on a process: from below for GPipe, whose slowest forward and slowest backward may be of two stages, and from above for
1F1B, where a slow stage is ahead of the others by its warm-up. Schedules of two stages on a process lie around it.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.costs import NodeTime
from autopart.runtime.schedules import SCHEDULES, processes_of_stages
from autopart.simulator.network import Wire
from autopart.simulator.step import StageWork, Step
from autopart.solver.pipeline import fill_time, repeats

WHOLE = ["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]
SPLIT = [name for name, info in SCHEDULES.items() if info.splits_backward]
SECONDS = st.floats(0.5, 2.0)


def formula(schedule, works, microbatches, crossing=None):
    """The solver's step time; `crossing` is the seconds that each boundary is busy for one microbatch."""
    crossing = crossing or [0.0] * (len(works) - 1)
    most, once = repeats(schedule, microbatches)
    load = [0.0] * (1 + max(processes_of_stages(schedule, len(works))))
    for s, process in enumerate(processes_of_stages(schedule, len(works))):
        load[process] += works[s].forward_s + works[s].backward_input_s + works[s].backward_weight_s
        load[process] += sum(crossing[b] for b in (s - 1, s) if 0 <= b < len(crossing))
    fill = sum(fill_time(schedule, NodeTime(w.forward_s, w.backward_input_s, w.backward_weight_s)) for w in works)
    return once * (fill + sum(crossing)) + most * max(load)


def simulated(schedule, works, microbatches, crossing=None):
    """The same simulated; half of a boundary's seconds are a forward message's latency, half the gradient's."""
    wires = [Wire(seconds / 2) for seconds in crossing or [0.0] * (len(works) - 1)]
    return Step(schedule, microbatches, tuple(works), tuple(wires)).replay().step_s


@st.composite
def pipelines(draw, schedules, alike=False):
    """A schedule, its stages (alike, or up to 4 times as slow as one another), and microbatches that it takes."""
    schedule = draw(st.sampled_from(schedules))
    per_process = SCHEDULES[schedule].stages_per_process
    count = draw(st.integers(2, 4)) * per_process
    one = StageWork(draw(SECONDS), draw(SECONDS), draw(SECONDS))
    works = [one if alike else StageWork(draw(SECONDS), draw(SECONDS), draw(SECONDS)) for _ in range(count)]
    return schedule, works, count * draw(st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(pipelines(WHOLE, alike=True))
def test_the_form_is_exact_for_stages_alike(pipeline):
    assert math.isclose(formula(*pipeline), simulated(*pipeline), rel_tol=1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(["gpipe"]))
def test_gpipe_takes_no_less_and_the_form_with_each_direction_apart_is_exact(pipeline):
    _, works, m = pipeline
    forward = [w.forward_s for w in works]
    backward = [w.backward_input_s + w.backward_weight_s for w in works]
    exact = sum(forward) + (m - 1) * max(forward) + sum(backward) + (m - 1) * max(backward)
    assert math.isclose(simulated(*pipeline), exact, rel_tol=1e-9)
    assert formula(*pipeline) <= exact * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(["1f1b"]))
def test_1f1b_takes_no_more(pipeline):
    assert simulated(*pipeline) <= formula(*pipeline) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(["1f1b"]), st.floats(1.0, 2.0))
def test_the_form_is_exact_for_1f1b_whose_last_stage_is_the_slowest(pipeline, factor):
    schedule, works, m = pipeline
    slowest = StageWork(
        *(
            factor * max(getattr(w, name) for w in works)
            for name in ("forward_s", "backward_input_s", "backward_weight_s")
        )
    )
    works = [*works[:-1], slowest]
    assert math.isclose(formula(schedule, works, m), simulated(schedule, works, m), rel_tol=1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(["1f1b"]), st.data())
def test_1f1b_that_waits_for_its_messages_takes_no_more(pipeline, data):
    crossing = [data.draw(st.floats(0.0, 0.5)) for _ in pipeline[1][1:]]
    slower = simulated(*pipeline, crossing)
    assert simulated(*pipeline) <= slower * (1 + 1e-9)
    assert slower <= formula(*pipeline, crossing) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(SPLIT, alike=True))
def test_zero_bubble_stages_alike_are_near_the_form(pipeline):
    ratio = formula(*pipeline) / simulated(*pipeline)
    assert 0.9 <= ratio <= 1.1


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_schedule_beats_its_busiest_process_or_its_longest_chain(schedule, data):
    _, works, m = data.draw(pipelines([schedule]))
    step = Step(schedule, m, tuple(works), (Wire(),) * (len(works) - 1))
    whole = [w.forward_s + w.backward_input_s + w.backward_weight_s for w in works]
    busiest = max(m * sum(w for s, w in enumerate(whole) if step.process(s) == p) for p in range(step.processes))
    chain = sum(w.forward_s for w in works) + sum(w.backward_input_s for w in works[1:])
    assert step.replay().step_s >= max(busiest, chain) * (1 - 1e-9)
