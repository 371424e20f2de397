"""The simulator beside published bubbles and beside pipelines whose stages sleep for known times.

    python -m benchmarks.schedule_simulation --sleeping
    python -m benchmarks.schedule_simulation --published FOLDER/strategies.json

- `--published`: the zero-bubble paper (Qi et al., ICLR 2024) gives T_F, T_B, T_W and T_comm of twelve settings, and the
  bubble rates of its own simulator. Bubble = (cost - m (T_F + T_B + T_W)) / cost; cost is the longest span of a stage
  from its first forward to its last weight gradient; messages take T_comm and hold nothing up.
- `--sleeping`: two processes run every schedule of torch over gloo, with stages alike and not, and messages of 0.25, 8
  and 32 MB. The link is measured beside each run: latency from an empty message, bandwidth from one of the same size.
  Only the ratio counts, as the median over rounds; the first step of each run is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autopart.runtime.schedules import SCHEDULES
from autopart.simulator.network import Wire
from autopart.simulator.step import StageWork, Step
from benchmarks import output
from benchmarks.published_bubbles import published_bubbles
from benchmarks.sleeping_stages import Sleep, exchange, run
from tests.pool import Pool

SLEEP_S, MICROBATCHES = 0.06, 6
PAYLOADS = {"0.25 MB": 2**18, "8 MB": 2**23, "32 MB": 2**25}
# Work of the first and of the last stage beside the mean; the others lie between.
SHAPES = {"alike": (1.0, 1.0), "rising": (0.5, 1.5), "falling": (1.5, 0.5)}
IDLE_LOAD = 0.5


def sleeping(rounds: int, schedules: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measured and simulated steps: rows, and a summary."""
    pool = Pool()
    measured: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {}
    links: dict[str, list[tuple[float, float, float]]] = {name: [] for name in PAYLOADS}
    try:
        for _ in range(rounds):
            for size, payload in PAYLOADS.items():
                for schedule in schedules:
                    for shape in SHAPES:
                        links[size].append(link := _link(pool, payload))
                        key = (schedule, shape, size)
                        measured.setdefault(key, []).append(_steps(pool, schedule, shape, payload, link))
    finally:
        pool.close()
    rows = [
        {
            "schedule": schedule,
            "stages": shape,
            "message": size,
            "measured ms": 1e3 * median(m for m, _, _ in results),
            "simulated ms": 1e3 * median(s for _, s, _ in results),
            "simulated / measured": median(s / m for m, s, _ in results),
            "without messages": median(free / m for m, _, free in results),
        }
        for (schedule, shape, size), results in measured.items()
    ]
    summary: dict[str, Any] = {}
    for size, found in links.items():
        errors = [abs(row["simulated / measured"] - 1) for row in rows if row["message"] == size]
        latency, one, both = (1e3 * median(column) for column in zip(*found, strict=True))
        summary[f"{size}: error"] = f"median {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %"
        summary[f"{size}: link"] = f"empty {latency:.2f} ms, one way {one:.2f} ms, both ways at once {both:.2f} ms"
    return rows, summary


def _link(pool: Pool, payload: int) -> tuple[float, float, float]:
    """Seconds of an empty message, of one of `payload` bytes, and of one each way at once."""
    empty, full = (
        [tuple(max(ends) for ends in zip(*pair, strict=True)) for pair in zip(*results, strict=True)]
        for results in (pool.run(2, exchange, size, 9, SLEEP_S / 4) for size in (4, payload))
    )
    latency = median(one for one, _ in empty)
    return latency, max(latency, median(one for one, _ in full)), median(both for _, both in full)


def _steps(
    pool: Pool, schedule: str, shape: str, payload: int, link: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Seconds of a step: measured, simulated, and simulated with messages that take no time."""
    count = 2 * SCHEDULES[schedule].stages_per_process
    first, last = SHAPES[shape]
    shares = [first + (last - first) * s / (count - 1) for s in range(count)]
    sleeps = [Sleep(*[SLEEP_S * share] * 3) for share in shares]
    results = pool.run(2, run, schedule, sleeps, payload, MICROBATCHES, 3)
    measured = median(max(step) for step in list(zip(*results, strict=True))[1:])
    latency, one, _ = link
    wire = Wire(latency, payload / (one - latency) if one > latency else float("inf"))
    simulated, free = (
        Step(
            schedule,
            MICROBATCHES,
            tuple(
                StageWork(s.forward_s, s.backward_input_s, s.backward_weight_s, (payload,), (payload,)) for s in sleeps
            ),
            (between,) * (count - 1),
            by_host=True,
        )
        .replay()
        .step_s
        for between in (wire, Wire())
    )
    return measured, simulated, free


def main() -> None:
    options = output.parser(__doc__)
    options.add_argument("--published", type=Path, metavar="FILE", help="JSON with the paper's table")
    options.add_argument("--sleeping", action="store_true", help="run real processes")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    arguments = options.parse_args()
    if arguments.published:
        rows, summary = published_bubbles(arguments.published)
        output.show(rows, arguments.json, summary)
    if arguments.sleeping:
        load = os.getloadavg()[0]
        rows, summary = sleeping(arguments.rounds, arguments.schedules)
        idle = "idle" if load < IDLE_LOAD else "NOT idle: messages were slowed by other work"
        output.show(rows, arguments.json, {**summary, "machine at the start": f"load {load:.1f}, {idle}"})


if __name__ == "__main__":
    main()
