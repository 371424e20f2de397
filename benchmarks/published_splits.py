"""Are the values that other planners of replicated stages reach reached here, under their own rules?

PipeDream's planner (SOSP 2019): stages with replicas, `pipedream_*` inputs, with and without replication, and with the
boundary sized as it does or by what really crosses. Piper's (NeurIPS 2021): stages with tensor and data degrees,
recomputation by node, and memory that depends on a stage's place, `piper_*` inputs. Recorded values are those of the
authors' own programs (or of an independent solver) in the files. Every plan is valued by `split_scorer`, from the plan
alone. PipeDream's dynamic programming is exact on these inputs, Piper's chooses options by a heuristic.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopart.solver.option_search import solve_options
from autopart.solver.replicas import solve_replicas
from benchmarks.output import parser, show
from benchmarks.split_inputs import ANTICHAIN, Nodes, pipedream, piper
from benchmarks.split_scorer import Stage, pipedream_seconds, piper_time

Row = dict[str, Any]

PIPEDREAM_OBJECTIVE = "pipedream_stage_time_s"
PIPER_OBJECTIVE = "piper_time_per_sample"


def rows_of(file: Path) -> Iterator[Row]:
    """A row for each recorded value of a file; none for files of other families."""
    instance = json.loads(file.read_text())
    nodes = Nodes.of(instance)
    for entry in [*instance["published"], *instance["reference"]]:
        if entry["objective"] == PIPEDREAM_OBJECTIVE:
            yield _pipedream_row(file.stem, instance, nodes, entry)
        elif entry["objective"].startswith(PIPER_OBJECTIVE):
            yield _piper_row(file.stem, instance, nodes, entry)


def _pipedream_row(name: str, instance: Mapping[str, Any], nodes: Nodes, entry: Mapping[str, Any]) -> Row:
    start = time.perf_counter()
    plan = solve_replicas(pipedream(nodes, entry))
    seconds = time.perf_counter() - start
    assert plan is not None, "memory is not limited"
    boundary = entry.get("boundary", ANTICHAIN)
    where = dict(zip(nodes.ids, plan.assignment, strict=True))
    stages = [Stage({v: 0 for v in nodes.ids if where[v] == s}, r) for s, r in enumerate(plan.replicas)]
    devices = entry["devices"]["accelerators"]
    ours = pipedream_seconds(instance, stages, devices, entry["bandwidth_Bps"], boundary == ANTICHAIN)
    rule = ("replicas" if entry["replication"] else "no replicas") + (", antichain" if boundary == ANTICHAIN else "")
    return _row(name, rule, entry, ours, plan.bound, len(stages), seconds)


def _piper_row(name: str, instance: Mapping[str, Any], nodes: Nodes, entry: Mapping[str, Any]) -> Row:
    start = time.perf_counter()
    plan = solve_options(piper(instance, nodes, entry))
    seconds = time.perf_counter() - start
    assert plan is not None, "a plan is recorded"
    stages = []
    for stage in plan.stages:
        places = {}
        for node, index in zip(stage.nodes, stage.option, strict=True):
            degrees = [option["tensor_degree"] for option in nodes.data[node]["options"]]
            places[nodes.ids[node]] = [i for i, t in enumerate(degrees) if t == stage.tensor][index]
        stages.append(Stage(places, stage.data, stage.tensor))
    ours = piper_time(instance, stages, entry)
    microbatches = entry.get("microbatches", instance["microbatches"])
    rule = f"{entry['mem_limit_bytes'] / 2**30:g} GiB, {microbatches} microbatches"
    return _row(name, rule, entry, ours, plan.bound, len(stages), seconds)


def _row(name: str, rule: str, entry: Mapping[str, Any], ours: float, bound: float, stages: int, seconds: float) -> Row:
    return {
        "input": name,
        "devices": entry["devices"]["accelerators"],
        "rule": rule,
        "recorded": entry["value"],
        "ours": ours,
        "ours / recorded - 1": ours / entry["value"] - 1,
        "gap": max(0.0, 1 - bound / ours),
        "stages": stages,
        "seconds": seconds,
        "verdict": _verdict(ours, entry["value"]),
    }


def _verdict(ours: float, recorded: float) -> str:
    """Two values are equal to 1e-6, or to the digits that were recorded."""
    decimals = len(repr(recorded).partition(".")[2])
    if abs(ours - recorded) <= max(1e-6 * recorded, 0.5 * 10.0**-decimals):
        return "equal"
    return "better" if ours < recorded else "worse"


def run(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """All rows of a folder, and how many values are reached."""
    rows = []
    for file in sorted(options.instances.glob("pi*.json")):
        for row in rows_of(file):
            rows.append(row)
            print(f"{row['input']}, {row['devices']}, {row['rule']}: {row['seconds']:.1f} s", flush=True)
    verdicts = Counter(row["verdict"] for row in rows)
    summary = {
        "recorded values": len(rows),
        **verdicts,
        "largest gap": max(row["gap"] for row in rows),
        "slowest, s": round(max(row["seconds"] for row in rows), 1),
    }
    return rows, summary


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--instances", type=Path, required=True, help="folder of inputs in schema autopart-bench/1")
    chosen = arguments.parse_args()
    table, facts = run(chosen)
    show(table, chosen.json, facts)
