"""Packages that record themselves: the hand-written one with a plan beside it, and what processes do with it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import split_jobs
import torch
from split_package import MICROBATCHES, ROWS, write

from autopart.cluster import Cluster
from autopart.plan import Layouts, Plan, StagePlan, Strategy
from autopart.runtime.schedules import SCHEDULES, process_of_stage
from autopart.verification.worker import imported

STEPS = 4


def make_plan(stages: int, tensor: int, schedule: str) -> Plan:
    """With predictions that are no more than numbers: whoever compares them only has to find them again."""
    info = SCHEDULES[schedule]
    places = [process_of_stage(s, stages, info) for s in range(stages)]
    per_stage = [
        StagePlan(
            devices=tuple(range(place * tensor, (place + 1) * tensor)),
            nodes=4,
            parameters=100,
            parameter_bytes=800,
            forward_s=0.001 * (s + 1),
            backward_s=0.002 * (s + 1),
            communication_s=0.0001,
            peak_memory_bytes=10_000 * (place + 1),
            memory_limit_bytes=1_000_000,
            update_s=0.0005,
        )
        for s, place in enumerate(places)
    ]
    return Plan(
        model="Written",
        mode="training",
        strategy=Strategy(stages, tensor, 1, 0, schedule, MICROBATCHES, ROWS),
        status="feasible",
        step_time_s=1.0,
        lower_bound_s=0.5,
        gap=1.0,
        stopped_by="time limit",
        per_stage=tuple(per_stage),
        balance=1.0,
        baselines=(),
        assignment={f"node{s}": s for s in range(stages)},
        signature="ab" * 32,
        granularity="block",
        optimizer="adamw",
        dtype="float64",
        cluster=Cluster.parse(f"{tensor * (max(places) + 1)}xCPU").to_data(),
        layouts=Layouts({}, {}, (), 0.5, 0.25, 0) if tensor > 1 else None,
    )


def write_planned(folder: Path, stages: int, tensor: int, schedule: str) -> Path:
    """A package with its plan; its folder."""
    write(folder, stages, tensor)
    (folder / "plan.json").write_text(make_plan(stages, tensor, schedule).to_json())
    return folder


def stage_bytes(folder: Path, stage: int) -> int:
    """Of the parameters of a stage, in the dtype of the run."""
    with imported(str(folder)) as module:
        torch.manual_seed(0)
        built = module.PIPELINE.stages[stage].module()
        return sum(p.numel() * 8 for p in built.parameters())


def killed_at_the_end(rank: int, folder: str, arguments: list[str]) -> None:
    """Process 1 dies when its figures are asked for."""
    with imported(folder) as module:
        runtime = importlib.import_module("runtime.train")
        if rank == 1:
            runtime.Recorder._figures = lambda self: os._exit(9)
        runtime.run(module.PIPELINE, runtime.parser(module.PIPELINE).parse_args(arguments), split_jobs.process(rank))
