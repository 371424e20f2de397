"""How every benchmark shows its rows: a table on stdout, and the same rows in a JSON file."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from autopart.verification import VerifyReport


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    return options


def show(rows: Sequence[Mapping[str, Any]], json_file: Path | None, summary: Mapping[str, Any] | None = None) -> None:
    """Print `rows` as a table, then `summary` as lines, and write both to `json_file` if it is given."""
    print(tabulate(rows, headers="keys", floatfmt=".4g"))
    for name, value in (summary or {}).items():
        print(f"{name}: {value}")
    if json_file is not None:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        document = {"machine": machine, "summary": dict(summary or {}), "rows": list(rows)}
        json_file.write_text(json.dumps(document, indent=1, default=str) + "\n")


def differences(report: VerifyReport, tolerance: float | None = None) -> str:
    """What a verification found to differ, in a sentence; empty where nothing does."""
    limit = report.tolerance if tolerance is None else tolerance
    numbers = [
        f"{kind} {error:.1e} ({report.worst_name[kind]})"
        for kind, error in report.worst_relative_error.items()
        if error is not None and not error <= limit
    ]
    return "; ".join([*report.failures[:2], *numbers])
