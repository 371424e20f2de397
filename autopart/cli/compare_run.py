"""`autopart compare-run`: what a plan predicted beside what its package measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopart.cli.options import SETTINGS, Json, app
from autopart.cli.output import show, working


@app.command("compare-run", no_args_is_help=True, context_settings=SETTINGS)
def compare_run_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json, or a folder that partition --out wrote.")],
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="What train.py --record wrote.")],
    as_json: Json = False,
) -> None:
    """Show what a plan predicted beside what its package measured, by stage, and which operators are off."""
    with working():
        from autopart.comparison import compare
        from autopart.plan import Plan
        from autopart.records import Record
        from autopart.report.compare_run import comparison_as_data, format_comparison

        recorded = Record.load(record)
        comparison = compare(Plan.load(plan / "plan.json" if plan.is_dir() else plan), recorded)
    show(json.dumps(comparison_as_data(comparison), indent=1) if as_json else format_comparison(comparison, recorded))
