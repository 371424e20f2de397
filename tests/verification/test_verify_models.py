"""Real models: every gradient and weight of a package equals the model's, with one and two stages on a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawing_models import Auxiliary, RandomSlopes, StochasticDepth
from launching import in_pool
from mixed_model import MICROBATCHES, mixed
from pool import Pool
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import autopart
from autopart.errors import UsageError
from autopart.verification import VerifyReport, verify

WORDS, ROWS, LENGTH = 40, 8, 6


def tokens() -> torch.Tensor:
    return torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = GPT2Config(
        n_layer=3,
        n_embd=16,
        n_head=2,
        vocab_size=WORDS,
        n_positions=16,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config), {"input_ids": tokens(), "labels": tokens()}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    return T5ForConditionalGeneration(config), {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def check(pool: Pool, plan: Any, model: nn.Module, kwargs: dict[str, Any], **options: Any) -> VerifyReport:
    report = verify(plan, model, kwargs=kwargs, launch=in_pool(pool), **options)
    assert report.passed, str(report)
    assert max(error for error in report.worst_relative_error.values() if error is not None) < 1e-9
    assert report.parameters == len(list(model.named_parameters(remove_duplicate=False)))
    return report


@pytest.mark.parametrize("build", [gpt2, t5])
def test_transformers_with_tied_weights_are_equal(pool: Pool, build: Any) -> None:
    torch.manual_seed(0)
    model, kwargs = build()
    options = {"microbatches": MICROBATCHES, "stages": 4, "optimizer": "sgd", "dtype": torch.float64}
    plan = autopart.partition(model, "4xA100-80G", example_kwargs=kwargs, **options)
    for schedule in ("1f1b", "zbv"):
        check(pool, plan, model, kwargs, schedule=schedule)


def test_a_plan_in_single_precision_is_verified_in_double(pool: Pool) -> None:
    model, kwargs = mixed()
    model = model.float()
    options = {"microbatches": MICROBATCHES, "stages": 2, "optimizer": "sgd"}
    plan = autopart.partition(model, "2xA100-80G", example_kwargs=kwargs, **options)
    assert check(pool, plan, model, kwargs, dtype=torch.float64).dtype == "float64"
    assert next(model.parameters()).dtype == torch.float32
    report = verify(plan, model, kwargs=kwargs, launch=in_pool(pool))
    assert report.passed and report.dtype == "float32"


def test_a_loss_function_outside_of_the_model(pool: Pool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x, target = torch.randn(ROWS, 8, dtype=torch.float64), torch.randint(4, (ROWS,))
    options = {"microbatches": MICROBATCHES, "stages": 2, "optimizer": "sgd", "loss_fn": F.cross_entropy}
    plan = autopart.partition(model, "2xA100-80G", example_inputs=(x,), target=target, **options)
    report = verify(plan, model, (x,), target=target, loss_fn=F.cross_entropy, launch=in_pool(pool))
    assert report.passed, str(report)
    other = verify(
        plan, model, (x,), target=target, loss_fn=lambda y, t: 2 * F.cross_entropy(y, t), launch=in_pool(pool)
    )
    assert not other.passed
    with pytest.raises(UsageError, match="loss_fn"):
        verify(plan, model, (x,), target=target, launch=in_pool(pool))


def test_a_package_for_inference(pool: Pool) -> None:
    model, kwargs = mixed()
    options = {"microbatches": MICROBATCHES, "stages": 2, "mode": "inference"}
    plan = autopart.partition(model, "2xA100-80G", example_kwargs=kwargs, **options)
    report = check(pool, plan, model, kwargs)
    assert report.compared["output"] == 3 and report.compared["gradient"] == 0


def test_a_model_without_values_is_refused() -> None:
    model, kwargs = mixed()
    options = {"microbatches": MICROBATCHES, "stages": 2, "optimizer": "sgd"}
    plan = autopart.partition(model, "2xA100-80G", example_kwargs=kwargs, **options)
    with pytest.raises(UsageError, match="meta device"):
        verify(plan, model.to("meta"))


@pytest.mark.parametrize(
    "kind, said",
    [(StochasticDepth, "Python's random"), (RandomSlopes, "rrelu"), (Auxiliary, None)],
)
def test_models_that_draw_or_return_otherwise_in_training_are_verified(
    pool: Pool, kind: type[nn.Module], said: str | None
) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(ROWS, 6)
    plan = autopart.partition(
        model, "2xCPU", example_inputs=(x,), microbatches=2, stages=2, granularity="operator", dtype="float64"
    )
    report = verify(plan, model, (x,), launch=in_pool(pool))
    assert report.passed, str(report)
    assert said is None or any(said in note for note in report.notes), report.notes
