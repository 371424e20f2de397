"""`autopart simulate`: replay a step of a plan, and write it as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopart.cli.options import SETTINGS, Json, app
from autopart.cli.output import check_new, say, show, working


@app.command("simulate", no_args_is_help=True, context_settings=SETTINGS)
def simulate_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json, or a folder that partition --out wrote.")],
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace there, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a step of a plan, event by event, under the schedule that will really run."""
    check_new(trace)
    with working():
        from autopart.new_file import write_new
        from autopart.plan import Plan
        from autopart.simulator import simulate
        from autopart.simulator.trace import trace_json

        simulation = simulate(Plan.load(plan / "plan.json" if plan.is_dir() else plan))
        if trace is not None:
            write_new(trace, trace_json(simulation))
            say(f"Wrote {trace}. Open it in ui.perfetto.dev or chrome://tracing.")
    show(simulation.to_json() if as_json else str(simulation))
