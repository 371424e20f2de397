"""Every schedule trains every hand-written package exactly as eager PyTorch does, and only with every guard."""

from __future__ import annotations

import contextlib
from functools import cache

import hazard_jobs
import pytest
import torch
from hazards import HAZARDS
from pool import JobError, Pool

from autopart.runtime.schedules import SCHEDULES

STAGES = 4


@cache
def eager(hazard: str) -> hazard_jobs.Trace:
    return hazard_jobs.eager(hazard)


def differences(pool: Pool, hazard: str, schedule: str, without: str | None = None) -> list[str]:
    """Names of losses, gradients, buffers and outputs that differ from eager, or are missing, in one of them."""
    parts = pool.run(STAGES // SCHEDULES[schedule].stages_per_process, hazard_jobs.pipelined, hazard, schedule, without)
    actual = {name: value for part in parts for name, value in part.items()}
    expected = eager(hazard)

    def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-10, atol=1e-13)

    return [
        n for n in {**expected, **actual} if n not in actual or n not in expected or not equal(actual[n], expected[n])
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("hazard", HAZARDS)
def test_training_equals_eager(pool: Pool, hazard: str, schedule: str) -> None:
    assert differences(pool, hazard, schedule) == []


@pytest.mark.parametrize(
    ("guard", "schedule", "hazard"),
    [
        ("token", "interleavedzerobubble", "frozen_prefix"),
        ("token", "interleavedzerobubble", "independent_output"),
        ("token", "zbv", "no_parameter_ends"),
        ("entry gate", "interleavedzerobubble", "views_and_strides"),
        ("entry gate", "1f1b", "inplace_on_received"),
        ("exit gate", "1f1b", "views_and_strides"),
        ("exit gate", "zbv", "untouched_relay"),
        ("exit gate", "zbv", "output_is_the_main_value"),
        ("static metadata", "gpipe", "int_into_later_embedding"),
        ("whole backward", "zbv", "gradient_hook"),
    ],
)
def test_each_guard_is_needed(pool: Pool, guard: str, schedule: str, hazard: str) -> None:
    with contextlib.suppress(JobError):
        assert differences(pool, hazard, schedule, without=guard) != []


def test_gradients_accumulate_over_steps(pool: Pool) -> None:
    parts = pool.run(STAGES, hazard_jobs.accumulated, "tied_weight", "1f1b")
    expected = hazard_jobs.accumulated_eagerly("tied_weight")
    actual = {name: value for part in parts for name, value in part.items()}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-13)
