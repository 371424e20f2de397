"""Are predicted step times near published ones? Every grade A row of a folder of published training runs.

For each row the parts of the model, as one GPU of the published plan holds them, are profiled by formula on the
catalogue's GPU (`published_layers`); nothing is fitted to the rows. Then, in seconds of one GPU,

    layer     = forward + backward (+ what is recomputed) + collectives of the tensor group
    stage s   = its layers (+ embedding, or head and loss) + messages to its neighbours          t_s
    1F1B      = sum of all t_s + (m - 1) max t_s
    interleaved, c chunks = m max t_s + (p - 1) mean t_s / c
    ZB-1p     = m max t_s + (p - 1) (F + B - W),  ZB-2p = m max t_s + (p - 1) max(0, F + B - 2 W)     (means of stages)
    step      = that + sum of gradients over replicas (where the system does not overlap it) + optimizer

Schedules' forms are those of Narayanan et al. 2021 and of the zero-bubble paper (Qi et al. 2024), which gives F + B - W
for its handcrafted schedule with the memory of 1F1B. Sharded parameters (FSDP) are gathered and their gradients
scattered behind the computation of a layer; the longer of both counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from autopart.sharding.conversions import Collective, collective_seconds, sent_bytes
from benchmarks.output import parser, show
from benchmarks.published_layers import Cost, Parts
from benchmarks.published_plans import Plan, plan_of

HALF = 2
"""Bytes of an activation, and of a gradient that replicas sum."""
# Bytes that Adam moves for a parameter: half-precision gradient and weight, float32 weight and moments; float32 all.
UPDATE_BYTES = {"mixed": 30.0, "float32": 28.0}
UPDATE_OF_BANDWIDTH = 0.8


class Predicted:
    """Seconds of one step of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._parts = Parts(plan.shape, plan.rows, plan.device, plan.sequence_parallel, plan.float8)
        self._layer = self._parts.layer()

    def step_s(self) -> float:
        plan, m, p = self._plan, self._plan.microbatches, self._plan.pipeline
        stages = [self._stage_s(s) for s in range(p)]
        longest, mean = max(stages), sum(stages) / p
        if plan.schedule == "interleaved":
            pipeline = m * longest + (p - 1) * mean / plan.chunks
        elif plan.schedule.startswith("ZB"):
            weights = 1 if plan.schedule == "ZB-1p" else 2
            weight_s = self._layer.weight_s * plan.shape.layers / p
            pipeline = m * longest + (p - 1) * max(0.0, mean - (1 + weights) * weight_s)
        else:
            pipeline = sum(stages) + (m - 1) * longest
        return pipeline + self._sync_s() + self._update_s()

    def _stage_s(self, stage: int) -> float:
        """One microbatch, forward and backward."""
        plan = self._plan
        again = plan.recomputed[stage]
        layers = plan.stage_layers[stage]
        found = layers * self._layer_s() + again * self._layer.forward_s
        if stage == 0:
            found += _all(self._parts.embedding())
        if stage == plan.pipeline - 1:
            found += _all(self._parts.head())
        sides = [boundary for boundary in (stage - 1, stage) if 0 <= boundary < plan.pipeline - 1]
        return found + max(1, plan.chunks) * sum(self._message_s(boundary) for boundary in sides)

    def _layer_s(self) -> float:
        """One layer forward and backward, with what it exchanges."""
        plan, layer = self._plan, self._layer
        forward = layer.forward_s
        backward = layer.input_s + layer.weight_s + self._again_s(layer)
        forward += self._exposed_s(self._tensor_s(), layer.products_s)
        backward += self._exposed_s(self._tensor_s(), 2 * layer.products_s)
        if plan.recompute == "full":
            backward += self._exposed_s(self._tensor_s(), layer.products_s)
        if not plan.fsdp:
            return forward + backward
        whole = plan.shape.layer_parameters // plan.shape.tensor
        gather = self._replicas_s("all_gather", whole * (HALF if plan.float8 == "no" else 1))
        scatter = self._replicas_s("reduce_scatter", whole * 4)
        return max(forward, gather) + max(backward, gather + scatter)

    def _again_s(self, layer: Cost) -> float:
        """Computed once more in backward; "alternate" keeps every second product and attention."""
        kept = {
            "none": layer.forward_s,
            "full": 0.0,
            "core": layer.forward_s - layer.core_s,
            "alternate": layer.products_s / 2 + layer.core_s,
        }
        return layer.forward_s - kept[self._plan.recompute]

    def _tensor_s(self) -> float:
        """Collectives of one pass through a layer: two all-reduces, or two gathers and two scatters."""
        shape = self._plan.shape
        collectives: tuple[Collective, ...] = (
            ("all_gather", "reduce_scatter") if self._plan.sequence_parallel else ("all_reduce",)
        )
        sent = [sent_bytes(name, self._activation_bytes(), shape.tensor) for name in collectives]
        pairs = zip(collectives, sent, strict=True)
        return 2 * sum(collective_seconds(name, size, shape.tensor, self._plan.link) for name, size in pairs)

    def _exposed_s(self, exchange_s: float, products_s: float) -> float:
        """What is not hidden behind products, where a system interleaves the two."""
        return max(0.0, exchange_s - products_s) if self._plan.hides_tensor_collectives else exchange_s

    def _message_s(self, boundary: int) -> float:
        """A boundary's value or its gradient; each tensor rank sends its share."""
        link = self._plan.boundary_link(boundary)
        return link.latency_s + self._activation_bytes() / self._plan.shape.tensor / link.bandwidth_bytes_per_s

    def _activation_bytes(self) -> int:
        return self._plan.shape.tokens * self._plan.rows * self._plan.shape.hidden * HALF

    def _sync_s(self) -> float:
        """Sum of the gradients over replicas, as far as backward does not hide it."""
        plan = self._plan
        if plan.fsdp or plan.replicas == 1:
            return 0.0
        found = self._replicas_s("all_reduce", HALF * int(self._parameters(max(plan.stage_layers))))
        if plan.overlapped:
            return max(0.0, found - max(plan.stage_layers) * (self._layer.input_s + self._layer.weight_s))
        return found

    def _replicas_s(self, collective: Collective, size: int) -> float:
        replicas = self._plan.replicas * self._plan.shape.context
        return collective_seconds(
            collective, sent_bytes(collective, size, replicas), replicas, self._plan.replica_link()
        )

    def _update_s(self) -> float:
        plan = self._plan
        parameters = self._parameters(max(plan.stage_layers)) / (plan.replicas if plan.sharded else 1)
        moved = UPDATE_BYTES["float32" if plan.fsdp else "mixed"] * parameters
        return moved / (plan.device.memory_bandwidth_bytes_per_s * UPDATE_OF_BANDWIDTH)

    def _parameters(self, layers: int) -> float:
        """On one GPU of the largest stage, the embedding included."""
        shape = self._plan.shape
        return (layers * shape.layer_parameters + shape.vocab * shape.hidden) / shape.tensor


def _all(cost: Cost) -> float:
    return cost.forward_s + cost.input_s + cost.weight_s


def rows_of(published: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predicted and published seconds of every grade A row."""
    found = []
    for row in published["rows"]:
        if row["grade"] == "A":
            predicted, measured = Predicted(plan_of(row, published)).step_s(), row["result"]["step_time_s"]
            found.append(
                {
                    "run": row["id"],
                    "source": row["source"],
                    "published, s": measured,
                    "predicted, s": predicted,
                    "ratio": predicted / measured,
                }
            )
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Median and spread of the ratios, by source and of all."""
    groups = {source: [r["ratio"] for r in rows if r["source"] == source] for source in {r["source"] for r in rows}}
    groups = {**dict(sorted(groups.items())), "all": [r["ratio"] for r in rows]}
    found = {}
    for name, ratios in groups.items():
        low, high = np.quantile(ratios, [0.1, 0.9])
        off = exp(median(abs(log(ratio)) for ratio in ratios)) - 1
        found[f"{name} ({len(ratios)})"] = (
            f"median ratio {median(ratios):.2f}, 10 to 90 % {low:.2f} to {high:.2f}, all {min(ratios):.2f} to "
            f"{max(ratios):.2f}, median error {off:.0%}"
        )
    return found


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--published", type=Path, required=True, metavar="DIR", help="folder with strategies.json")
    arguments: argparse.Namespace = options.parse_args()
    table = rows_of(json.loads((arguments.published / "strategies.json").read_text()))
    show(table, arguments.json, summary(table))
