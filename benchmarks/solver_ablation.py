"""What is each part of the solver's driver worth? Seconds to a proven gap of 0.1 %, with one part left out at a time.

    python -m benchmarks.solver_ablation --instances FOLDER [--time-limit S] [--json FILE]

A row for each problem, a column for each part (`solver.search`): seconds, or the gap that was left at the time limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopart.solver.problem import Problem
from autopart.solver.search import DEEP, FIRST, NARROWINGS, search
from benchmarks import wide_graphs
from benchmarks.instances import SUM_LOAD, max_load, read, sum_load
from benchmarks.output import parser, show
from benchmarks.solver_scaling import deep, memory_bytes

TOLERANCE = 1e-3
# Inputs of each kind: file pattern and devices.
PLACEMENTS = (("msr_layergraphs_inceptionv3_training*", 8), ("msr_operatorgraphs_bert_l-6_training*", 6))
PROFILES = (("pipedream_densenet121*", 8), ("pipedream_nasnetalarge*", 8))
GENERATED = (("hrnet", 4, 0, 8), ("experts", 4, 0, 8), ("unet", 4, 0, 8))


def problems(folder: Path) -> Iterator[tuple[str, Problem]]:
    for pattern, k in PLACEMENTS:
        for instance in read(folder, f"{pattern}.json"):
            yield f"{instance.name}, {k}", max_load(instance, k)[0][0]
    for pattern, k in PROFILES:
        for instance in read(folder, f"{pattern}.json"):
            known = next(entry for entry in instance.known if entry.rule == SUM_LOAD)
            assert known.bandwidth_bytes_per_s is not None
            yield f"{instance.name}, {k}", sum_load(instance, k, known.bandwidth_bytes_per_s)[0]
    for family, size, seed, k in GENERATED:
        yield f"{family} {size}, {k}", wide_graphs.as_problem(wide_graphs.FAMILIES[family](size, seed), k)
    graph = deep(64, 1)
    yield "64 equal blocks, 8", wide_graphs.as_problem(graph, 8, relayed=True, memory_bytes=memory_bytes(graph, 8))


def row(name: str, problem: Problem, time_limit_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": name, "operators": problem.items}
    for part in ("", *FIRST, *NARROWINGS, *DEEP):
        start = time.perf_counter()
        answer = search(problem, TOLERANCE, time_limit_s, without={part})
        seconds = time.perf_counter() - start
        gap = (answer.value - answer.bound) / answer.value
        found[part or "all parts"] = round(seconds, 1) if gap <= TOLERANCE else f"{gap:.2%}"
    return found


def main(options: argparse.Namespace) -> None:
    rows = []
    for name, problem in problems(options.instances):
        rows.append(row(name, problem, options.time_limit))
        print(f"{name}: {rows[-1]['all parts']}", flush=True)
    closed = {
        part: sum(isinstance(r[part], float) for r in rows) for part in rows[0] if part not in ("problem", "operators")
    }
    show(rows, options.json, {"closed within the limit": closed})


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--instances", type=Path, required=True, help="folder of inputs in schema autopart-bench/1")
    arguments.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of each search (60 s)")
    main(arguments.parse_args())
