"""What counts as equal: NaN, None and other shapes never do, and rounding is measured against the right size."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from autopart.verify.comparison import Comparison
from autopart.verify.fixed_randomness import FixedRandomness
from autopart.verify.report import VerifyReport

ONES = torch.ones(3, dtype=torch.float64)


def worst(actual: object, expected: object) -> float:
    comparison = Comparison("gradient")
    comparison.add({"w": actual}, {"w": expected})  # type: ignore[dict-item]
    assert comparison.compared == 1
    return comparison.worst


def test_the_relative_error_is_the_largest_difference_over_the_largest_value() -> None:
    actual = torch.tensor([2.0, 4.0, 0.3], dtype=torch.float64)
    expected = torch.tensor([2.0, 4.0, 0.1], dtype=torch.float64)
    assert worst(actual, expected) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (ONES * math.nan, ONES),
        (ONES, ONES * math.nan),
        (ONES * math.nan, ONES * math.nan),
        (ONES * math.inf, ONES),
        (ONES, ONES * math.inf),
        (None, ONES),
        (ONES, None),
        (ONES * 0, None),
        (ONES[:2], ONES),
        (ONES.float(), ONES),
        (torch.zeros(1, 3, dtype=torch.float64), ONES * 0),
    ],
)
def test_what_is_no_number_or_of_another_kind_is_never_equal(actual: object, expected: object) -> None:
    assert worst(actual, expected) == math.inf


def test_equal_infinities_and_missing_gradients_are_equal() -> None:
    mask = torch.tensor([0.0, -math.inf])
    assert worst(mask, mask.clone()) == 0.0
    assert worst(None, None) == 0.0


def test_a_name_that_one_side_lacks_is_told() -> None:
    comparison = Comparison("gradient")
    comparison.add({"a": ONES}, {"a": ONES, "b": ONES})
    comparison.add({"a": ONES, "c": ONES}, {"a": ONES})
    assert comparison.worst == math.inf
    assert comparison.failures == ["the package has no gradient b", "the model has no gradient c"]


def test_what_is_zero_but_for_rounding_is_measured_against_the_others() -> None:
    comparison = Comparison("gradient")
    comparison.add({"bias": ONES * 1e-18, "w": ONES}, {"bias": ONES * -2e-18, "w": ONES})
    assert comparison.worst < 1e-9
    comparison.add({"bias": ONES * 1e-12, "w": ONES}, {"bias": ONES * 2e-12, "w": ONES})
    assert comparison.worst > 1e-5


def test_a_report_with_an_infinite_error_is_still_json() -> None:
    report = VerifyReport(False, 2, "1f1b", "float32", {"output": math.inf, "loss": None})
    assert json.loads(report.to_json())["worst_relative_error"] == {"output": "inf", "loss": None}


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.Dropout2d(0.5),
        nn.AlphaDropout(0.5),
        nn.FeatureAlphaDropout(0.5),
        nn.Sequential(nn.Dropout(0.5, inplace=True)),
    ],
)
def test_dropout_keeps_everything(module: nn.Module) -> None:
    x = torch.randn(4, 3, 5, 5)
    with FixedRandomness() as fixed:
        assert module(x.clone()).equal(x)
    assert fixed.notes() == ["dropout was set to zero in both"]
    assert not module(x.clone()).equal(x)


def test_attention_and_recurrent_dropout_keep_everything() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    lstm, gru = (kind(8, 8, num_layers=2, dropout=0.5, batch_first=True) for kind in (nn.LSTM, nn.GRU))
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    for call in (
        lambda: attention(x, x, x)[0],
        lambda: lstm(x)[0],
        lambda: gru(x)[0],
        lambda: lstm(packed)[0].data,
        lambda: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda: nn.functional.scaled_dot_product_attention(x, x, x, None, 0.5),
    ):
        with FixedRandomness() as fixed:
            assert call().equal(call())
        assert fixed.dropout
        assert not call().equal(call())


def test_other_draws_do_not_depend_on_the_random_state() -> None:
    for draw in (
        lambda: torch.rand(4),
        lambda: torch.randn_like(torch.zeros(4)),
        lambda: torch.zeros(4).bernoulli_(0.5),
        lambda: torch.bernoulli(torch.full((4,), 0.5)),
        lambda: torch.zeros(4).uniform_(),
    ):
        with FixedRandomness() as fixed:
            assert draw().equal(draw())
        assert fixed.draws
