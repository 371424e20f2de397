"""Is predicted memory near published memory? Mist's measured stages, and the recomputation paper's GPUs.

For each GPU: 16 or 18 bytes for each parameter that it holds (half-precision weight and gradient, float32 weight and
two moments; Megatron-LM's gradients are float32), of which a share may be split over replicas or stay in the host's
memory; what autograd keeps of its layers (`published_layers`) times the microbatches in flight; a layer that is
recomputed keeps its input. Measured peaks have the largest temporary of an operator and one layer that is computed
again besides; the recomputation paper (Korthikanti et al. 2022, figure 1) has neither, and states parameters and
activations apart.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.output import parser, show
from benchmarks.published_layers import Cost, Parts
from benchmarks.published_plans import Plan, in_flight, plan_of

GIB, MIB = 2**30, 2**20
SIXTEEN, EIGHTEEN = 16, 18
OPTIMIZER_BYTES = 12
"""Of a parameter: float32 weight and two moments."""


class Memory:
    """Bytes on the GPUs of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._parts = Parts(plan.shape, plan.rows, plan.device, plan.sequence_parallel)

    def parameters(self, stage: int) -> float:
        """On one GPU: its layers, and the embedding at the first stage and (as the head's weight) at the last."""
        shape = self._plan.shape
        ends = (stage == 0) or (stage == self._plan.pipeline - 1)
        words = shape.vocab * shape.hidden if ends else 0
        return (self._plan.stage_layers[stage] * shape.layer_parameters + words) / shape.tensor

    def state_bytes(self, stage: int, each: int) -> float:
        plan = self._plan
        kept = OPTIMIZER_BYTES * (1 - plan.offloaded[stage]) / (plan.replicas if plan.sharded else 1)
        return self.parameters(stage) * (each - OPTIMIZER_BYTES + kept)

    def layer_bytes(self) -> float:
        """What autograd keeps of one layer for one microbatch."""
        core = self._plan.recompute == "core"
        parts = (self._parts.norm(), self._parts.residual(), self._parts.attention(), self._parts.mlp())
        return sum(
            times * self._kept(part, inside) - (part.core_bytes if core else 0)
            for part, times, inside in zip(parts, (2, 2, 1, 1), (False, False, True, True), strict=True)
        )

    def activation_bytes(self, stage: int) -> float:
        """What autograd keeps on a GPU, of all microbatches in flight."""
        plan = self._plan
        again = plan.recomputed[stage]
        one = (plan.stage_layers[stage] - again) * self.layer_bytes() + again * self._input_bytes()
        # With sequence parallelism the embedding's dropout, too, is split by tokens.
        share = plan.shape.tensor if plan.sequence_parallel else 1
        first = self._parts.embedding().saved_bytes / share if stage == 0 else 0
        last = self._parts.head().saved_bytes if stage == plan.pipeline - 1 else 0
        return in_flight(plan, stage) * (one + first) + last

    def passing_bytes(self, stage: int) -> float:
        """A layer that is computed again, and the largest temporary; messages are as small as a layer's input."""
        plan = self._plan
        parts = [self._parts.attention(), self._parts.mlp()]
        parts += [self._parts.head()] if stage == plan.pipeline - 1 else []
        again = self.layer_bytes() if plan.recomputed[stage] else 0
        sides = (stage > 0) + (stage < plan.pipeline - 1)
        return again + max(part.temporary_bytes for part in parts) + 2 * sides * self._input_bytes()

    def _kept(self, part: Cost, inside: bool) -> float:
        """With sequence parallelism a rank keeps its share of a part's input and gathers it again in backward."""
        share = self._plan.shape.tensor if inside and self._plan.sequence_parallel else 1
        return part.saved_bytes - part.input_bytes * (1 - 1 / share)

    def _input_bytes(self) -> float:
        shape = self._plan.shape
        return 2.0 * shape.tokens * self._plan.rows * shape.hidden


def mist_rows(published: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each stage of each of Mist's measured plans; its "MB" are MiB (mist/utils/common.py)."""
    measured = published["sweeps"]["mist_tuned"]["measured_l4_gpt"]
    for row in published["rows"]:
        if row["source"] == "MIST" and row["grade"] == "A":
            _, size, flash = row["id"].split("-")
            (peaks,) = [
                figures["exec_stage_peak_allocated_memories"]
                for name, figures in measured.items()
                if name.startswith(f"{size.lower()}-") and name.endswith(flash.removeprefix("flash"))
            ]
            memory = Memory(plan_of(row, published))
            for stage, peak in enumerate(map(int, re.findall(r"(\d+) MB", peaks))):
                state, saved = memory.state_bytes(stage, SIXTEEN), memory.activation_bytes(stage)
                ours = state + saved + memory.passing_bytes(stage)
                yield _row(row["id"], f"stage {stage}, peak", peak * MIB / GIB, ours / GIB, "GiB")


def recomputation_rows(published: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows for the first GPU of each of the recomputation paper's models (GiB)."""
    pattern = r"optimizer ([\d.]+), activations ([\d.]+) with seq-par\+selective, ([\d.]+) with neither"
    for row in published["rows"]:
        found = re.search(pattern, row["note"])
        if row["source"] != "KORTH" or found is None or row["strategy"]["recompute"] == "full":
            continue
        state, least, most = map(float, found.groups())
        plan = plan_of(row, published)
        neither = replace(plan, recompute="none", sequence_parallel=False)
        yield _row(row["id"], "parameters and states", state, Memory(plan).state_bytes(0, EIGHTEEN) / GIB, "GiB")
        yield _row(row["id"], "activations", least, Memory(plan).activation_bytes(0) / GIB, "GiB")
        yield _row(row["id"], "activations, neither", most, Memory(neither).activation_bytes(0) / GIB, "GiB")


def _row(run: str, what: str, published: float, predicted: float, unit: str) -> dict[str, Any]:
    return {
        "run": run,
        "what": what,
        "unit": unit,
        "published": published,
        "predicted": predicted,
        "ratio": predicted / published,
    }


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--published", type=Path, required=True, metavar="DIR", help="folder with strategies.json")
    arguments: argparse.Namespace = options.parse_args()
    data = json.loads((arguments.published / "strategies.json").read_text())
    table = [*mist_rows(data), *recomputation_rows(data)]
    inside = sum(abs(row["ratio"] - 1) <= 0.1 for row in table)
    show(table, arguments.json, {"within 10 %": f"{inside} of {len(table)}"})
