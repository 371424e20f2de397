"""`autopart zoo`: the models that autopart is measured on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autopart.cli.options import (
    SETTINGS,
    Dtype,
    Gpus,
    Granularity,
    Json,
    Schedule,
    Stages,
    Tensor,
    TimeLimit,
    app,
    number_or_auto,
)
from autopart.cli.output import say, show, working, write

zoo_app = typer.Typer(
    help="The zoo: models that autopart is measured on.", no_args_is_help=True, context_settings=SETTINGS
)
app.add_typer(zoo_app, name="zoo")


@zoo_app.command("list", context_settings=SETTINGS)
def zoo_list_command(
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="Part of a name, a pattern, or core.")] = None,
    as_json: Json = False,
) -> None:
    """The models of the zoo and their specs."""
    from autopart.report.zoo import format_entries
    from autopart.zoo import selected

    chosen = selected(only)
    show(json.dumps([dataclasses.asdict(entry) for entry in chosen], indent=1) if as_json else format_entries(chosen))


@zoo_app.command("run", no_args_is_help=True, context_settings=SETTINGS)
def zoo_run_command(
    gpus: Gpus,
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="Part of a name, a pattern, or core.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the rows there.")] = None,
    small: Annotated[bool, typer.Option("--small", help="The small variants.")] = False,
    stages: Stages = "auto",
    tensor: Tensor = "auto",
    schedule: Schedule = "auto",
    dtype: Dtype = None,
    granularity: Granularity = "auto",
    time_limit: TimeLimit = 30.0,
) -> None:
    """Plan every model of the zoo: one row each. Ends with the status of the first that has no plan."""
    rows = []
    with working():
        from autopart.cluster import Cluster
        from autopart.report.zoo import format_rows
        from autopart.zoo import selected
        from autopart.zoo_run import as_data, run

        cluster, chosen = Cluster.parse(gpus), selected(only)
        options: dict[str, Any] = {"schedule": schedule, "dtype": dtype}
        options |= {"stages": number_or_auto("--stages", stages), "tensor": number_or_auto("--tensor", tensor)}
        planned = run(chosen, cluster, small=small, granularity=granularity, time_limit_s=time_limit, **options)
    try:
        with working():
            for row in planned:
                rows.append(row)
                say(f"{len(rows):3}/{len(chosen)} {row.name}: {row.error or 'planned'}")
                if json_file is not None:
                    write(json_file, json.dumps(as_data(rows, cluster), indent=1) + "\n")
    finally:  # an interrupted run shows what it has
        show(format_rows(rows))
    raise typer.Exit(next((row.exit_status for row in rows if row.error is not None), 0))
