"""Hard small models from a folder: which of them `verify` passes, and why each other does not.

Every file of the folder has `make() -> (model, args, kwargs)`. Each model is planned for 2 and for 3
processes, emitted, and verified in training and evaluation on real processes, in its own dtype or in that of `--dtype`.

    python -m benchmarks.cases FOLDER [--processes 2 3] [--schedule 1f1b] [--dtype float64] [--json FILE]
"""

from __future__ import annotations

import copy
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from autopart import partition
from autopart.errors import AutopartError
from autopart.model_spec import load
from autopart.verification import verify
from benchmarks.output import parser, show


def run(file: Path, processes: int, schedule: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """Plan, emit and verify one case."""
    start = time.perf_counter()
    try:
        loaded = load(f"{file}:make", meta=False)
        plan = partition(
            loaded.model,
            ["CPU"] * processes,
            example_inputs=loaded.args,
            example_kwargs=loaded.kwargs,
            stages=processes,
            schedule=schedule,
            dtype=dtype,
            name=file.stem,
        )
        original = copy.deepcopy(loaded.model) if dtype is None else copy.deepcopy(loaded.model).to(dtype)
        report = verify(plan, original, loaded.args, loaded.kwargs)
    except AutopartError as error:
        return {"outcome": "refused", "reason": f"{type(error).__name__}: {error.message}"}
    worst = max((e for e in report.worst_relative_error.values() if e is not None), default=None)
    return {
        "outcome": "passed" if report.passed else "FAILED",
        "stages": plan.strategy.stages,
        "cuts": plan.granularity,
        "worst error": worst,
        "seconds": time.perf_counter() - start,
        "reason": "; ".join(report.failures),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    options.add_argument("--schedule", default="auto")
    options.add_argument("--dtype", type=lambda name: getattr(torch, name), default=None)
    options.add_argument("--only", default="*", metavar="PATTERN")
    arguments = options.parse_args()
    rows = []
    for file in sorted(arguments.folder.glob("*.py")):
        if not fnmatch(file.stem, arguments.only):
            continue
        for processes in arguments.processes:
            result = run(file, processes, arguments.schedule, arguments.dtype)
            rows.append({"case": file.stem, "processes": processes, **result})
            print(f"{file.stem} x{processes}: {result['outcome']} {result['reason']}", flush=True)
    cases = {row["case"] for row in rows}
    good = {case for case in cases if all(row["outcome"] == "passed" for row in rows if row["case"] == case)}
    summary = {
        "passed at every number of processes": f"{len(good)} of {len(cases)}",
        "refused": sum(row["outcome"] == "refused" for row in rows),
        "failed": sum(row["outcome"] == "FAILED" for row in rows),
    }
    show(rows, arguments.json, summary)


if __name__ == "__main__":
    main()
