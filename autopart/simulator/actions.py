"""What every process of a schedule does in a step, in order: torch's own code, run on stages that only take notes.

`torch.distributed.pipelining` computes a schedule in Python: it asks its stages for the messages of a microbatch, posts
them in batches, waits for batches, and tells stages to compute. Here the same functions run on stages that record what
they are told, with the three functions that touch the process group replaced by ones that record too. So the program of
a process is the one it will run, and no order is derived a second time.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.pipelining import schedules as torch_schedules

from autopart.runtime.schedules import SCHEDULES, processes_of_stages

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A microbatch computed in a stage: forward (F), whole backward (B), input gradient (I) or weight gradient (W)."""

    stage: int
    kind: Kind
    microbatch: int


class Message(NamedTuple):
    """All tensors of one microbatch that a stage sends to a neighbour: values forward, or their gradients back."""

    source: int
    target: int
    microbatch: int


class Post(NamedTuple):
    """A batch of messages is handed to the process group; the process goes on."""

    batch: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Wait(NamedTuple):
    """The process goes on when every message of a batch has been transferred."""

    batch: int


Instruction = Action | Post | Wait
Program = tuple[Instruction, ...]


@cache
def programs(schedule: str, stages: int, microbatches: int) -> tuple[Program, ...]:
    """The instructions of one training step, for each process; of one stage, as it runs without a schedule.

    Args:
        schedule: A key of `autopart.runtime.schedules.SCHEDULES`.
        stages: Of the pipeline; a multiple of the stages that the schedule puts on a process.

    Raises:
        ValueError: The schedule cannot run so many stages or microbatches.
    """
    if stages == 1:
        kinds: tuple[Kind, ...] = ("F", "B")
        return (tuple(Action(0, kind, number) for number in range(microbatches) for kind in kinds),)
    info = SCHEDULES[schedule]
    processes, rest = divmod(stages, info.stages_per_process)
    if rest:
        raise ValueError(f"schedule {schedule} puts {info.stages_per_process} stages on each process, not {stages}")
    homes = processes_of_stages(schedule, stages)
    held = [[s for s in range(stages) if homes[s] == p] for p in range(processes)]
    notes = [_Notes() for _ in held]
    rows = [[_Stage(notes[p], s, stages, p, processes) for s in held[p]] for p in range(processes)]
    cls = getattr(torch_schedules, info.torch_name)
    first = rows[0][0] if info.stages_per_process == 1 else rows[0]
    runner = cls(first, microbatches, loss_fn=lambda *_: None, scale_grads=False)
    # Initialisation exchanges metadata and allocates buffers: none of it is part of a step.
    runner._initialize_stage = runner._initialize_stages = lambda *_, **__: None
    step = cls._step_microbatches
    arguments = [[()] * microbatches, [{}] * microbatches, [()] * microbatches, None, False]
    for process, row in enumerate(rows):
        # A schedule knows the order of every process, so one is built, and becomes each process in turn.
        runner._stage, runner._stages, runner.rank = row[0], row, process
        # There is no public way to run a schedule without a process group: its code gets these globals instead.
        world = {**vars(torch_schedules), **notes[process].communication()}
        types.FunctionType(step.__code__, world, argdefs=step.__defaults__)(runner, *arguments)
    return tuple(tuple(note.program) for note in notes)


def actions(schedule: str, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each process computes, in order; see `programs`."""
    return tuple(
        tuple(i for i in program if isinstance(i, Action)) for program in programs(schedule, stages, microbatches)
    )


class _Notes:
    """The program of a process as it is recorded."""

    def __init__(self) -> None:
        self.program: list[Instruction] = []
        self._batches = 0

    def communication(self) -> dict[str, Any]:
        """What stands in for the functions of torch's module that send, receive and wait."""
        return {
            "_batch_p2p": self._post,
            "_sorted_batch_p2p": lambda messages, desc=None: {0: self._post(messages)},
            "_wait_batch_p2p": self._wait,
        }

    def _post(self, messages: Sequence[tuple[str, Message]], desc: str | None = None) -> list[int]:
        if not messages:
            return []
        sends, receives = (tuple(m for role, m in messages if role == wanted) for wanted in ("send", "receive"))
        self._batches += 1
        self.program.append(Post(self._batches, sends, receives))
        return [self._batches]

    def _wait(self, batches: list[int]) -> None:
        self.program += [Wait(batch) for batch in batches]


class _Stage:
    """What a schedule needs of a stage, recorded instead of done."""

    has_backward = True

    def __init__(self, notes: _Notes, index: int, stages: int, process: int, processes: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = process, processes
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = torch.nn.Identity()
        self._notes = notes

    def _message(self, role: str, neighbour: int, microbatch: int) -> list[tuple[str, Message]]:
        if not 0 <= neighbour < self.num_stages:
            return []
        ends = (self.stage_index, neighbour) if role == "send" else (neighbour, self.stage_index)
        return [(role, Message(*ends, microbatch))]

    def get_fwd_recv_ops(self, microbatch: int) -> list[tuple[str, Message]]:
        return self._message("receive", self.stage_index - 1, microbatch)

    def get_fwd_send_ops(self, microbatch: int) -> list[tuple[str, Message]]:
        return self._message("send", self.stage_index + 1, microbatch)

    def get_bwd_recv_ops(self, microbatch: int) -> list[tuple[str, Message]]:
        return self._message("receive", self.stage_index + 1, microbatch)

    def get_bwd_send_ops(self, microbatch: int) -> list[tuple[str, Message]]:
        return self._message("send", self.stage_index - 1, microbatch)

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self._notes.program.append(Action(self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, loss: None, full_backward: bool = True, **_: object) -> None:
        self._notes.program.append(Action(self.stage_index, "B" if full_backward else "I", microbatch))

    def backward_weight_one_chunk(self, microbatch: int, **_: object) -> None:
        self._notes.program.append(Action(self.stage_index, "W", microbatch))

    def set_local_fwd_input(self, *_: object) -> None:
        """Neighbours on one process hand tensors over without a message."""

    def set_local_bwd_input(self, *_: object) -> None:
        """As `set_local_fwd_input`."""

    def get_local_bwd_output(self, microbatch: int) -> None:
        return None

    def perform_reduce_grad(self, factor: int) -> None:
        """Only for modules sharded by FSDP."""
