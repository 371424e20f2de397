"""Plans with round numbers, for simulations that can be worked out by hand."""

from autopart.cluster import Cluster, Device, Link
from autopart.plan import MicrobatchMemory, Plan, StageMemory, StagePlan, Strategy


def cluster_of(count, kind="cuda", latency_s=0.0, bandwidth=1e12):
    device = Device("fast", 2**40, {"float32": 1e12}, 1e12, "a test", kind)
    link = Link("wire", latency_s, bandwidth)
    return Cluster((device,) * count, (0,) * count, link, link)


MEMORY = StageMemory(
    parameters=50, buffers=10, gradients=10, optimizer_state=0, received=0, received_gradients=0, batch=40, update=50,
    microbatch=MicrobatchMemory(
        kept=30, sent=0, forward_peak=50, backward_peak=60, first_backward_peak=70, gradients=10, returned=0
    ),
)  # fmt: skip


def stage_of(device, **changes):
    figures = {
        "devices": (device,), "nodes": 1, "parameters": 0, "parameter_bytes": 0, "forward_s": 1.0, "backward_s": 2.0,
        "communication_s": 0.0, "peak_memory_bytes": 1000 + device, "memory_limit_bytes": 2000,
    }  # fmt: skip
    return StagePlan(**(figures | changes))


def plan_of(stages, schedule="1f1b", microbatches=4, mode="training", step_time_s=1.0, **cluster):
    devices = 1 + max(d for stage in stages for d in stage.devices)
    return Plan(
        model="test", mode=mode, strategy=Strategy(len(stages), 1, 1, 0, schedule, microbatches, 1), status="optimal",
        step_time_s=step_time_s, lower_bound_s=step_time_s, gap=0.0, stopped_by="proof", per_stage=tuple(stages),
        balance=1.0, baselines=(), assignment={}, signature="ab", granularity="block", optimizer="sgd",
        dtype="float32", cluster=cluster_of(devices, **cluster).to_data(),
    )  # fmt: skip
