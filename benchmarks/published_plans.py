"""Published runs as data: the plan of each row of `strategies.json`, and the hardware it ran on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopart.catalogue import catalogue
from autopart.cluster import Device, Link
from benchmarks.published_layers import Float8
from benchmarks.published_shapes import Shape

Recompute = Literal["none", "full", "core", "alternate"]
Schedule = Literal["none", "1F1B", "interleaved", "ZB-1p", "ZB-2p"]

RECOMPUTE: dict[str, Recompute] = {
    "none": "none",
    "full": "full",
    "full (uniform)": "full",
    "selective (attention core) + sequence parallel": "core",
    "selective (op)": "alternate",
    "per-stage layer counts": "none",
}
SCHEDULES: dict[str, Schedule] = {
    "none": "none",
    "1F1B": "1F1B",
    "interleaved 1F1B": "interleaved",
    "interleaved 1F1B, one layer per chunk": "interleaved",
    "zero-bubble auto, activation limit p*M_B": "ZB-1p",
    "zero-bubble auto, activation limit 2p*M_B": "ZB-2p",
}
L4_BOOST_MHZ, L4_FIXED_MHZ = 2040, 1050
# Megatron-LM with its own attention (scores, softmax, dropout); the zero-bubble paper's memory is that of this, too.
UNFUSED_DROPOUT = {"SC21-code+SC21-T1", "KORTH", "ZB"}


@dataclass(frozen=True)
class Plan:
    """One row.

    Attributes:
        rows: Of a microbatch, on one replica.
        chunks: Stages on each GPU (virtual stages).
        stage_layers: Of each GPU of the pipeline; `recomputed` of them run forward twice (with "none").
        replicas: Data-parallel; `fsdp`: they share parameters; `sharded`: they share the optimizer's state.
        overlapped: Whether gradients are summed over replicas while backward runs.
        offloaded: Share of each stage's optimizer state that stays in the host's memory.
    """

    shape: Shape
    rows: int
    microbatches: int
    pipeline: int
    chunks: int
    replicas: int
    schedule: Schedule
    recompute: Recompute
    sequence_parallel: bool
    float8: Float8
    fsdp: bool
    sharded: bool
    overlapped: bool
    hides_tensor_collectives: bool
    stage_layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    offloaded: tuple[float, ...]
    device: Device
    link: Link
    network: Link
    per_node: int

    def replica_link(self) -> Link:
        """Between replicas: a GPU's network card serves it alone, and all GPUs of a machine that share a group."""
        apart = self.shape.tensor * self.shape.context * self.pipeline if not self.fsdp else self.shape.tensor
        together = max(1, self.per_node // apart)
        if self.replicas <= together:
            return self.link
        bandwidth = min(self.link.bandwidth_bytes_per_s, together * self.network.bandwidth_bytes_per_s)
        return replace(self.network, bandwidth_bytes_per_s=bandwidth)

    def boundary_link(self, stage: int) -> Link:
        """Between a stage and the next."""
        crosses = (stage + 1) * self.shape.tensor % self.per_node == 0
        return self.network if crosses else self.link


def plan_of(row: Mapping[str, Any], published: Mapping[str, Any]) -> Plan:
    """The plan of a grade A row."""
    strategy, source, cluster = row["strategy"], row["source"], row["cluster"]
    device, link, network = _hardware(cluster["gpu"])
    megatron, mist = source in UNFUSED_DROPOUT, source == "MIST"
    titan = source.startswith("TITAN")
    shape = Shape.of(
        published["models"][row["model"]],
        row["seq"],
        tensor=strategy["tp"],
        context=strategy["cp"],
        flash=not megatron and "flashFalse" not in row["id"],
        fused="compile" in row["id"] or (titan and "eager" not in row["id"]),
        dropout=0.1 if megatron else 0.0,
        half_loss=mist,  # mist/model/gpt.py, mist/modules/losses.py of github.com/Dazz993/Mist
    )
    pipeline, chunks = strategy["pp"], strategy["virtual_stages"] or 0
    layers: tuple[int, ...] = (shape.layers // pipeline,) * pipeline
    recomputed: tuple[int, ...] = (0,) * pipeline
    offloaded: tuple[float, ...] = (0.0,) * pipeline
    if source == "ZB":
        each = (shape.layers + 2) // pipeline
        layers = (each - 1, *(each,) * (pipeline - 2), each - 1)
        chunks = chunks or each
    if mist:
        tuned = _mist_plan(row["id"], published)
        layers, recomputed = tuple(tuned["layer_partitions"]), tuple(tuned["gradient_checkpointing"])
        offloaded = tuple(stage[8] for stage in tuned["stage_strategies"])
    precision = strategy["precision"]
    return Plan(
        shape=shape,
        rows=row["micro_batch"],
        microbatches=row["microbatches"],
        pipeline=pipeline,
        chunks=chunks,
        replicas=strategy["dp"],
        schedule=SCHEDULES[strategy["schedule"]],
        recompute=RECOMPUTE[strategy["recompute"]],
        sequence_parallel=titan or "sequence parallel" in strategy["recompute"],
        float8="no" if "float8" not in precision else "rowwise" if "rowwise" in precision else "tensorwise",
        fsdp=titan,
        sharded=titan or mist,
        overlapped=strategy["zero_fsdp"] == "none (DDP torch)",
        hides_tensor_collectives="asynctp" in row["id"],
        stage_layers=layers,
        recomputed=recomputed,
        offloaded=offloaded,
        device=device,
        link=link,
        network=network,
        per_node=cluster["per_node"],
    )


def _hardware(gpu: str) -> tuple[Device, Link, Link]:
    """The catalogue's entry, changed where the source says that the part was another."""
    if gpu.startswith("L4"):
        entry, clock = catalogue()["L4"], L4_FIXED_MHZ / L4_BOOST_MHZ
        rates = {dtype: rate * clock for dtype, rate in entry.device.flops_per_s.items()}
        return replace(entry.device, name="L4-1050MHz", flops_per_s=rates), entry.link, entry.network
    if gpu.startswith("H100-96GB"):
        entry = catalogue()["H100-80G"]
        device = replace(entry.device, name="H100-96G", memory_bytes=96 * 10**9, memory_bandwidth_bytes_per_s=2.4e12)
        return device, entry.link, entry.network
    entry = catalogue()[{"A100-SXM-80GB": "A100-80G", "H200": "H200"}[gpu]]
    return entry.device, entry.link, entry.network


def _mist_plan(name: str, published: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mist's tuned plan of a row called mist-1.3B-flashTrue."""
    _, size, flash = name.split("-")
    plans = published["sweeps"]["mist_tuned"]["plans"]
    ending = f"f_{flash.removeprefix('flash')}.yaml"
    start = f"benchmark/mist/tuned_configs/l4-24gb/gpt/{size.lower()}-"
    (found,) = [plan for plan in plans if plan["file"].startswith(start) and plan["file"].endswith(ending)]
    return found


def in_flight(plan: Plan, stage: int) -> float:
    """How many microbatches' activations of all its layers a GPU holds at once (Narayanan et al. 2021).

    Interleaved, a GPU runs 2 (p - s - 1) + (c - 1) p chunks forward before the first one backward.
    """
    p, c = plan.pipeline, plan.chunks
    if plan.schedule == "interleaved":
        return min((2 * (p - stage - 1) + (c - 1) * p + 1) / c, float(plan.microbatches))
    return float(min(p - stage, plan.microbatches))
