"""What a solve is asked for: its options, and its number of stages, refused in words where they cannot be."""

from __future__ import annotations

from autopart.cluster import Cluster
from autopart.errors import UsageError
from autopart.runtime.schedules import SCHEDULES
from autopart.text import counted
from autopart.workload import OPTIMIZER_STATES, Workload

GRANULARITIES = ("auto", "block", "operator")


def check_options(
    granularity: str, threshold: float, tolerance: float, time_limit_s: float, workload: Workload
) -> None:
    """Refuse options that are wrong, by name (UsageError)."""
    if granularity not in GRANULARITIES:
        raise UsageError(f"granularity must be one of {', '.join(GRANULARITIES)}; not {granularity!r}")
    if not 0 <= threshold < 1 or not 0 <= tolerance < 1:
        raise UsageError(f"threshold and tolerance are shares between 0 and 1, not {threshold!r} and {tolerance!r}")
    if not time_limit_s > 0:
        raise UsageError(f"time_limit_s must be more than 0, not {time_limit_s!r}")
    if workload.schedule not in SCHEDULES:
        raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}; not {workload.schedule!r}")
    if workload.optimizer not in OPTIMIZER_STATES:
        raise UsageError(f"optimizer must be one of {', '.join(OPTIMIZER_STATES)}; not {workload.optimizer!r}")


def stage_count(cluster: Cluster, workload: Workload, stages: int | str) -> int:
    """The number of stages asked for; of "auto", the most that the devices have places for and microbatches fill.

    Raises:
        UsageError: So many stages cannot be.
    """
    per_process = SCHEDULES[workload.schedule].stages_per_process
    places = len(cluster.devices) * per_process
    # torch's 1F1B fills the pipeline with a microbatch for each stage before anything flows back.
    filled = workload.schedule != "1f1b" or workload.mode == "inference" or workload.microbatches >= places
    if stages == "auto":
        return places if filled else workload.microbatches
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise UsageError(f'stages must be a positive number or "auto", not {stages!r}')
    if stages > places:
        raise UsageError(
            f"{stages} stages need {-(-stages // per_process)} devices, and the cluster has {len(cluster.devices)}",
            f"Ask for at most {counted(places, 'stage')} with this schedule, or name more devices.",
        )
    if not filled and stages > workload.microbatches:
        raise UsageError(
            f"schedule 1f1b needs a microbatch for each of {stages} stages, not {workload.microbatches} in all",
            "Ask for more microbatches or fewer stages, or for schedule gpipe.",
        )
    if stages % per_process:
        raise UsageError(
            f"the schedule {workload.schedule!r} puts {per_process} stages on each process; {stages} is not a multiple"
        )
    return stages
