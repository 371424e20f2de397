"""`autopart partition`: plan the split of a model, and write the package that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autopart.cli.models import load_model, with_values
from autopart.cli.options import (
    SETTINGS,
    Dtype,
    GlobalBatch,
    Gpus,
    Granularity,
    Json,
    Measured,
    Microbatches,
    Mode,
    Model,
    Optimizer,
    Recompute,
    Schedule,
    Stages,
    Tensor,
    Threshold,
    TimeLimit,
    app,
    number_or_auto,
)
from autopart.cli.output import say, show, working


@app.command("partition", no_args_is_help=True, context_settings=SETTINGS)
def partition_command(
    model: Model,
    gpus: Gpus,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the package there.")] = None,
    as_json: Json = False,
    stages: Stages = "auto",
    tensor: Tensor = "auto",
    schedule: Schedule = "auto",
    microbatches: Microbatches = "auto",
    global_batch: GlobalBatch = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = None,
    recompute: Recompute = "auto",
    granularity: Granularity = "auto",
    threshold: Threshold = 0.01,
    time_limit: TimeLimit = 30.0,
    mode: Mode = "training",
    measured: Measured = None,
) -> None:
    """Plan the split of a model, and write the package that runs it."""
    with working():
        from autopart.api import partition
        from autopart.cluster import Cluster
        from autopart.report.plan import format_plan

        stage_count = number_or_auto("--stages", stages)
        tensor_count = number_or_auto("--tensor", tensor)
        microbatch_count = number_or_auto("--microbatches", microbatches)
        cluster = Cluster.parse(gpus)
        loaded = load_model(model)
        say(f"Planning for {cluster}: at most {time_limit:g} s in the solver.")
        options: dict[str, Any] = {
            "mode": mode,
            "stages": stage_count,
            "tensor": tensor_count,
            "schedule": schedule,
            "microbatches": microbatch_count,
            "global_batch": global_batch,
            "optimizer": optimizer,
            "dtype": dtype,
            "recompute": recompute,
            "granularity": granularity,
            "threshold": threshold,
            "time_limit_s": time_limit,
            "name": model,
            "profile": measured,
        }
        plan = partition(loaded.model, cluster, example_inputs=loaded.args, example_kwargs=loaded.kwargs, **options)
        if out is not None and (real := with_values(loaded, plan)) is not None:
            plan = partition(real.model, cluster, example_inputs=real.args, example_kwargs=real.kwargs, **options)
        if out is not None:
            plan.emit(out)
            say(f"Wrote {out}. Run it: torchrun --nproc-per-node {len(_processes(plan))} {out / 'train.py'}")
    show(plan.plan.to_json().rstrip() if as_json else format_plan(plan))


def _processes(plan: Any) -> set[int]:
    return {device for stage in plan.per_stage for device in stage.devices}
