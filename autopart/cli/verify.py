"""`autopart verify`: run a package on local processes beside the original model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopart.cli.models import has_rows, original
from autopart.cli.options import SETTINGS, Json, app
from autopart.cli.output import say, show, working
from autopart.errors import VerificationError


@app.command("verify", no_args_is_help=True, context_settings=SETTINGS)
def verify_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that partition --out wrote.")],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Default: the model named in its plan.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="1 runs all stages in one process.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Another schedule than the plan's.")] = None,
    as_json: Json = False,
) -> None:
    """Run a package on local processes and compare it with the original model."""
    with working():
        from autopart.plan import Plan
        from autopart.verification import verify

        plan = Plan.load(directory / "plan.json")
        loaded = original(plan, model)
        say(f"Running {directory} beside the original model.")
        inputs = (loaded.args, loaded.kwargs) if has_rows(loaded, plan) else ((), {})
        report = verify(directory, loaded.model, *inputs, processes=processes, schedule=schedule)
    show(report.to_json() if as_json else str(report))
    if not report.passed:
        raise typer.Exit(VerificationError.exit_status)
