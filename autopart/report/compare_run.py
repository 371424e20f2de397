"""A comparison as text: figures by stage and process, then the operators that explain most of the difference."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopart.comparison import Comparison, Figure
from autopart.corrections import OperatorFigure
from autopart.records import Record
from autopart.text import MISSING, counted, gibibytes, milliseconds, printable, table

SHOWN = 6
"""Operators of a stage."""


def format_comparison(comparison: Comparison, record: Record) -> str:
    """Everything a person wants to know of it, as lines of text."""
    parts = [_heading(record), _figures(comparison.figures)]
    for stage in sorted({figure.stage for figure in comparison.operators}):
        parts.append(_operators(stage, [figure for figure in comparison.operators if figure.stage == stage]))
    if comparison.notes:
        parts.append("Notes\n" + "\n".join(f"- {printable(note)}" for note in comparison.notes))
    return "\n\n".join(parts)


def comparison_as_data(comparison: Comparison) -> dict[str, Any]:
    """The same as one JSON document, with every operator."""
    return {
        "schema": "autopart-comparison/1",
        "figures": [{**asdict(figure), "ratio": figure.ratio} for figure in comparison.figures],
        "operators": [{**asdict(figure), "difference_s": figure.difference_s} for figure in comparison.operators],
        "notes": list(comparison.notes),
    }


def _heading(record: Record) -> str:
    strategy = record.plan.strategy
    devices = ", ".join(dict.fromkeys(process.device for process in record.processes))
    threads = sorted({process.threads for process in record.processes if process.kind == "cpu"})
    count = len(record.processes)
    how = "one process" if count == 1 else f"{count} processes"
    return printable(
        f"{record.plan.model}: {counted(strategy.stages, 'stage')}, {record.schedule or 'all in one place'}, "
        f"{counted(record.microbatches, 'microbatch')} of {counted(strategy.microbatch_size, 'row')} "
        f"in {record.dtype}, {record.optimizer}; "
        f"{how} on {devices}"
        + (f" ({counted(threads[0], 'thread')} each)" if len(threads) == 1 else "")
        + f", torch {record.torch}; {counted(len(record.step_s), 'step')} measured"
    )


def _figures(figures: tuple[Figure, ...]) -> str:
    rows = []
    for figure in figures:
        shown = gibibytes if figure.what == "memory" else milliseconds
        unit = "GiB" if figure.what == "memory" else "ms"
        spread = MISSING if figure.spread is None else f"{figure.spread * 100:.0f} %"
        rows.append(
            [
                figure.where,
                f"{figure.what}, {unit}",
                "microbatch" if figure.what in ("forward", "backward") else "step",
                shown(figure.predicted),
                shown(figure.measured),
                MISSING if figure.ratio is None else f"{figure.ratio:.2f}",
                spread,
            ]
        )
    return table(rows, ["", "", "of one", "predicted", "measured", "ratio", "spread"], (0, 1, 2))


def _operators(stage: int, figures: list[OperatorFigure]) -> str:
    """Those that are furthest off; shares are of all differences in the stage, whichever way they go."""
    whole = sum(abs(figure.difference_s) for figure in figures)
    rows = [
        [
            figure.name,
            milliseconds(figure.predicted_s),
            milliseconds(figure.measured_s),
            ("+" if figure.difference_s >= 0 else "") + milliseconds(figure.difference_s),
            f"{abs(figure.difference_s) / whole * 100:.0f} %" if whole else MISSING,
        ]
        for figure in figures[:SHOWN]
    ]
    return table(rows, [f"stage {stage}, ms of one microbatch", "predicted", "measured", "difference", "share"])
