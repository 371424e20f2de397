"""Packages of a mixture of experts whose tokens are sent to their experts, on real processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import random_cuts
from pool import Pool
from split_packages import emit_split
from torch import nn

from autopart.graph import Graph
from autopart.sharding import Program, rewrite
from autopart.tracer import trace
from autopart.verification import verify
from benchmarks.double import InDouble
from tests.sharding.dispatching import by_plain_products, dispatching
from tests.sharding.models import mixtral
from tests.verification.launching import in_pool


@functools.cache
def traced() -> tuple[nn.Module, dict[str, Any], Graph]:
    torch.manual_seed(0)
    model, args, kwargs = mixtral("grouped_mm")
    model.config.use_cache = False
    with by_plain_products(), InDouble():
        return model, kwargs, trace(model, args, kwargs, microbatches=2, check=False)


@pytest.mark.parametrize(("t", "stages", "schedule"), [(2, 1, "gpipe"), (4, 1, "1f1b"), (2, 2, "1f1b"), (2, 4, "zbv")])
def test_mixtral_with_dispatched_tokens_equals_the_model(
    t: int, stages: int, schedule: str, pool: Pool, tmp_path: Path
) -> None:
    model, kwargs, graph = traced()
    choice = dispatching(Program.of(graph, t), 0)
    cuts = random_cuts(rewrite(graph, choice, t), stages, 1)
    emit_split(graph, choice, t, cuts, stages, tmp_path / "out", schedule=schedule, microbatches=2)
    with by_plain_products(), InDouble():
        report = verify(tmp_path / "out", model, kwargs=kwargs, launch=in_pool(pool), steps=2)
    assert report.passed, str(report)
    assert max(error for error in report.worst_relative_error.values() if error is not None) < 1e-9
    text = "\n".join(path.read_text() for path in (tmp_path / "out").glob("stage_*.py"))
    for name in (
        "counts_of_sorted",
        "ends_of_all_ranks",
        "send_to_experts",
        "ends_of_own_experts",
        "grouped_mm",
        "return_from_experts",
    ):
        assert f"{name}(" in text
