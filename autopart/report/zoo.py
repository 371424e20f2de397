"""The zoo as text: its list, and the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopart.text import MISSING, count, gibibytes, milliseconds, percent, table
from autopart.zoo import Entry, Row

_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: row.name,
    "nodes": lambda row: str(row.nodes),
    "parameters": lambda row: count(row.parameters or 0),
    "trace s": lambda row: f"{row.seconds['trace']:.1f}",
    "profile s": lambda row: f"{row.seconds['profile']:.1f}",
    "solve s": lambda row: f"{row.seconds['solve']:.1f}",
    "stages": lambda row: str(row.stages),
    "tensor": lambda row: str(row.tensor),
    "step ms": lambda row: milliseconds(row.step_time_s),
    "bound ms": lambda row: milliseconds(row.lower_bound_s),
    "gap": lambda row: percent(row.gap or 0),
    "balance": lambda row: f"{row.balance:.3f}",
    "GiB per GPU": lambda row: _range(row.memory_bytes),
    "cuts": lambda row: row.granularity or "",
}


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as a table, failures below it with their reasons."""
    good = [[column(row) for column in _COLUMNS.values()] for row in rows if row.error is None]
    bad = [(row.name, row.exit_status, row.error) for row in rows if row.error is not None]
    parts = [table(good, list(_COLUMNS), (0, len(_COLUMNS) - 1))] if good else []
    if bad:
        parts.append(table(bad, ["not planned", "status", "reason"], (0, 2)))
    return "\n\n".join(parts)


def format_entries(chosen: Sequence[Entry]) -> str:
    """The list itself."""
    return table(
        [(entry.name, "core" if entry.core else "", entry.spec) for entry in chosen], ["name", "", "spec"], (0, 1, 2)
    )


def _range(memory: tuple[int, ...]) -> str:
    if not memory:
        return MISSING
    low, high = gibibytes(min(memory)), gibibytes(max(memory))
    return low if low == high else f"{low}..{high}"
