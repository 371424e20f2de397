"""Plan every model of the zoo for one cluster; a model that fails is a row with its reason."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from autopart.api import partition
from autopart.cluster import Cluster
from autopart.errors import AutopartError
from autopart.model_spec import load
from autopart.zoo import Entry, Row


def run(chosen: tuple[Entry, ...], cluster: Cluster, small: bool = False, **options: Any) -> Iterator[Row]:
    """One row for each entry, as it is done.

    Args:
        small: Plan the small variants.
        options: Further arguments of `partition`.
    """
    for entry in chosen:
        spec = entry.small if small else entry.spec
        try:
            yield _plan(entry.name, spec, cluster, options)
        except AutopartError as error:
            yield Row(entry.name, spec, error.message.split("\n")[0], type(error).exit_status)
        except Exception as error:  # one model's fault must not lose the others' rows
            yield Row(entry.name, spec, f"internal error: {type(error).__name__}: {str(error).split(chr(10))[0]}", 1)


def _plan(name: str, spec: str, cluster: Cluster, options: Mapping[str, Any]) -> Row:
    start = time.perf_counter()
    loaded = load(spec)
    built = time.perf_counter() - start
    plan = partition(
        loaded.model, cluster, example_inputs=loaded.args, example_kwargs=loaded.kwargs, name=spec, **options
    )
    return Row(
        name,
        spec,
        nodes=len(plan.assignment),
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        seconds={"build": built, **plan.seconds},
        stages=plan.strategy.stages,
        tensor=plan.strategy.tensor,
        devices_used=len({device for stage in plan.per_stage for device in stage.devices}),
        schedule=plan.strategy.schedule,
        microbatches=plan.strategy.microbatches,
        step_time_s=plan.step_time_s,
        lower_bound_s=plan.lower_bound_s,
        gap=plan.gap,
        status=plan.status,
        balance=plan.balance,
        granularity=plan.granularity,
        baselines={baseline.name: baseline.step_time_s if baseline.fits else None for baseline in plan.baselines},
        memory_bytes=tuple(stage.peak_memory_bytes for stage in plan.per_stage),
        notes=(*loaded.notes, *plan.notes),
    )


def as_data(rows: list[Row], cluster: Cluster) -> dict[str, Any]:
    """The rows as one JSON document."""
    return {"schema": "autopart-zoo/1", "cluster": cluster.to_data(), "models": [asdict(row) for row in rows]}
