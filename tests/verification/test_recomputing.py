"""Blocks that a plan recomputes: everything stays equal, on real processes and under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import in_pool
from pool import Pool
from recomputing import MODELS, Example, autocast, batch_of, for_partition, measure, recomputing, train
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopart
from autopart.cluster import Cluster
from autopart.codegen import emit, recomputable
from autopart.solver import solve
from autopart.verification import verify
from autopart.workload import Workload

MICROBATCHES = 4
# With two stages on a process, two processes run the same package.
SCHEDULES = {
    "gpt2": ["gpipe", "1f1b", "interleaved1f1b"],
    "llama": ["1f1b"],
    "t5": ["gpipe", "interleaved1f1b"],
    "vit": ["1f1b", "interleaved1f1b"],
    "hazards": ["gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev"],
}


def planned(build: Callable[[], Example], stages: int = 4, **options: Any) -> tuple[Any, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, example = build()
    plan = autopart.partition(
        model,
        f"{stages * options.get('tensor', 1)}xA100-80G",
        stages=stages,
        microbatches=MICROBATCHES,
        optimizer="sgd",
        **for_partition(example),
        **{"tensor": 1, "granularity": "block", "dtype": torch.float64, **options},
    )
    return plan, model, example


@pytest.mark.parametrize("name", MODELS)
def test_everything_is_equal_where_all_blocks_are_recomputed(name: str, pool: Pool, tmp_path: Path) -> None:
    plan, model, example = planned(MODELS[name])
    plan = recomputing(plan)
    assert sum(len(stage.recomputed) for stage in plan.per_stage) >= 4
    folder = plan.emit(tmp_path / "package")
    for schedule in SCHEDULES[name]:
        report = verify(folder, model, **example, schedule=schedule, steps=2, launch=in_pool(pool))
        assert report.passed, f"{schedule}: {report}"
        assert max(error for error in report.worst_relative_error.values() if error is not None) < 1e-9


def test_tensor_ranks_run_their_collectives_again(pool: Pool) -> None:
    plan, model, example = planned(MODELS["llama"], stages=2, tensor=2)
    plan = recomputing(plan)
    assert sum(len(stage.recomputed) for stage in plan.per_stage) >= 4
    report = verify(plan, model, **example, steps=2, launch=in_pool(pool))
    assert report.passed, str(report)
    assert max(error for error in report.worst_relative_error.values() if error is not None) < 1e-9


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("gpt2", "1f1b"), ("vit", "interleaved1f1b"), ("hazards", "zbv"), ("hazards", "gpipe"), ("autocast", "1f1b")],
)
def test_with_dropout_and_autocast_every_bit_is_as_without_recomputation(
    name: str, schedule: str, pool: Pool, tmp_path: Path
) -> None:
    plan, model, example = planned({**MODELS, "autocast": autocast}[name], dtype=None)
    found = []
    for each, folder in ((plan, tmp_path / "kept"), (recomputing(plan), tmp_path / "again")):
        each.emit(folder)
        torch.save(model.state_dict(), weights := tmp_path / "weights.pt")
        processes = 4 if schedule in ("gpipe", "1f1b") else 2
        found.append(pool.run(processes, train, str(folder), schedule, str(weights), batch_of(example)))
    kept, again = found
    assert any("Dropout(" in path.read_text() for path in (tmp_path / "again").glob("*.py"))
    assert len([loss for process in kept for loss in process["losses"] if isfinite(loss)]) == 2
    for one, other in zip(kept, again, strict=True):
        assert one["losses"] == other["losses"]
        assert one["tensors"].keys() == other["tensors"].keys()
        for place, tensor in one["tensors"].items():
            assert tensor is not None or other["tensors"][place] is None, place
            assert tensor is None or torch.equal(tensor, other["tensors"][place]), place


@pytest.mark.parametrize("schedule", ["zbv", "interleavedzerobubble"])
def test_schedules_that_split_backward_run_a_block_again_once(schedule: str, pool: Pool, tmp_path: Path) -> None:
    plan, model, example = planned(MODELS["gpt2"])
    folder = recomputing(plan).emit(tmp_path / "package")
    torch.save(model.state_dict(), weights := tmp_path / "weights.pt")
    arguments = (str(folder), schedule, str(weights), batch_of(example))
    counts = [process["calls"] for process in pool.run(2, train, *arguments)]
    # Four layers on two processes; two steps of four microbatches; forward, and once more in backward.
    assert sum(counts) == 4 * 2 * MICROBATCHES * 2
    # Without the mark torch runs a block again for the input gradients, and once more for the weight gradients.
    table = (folder / "pipeline.py").read_text()
    (folder / "pipeline.py").write_text(table.replace(", whole_backward=True", ""))
    assert sum(process["calls"] for process in pool.run(2, train, *arguments)) > sum(counts)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_plans_for_little_memory_recompute_and_run_within_it(schedule: str, pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 96, "n_head": 6, "vocab_size": 200, "n_positions": 64, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(200, (2 * MICROBATCHES, 64))
    example = {"kwargs": {"input_ids": ids, "labels": ids}}
    cluster = Cluster.parse(["CPU"] * 2)
    options = {"schedule": schedule, "optimizer": "sgd", "dtype": torch.float64, "check": False, "tensor": 1}
    roomy = autopart.partition(
        model, cluster, example_kwargs=example["kwargs"], stages=2, microbatches=MICROBATCHES, **options
    )
    assert not any(stage.recomputed for stage in roomy.per_stage)
    worst = max(stage.peak_memory_bytes for stage in roomy.per_stage)
    small = replace(cluster, devices=tuple(replace(d, memory_bytes=int(0.75 * worst)) for d in cluster.devices))
    workload = Workload("training", MICROBATCHES, 2, schedule, "sgd", recomputable=recomputable)
    plan = solve(roomy.graph, roomy.costs, small, workload, stages=2, granularity="block")
    assert any(stage.recomputed for stage in plan.per_stage)
    assert any("again in backward" in note for note in plan.notes)
    emit(roomy.graph, plan, tmp_path / "package")
    report = verify(tmp_path / "package", model, **example, steps=2, launch=in_pool(pool))
    assert report.passed, str(report)
    torch.save(model.state_dict(), weights := tmp_path / "weights.pt")
    peaks = pool.run(2, measure, str(tmp_path / "package"), schedule, str(weights), batch_of(example))
    for stage, peak in zip(plan.per_stage, peaks, strict=True):
        assert stage.peak_memory_bytes <= stage.memory_limit_bytes
        assert 0.65 * stage.peak_memory_bytes < peak <= stage.peak_memory_bytes, (peaks, plan.per_stage)
