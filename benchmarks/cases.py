"""Hard small models from a folder: which of them `verify` passes, and why each other does not.

Every file of the folder has `make() -> (model, args, kwargs)`. Each model is planned for 2 and for 3 processes,
emitted, and verified in training and evaluation on real processes, in its own dtype or in that of `--dtype`. With
`--tensor T` it is planned for T and for 2 T processes, T to a stage, as if devices and links took no time to start: on
those of this machine models so small are best not split.

    python -m benchmarks.cases FOLDER [--processes 2 3] [--tensor 2] [--schedule 1f1b] [--dtype float64] [--json FILE]
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
from autopart.plan import Plan
from autopart.verification import verify
from autopart.verification.check import Launch
from benchmarks.output import differences, parser, show
from benchmarks.processes import Processes, swift_cluster


def run(
    file: Path, processes: int, tensor: int, schedule: str, dtype: torch.dtype | None, launch: Launch
) -> dict[str, Any]:
    """Plan, emit and verify one case."""
    start = time.perf_counter()
    try:
        loaded = load(f"{file}:make", meta=False)
        plan = partition(
            loaded.model,
            ["CPU"] * processes if tensor == 1 else swift_cluster(processes),
            example_inputs=loaded.args,
            example_kwargs=loaded.kwargs,
            stages=processes // tensor,
            tensor=tensor,
            schedule=schedule,
            dtype=dtype,
            name=file.stem,
        )
        report = verify(plan, copy.deepcopy(loaded.model), loaded.args, loaded.kwargs, launch=launch)
    except AutopartError as error:
        return {"outcome": "refused", "reason": f"{type(error).__name__}: {error.message}"}
    worst = max((e for e in report.worst_relative_error.values() if e is not None), default=None)
    return {
        "outcome": "passed" if report.passed else "FAILED",
        "stages": plan.strategy.stages,
        "cuts": plan.granularity,
        "split": _split(plan),
        "worst error": worst,
        "seconds": time.perf_counter() - start,
        "reason": differences(report),
    }


def _split(plan: Plan) -> str | None:
    """How much of the model is split: tensors that it holds, and operations."""
    if plan.layouts is None:
        return None
    whole = sum(strategy.startswith("replicated") for strategy in plan.layouts.strategies.values())
    return f"{len(plan.layouts.state)} tensors, {len(plan.layouts.strategies) - whole} operations"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--processes", type=int, nargs="+", help="default: 2 and 3; with --tensor T, T and 2 T")
    options.add_argument("--tensor", type=int, default=1, metavar="T")
    options.add_argument("--schedule", default="auto")
    options.add_argument("--dtype", type=lambda name: getattr(torch, name), default=None)
    options.add_argument("--only", default="*", metavar="PATTERN")
    arguments = options.parse_args()
    t = arguments.tensor
    rows = []
    with Processes() as processes:
        for file in sorted(arguments.folder.glob("*.py")):
            if not fnmatch(file.stem, arguments.only):
                continue
            for count in arguments.processes or ([2, 3] if t == 1 else [t, 2 * t]):
                result = run(file, count, t, arguments.schedule, arguments.dtype, processes.launch)
                rows.append({"case": file.stem, "processes": count, **result})
                print(f"{file.stem} x{count}: {result['outcome']} {result['reason']}", flush=True)
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
