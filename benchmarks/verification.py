"""Does every package compute what its model computes? `autopart verify` on the core of the zoo, one row for each run.

Small variants of the zoo's core models are planned, emitted and verified on real processes, in float64: at 2 and 4
processes under GPipe and 1F1B, and those with long skips or ties also under the schedules that put two stages on a
process. Models of transformers return their own loss; two image models are trained on a loss outside of the model too.

    python -m benchmarks.verification [--only PATTERN] [--json FILE]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from autopart import partition
from autopart.errors import AutopartError
from autopart.model_spec import load
from autopart.runtime.schedules import SCHEDULES
from autopart.verification import verify
from autopart.verification.report import KINDS
from autopart.zoo import selected
from benchmarks.output import differences, parser, show

EVERY_SCHEDULE = ("unet", "t5-small", "gpt2")
TWO_STAGES_A_PROCESS = ("interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev")
LOSS_OUTSIDE = ("resnet50", "vit-b16")


def class_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss outside of the model."""
    return functional.cross_entropy(output, target)


def runs(pattern: str) -> Iterator[tuple[str, str, int, str, Callable[..., Any] | None]]:
    """(name, spec, processes, schedule, loss function) of every run."""
    for entry in selected(pattern):
        for processes in (2, 4):
            for schedule in ("gpipe", "1f1b"):
                yield entry.name, entry.small, processes, schedule, None
        if entry.name in EVERY_SCHEDULE:
            for schedule in TWO_STAGES_A_PROCESS:
                yield entry.name, entry.small, 2, schedule, None
        if entry.name in LOSS_OUTSIDE:
            yield entry.name, entry.small, 2, "1f1b", class_loss


def run(spec: str, processes: int, schedule: str, loss_fn: Callable[..., Any] | None) -> dict[str, Any]:
    """Plan, emit and verify once."""
    start = time.perf_counter()
    loaded = load(spec, meta=False)
    target = None if loss_fn is None else torch.randint(10, (8,), generator=torch.Generator().manual_seed(0))
    try:
        plan = partition(
            loaded.model,
            ["CPU"] * processes,
            example_inputs=loaded.args,
            example_kwargs=loaded.kwargs,
            loss_fn=loss_fn,
            target=target,
            stages=processes * SCHEDULES[schedule].stages_per_process,
            schedule=schedule,
            dtype=torch.float64,
        )
        report = verify(plan, loaded.model.double(), loaded.args, loaded.kwargs, target=target, loss_fn=loss_fn)
    except AutopartError as error:
        return {"passed": False, "reason": f"{type(error).__name__}: {error.message}"}
    errors = report.worst_relative_error
    return {
        "passed": report.passed,
        "stages": plan.strategy.stages,
        **{kind: errors[kind] for kind in errors},
        "parameters": report.parameters,
        "seconds": time.perf_counter() - start,
        "reason": differences(report),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="core", metavar="PATTERN", help="names of models; default: the core ones")
    arguments = options.parse_args()
    rows = []
    for name, spec, processes, schedule, loss_fn in runs(arguments.only):
        result = run(spec, processes, schedule, loss_fn)
        loss = "model" if loss_fn is None else loss_fn.__name__
        rows.append({"model": name, "processes": processes, "schedule": schedule, "trained on": loss, **result})
        print(f"{name} x{processes} {schedule}: {'passed' if result['passed'] else 'FAILED'}", flush=True)
    worst = [row[kind] for row in rows for kind in KINDS if row.get(kind) is not None]
    summary = {
        "passed": f"{sum(row['passed'] for row in rows)} of {len(rows)}",
        "worst relative error": max(worst, default=math.nan),
    }
    show(rows, arguments.json, summary)


if __name__ == "__main__":
    main()
