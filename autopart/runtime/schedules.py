"""The pipeline schedules of `torch.distributed.pipelining`, as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleInfo:
    """One schedule.

    Attributes:
        torch_name: Its class in `torch.distributed.pipelining.schedules`.
        stages_per_process: 1, or 2 where each process holds two stages.
        placement: "loop" (stage s on process s mod P) or "v" (stage s on process s, then back down).
        splits_backward: Whether input and weight gradients are separate actions.
    """

    torch_name: str
    stages_per_process: int
    placement: str
    splits_backward: bool


SCHEDULES: dict[str, ScheduleInfo] = {
    "gpipe": ScheduleInfo("ScheduleGPipe", 1, "loop", False),
    "1f1b": ScheduleInfo("Schedule1F1B", 1, "loop", False),
    "interleaved1f1b": ScheduleInfo("ScheduleInterleaved1F1B", 2, "loop", False),
    "loopedbfs": ScheduleInfo("ScheduleLoopedBFS", 2, "loop", False),
    "interleavedzerobubble": ScheduleInfo("ScheduleInterleavedZeroBubble", 2, "loop", True),
    "zbv": ScheduleInfo("ScheduleZBVZeroBubble", 2, "v", True),
    "dualpipev": ScheduleInfo("ScheduleDualPipeV", 2, "v", True),
}


def processes_of_stages(schedule: str, stages: int) -> tuple[int, ...]:
    """The process of each stage; one stage has one, whatever the schedule."""
    return tuple(process_of_stage(s, stages, SCHEDULES[schedule]) for s in range(stages)) if stages > 1 else (0,)


def process_of_stage(stage: int, stages: int, info: ScheduleInfo) -> int:
    """The process that holds `stage` of `stages`, spread over `stages / info.stages_per_process` processes."""
    processes = stages // info.stages_per_process
    lap, place = divmod(stage, processes)
    return processes - 1 - place if info.placement == "v" and lap % 2 else place
