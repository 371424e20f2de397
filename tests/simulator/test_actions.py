"""The recorded programs are those that torch runs: complete, matched between processes, and in torch's own order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from autopart.runtime.schedules import SCHEDULES
from autopart.simulator.actions import Action, Message, Post, Wait, actions, programs

ONE_STAGE = [name for name, info in SCHEDULES.items() if info.stages_per_process == 1]


def test_gpipe_runs_every_forward_before_any_backward():
    assert actions("gpipe", 2, 2)[0] == (
        Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1),
    )  # fmt: skip


def test_1f1b_fuses_the_send_of_a_forward_with_the_receipt_of_a_gradient():
    forward, back = Message(0, 1, 1), Message(1, 0, 0)
    first, second = programs("1f1b", 2, 2)
    assert Post(2, (forward,), (back,)) in first
    assert Post(2, (back,), (forward,)) in second
    place = first.index(Post(2, (forward,), (back,)))
    assert first[place : place + 3] == (Post(2, (forward,), (back,)), Wait(2), Action(0, "B", 0))


def test_zero_bubble_schedules_split_the_backward():
    for name, info in SCHEDULES.items():
        kinds = {a.kind for mine in actions(name, 2 * info.stages_per_process, 4) for a in mine}
        assert ("W" in kinds) == info.splits_backward


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ONE_STAGE])
def test_two_stage_schedules_compute_in_the_order_of_torchs_table(name):
    """torch keeps the order that it executes; nothing of the recording is used to read it."""

    class Stage:
        def __init__(self, index):
            self.stage_index, self.num_stages, self.group_rank, self.group_size = index, 8, 0, 4
            self.submod, self.is_last = None, False

    torch_schedule = getattr(torch_schedules, SCHEDULES[name].torch_name)([Stage(0), Stage(4)], 8, loss_fn=len)
    for process, mine in enumerate(actions(name, 8, 8)):
        flat = [s for a in torch_schedule.pipeline_order_with_comms[process] for s in (a.sub_actions or (a,))]
        order = [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in flat]
        assert list(mine) == [a for a in order if a[1] in "FBIW"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(1, 3))
def test_every_microbatch_is_computed_once_and_every_message_has_two_ends(name, processes, rounds):
    stages, microbatches = processes * SCHEDULES[name].stages_per_process, 2 * processes * rounds
    computed = [a for mine in actions(name, stages, microbatches) for a in mine]
    assert len(set(computed)) == len(computed)
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = sorted(a.kind for a in computed if a.stage == stage and a.microbatch == microbatch)
            assert kinds in (["B", "F"], ["F", "I", "W"])
    posts = [i for program in programs(name, stages, microbatches) for i in program if isinstance(i, Post)]
    sent, received = ([m for p in posts for m in getattr(p, side)] for side in ("sends", "receives"))
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4))
def test_what_is_posted_is_waited_for(name, processes):
    for program in programs(name, processes * SCHEDULES[name].stages_per_process, 2 * processes):
        posted = {i.batch for i in program if isinstance(i, Post)}
        assert posted == {i.batch for i in program if isinstance(i, Wait)}


def test_stages_that_do_not_fill_the_processes_are_refused():
    with pytest.raises(ValueError, match="2 stages on each process, not 3"):
        programs("zbv", 3, 4)
