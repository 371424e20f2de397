"""What counts as equal: NaN, None and other shapes never do, and rounding is measured against the right size."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from autopart.verification.comparison import TOLERANCES, Comparison
from autopart.verification.fixed_randomness import FixedRandomness
from autopart.verification.report import VerifyReport

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
    assert comparison.worst > 100 * TOLERANCES[torch.float64]


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


class Drawing(nn.Module):
    """Draws from Python's and numpy's own generators, as hand-written stochastic depth does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() + np.random.rand()


def test_draws_of_named_distributions_do_not_depend_on_the_random_state() -> None:
    x = torch.randn(4, 6)
    for draw in (
        lambda: torch.nn.functional.rrelu(x, training=True),
        lambda: torch.ops.aten.rrelu.default(x, 0.1, 0.3, True),
        lambda: nn.RReLU()(x),
        lambda: torch.nn.functional.gumbel_softmax(x),
        lambda: torch.zeros(4).exponential_(),
        lambda: torch.multinomial(x.softmax(-1), 2),
        lambda: torch.ops.aten.multinomial.default(x.softmax(-1), 2),
        lambda: torch.randperm(9),
        lambda: torch.randint(9, (9,)),
        lambda: torch.ops.aten.normal_.default(torch.zeros(4)),
    ):
        with FixedRandomness() as fixed:
            assert draw().equal(draw())
        assert fixed.draws
        assert not fixed.unknown
        assert not draw().equal(draw())


def test_what_a_package_may_write_of_rrelu_draws_what_the_function_draws() -> None:
    x = torch.randn(4, 6)
    with FixedRandomness() as fixed:
        torch.nn.functional.rrelu(x, 0.1, 0.3, False)
        assert not fixed.draws
        expected = torch.nn.functional.rrelu(x, 0.1, 0.3, True)
        assert torch.ops.aten.rrelu.default(x, 0.1, 0.3, True).equal(expected)
        assert torch.rrelu(x, 0.1, 0.3, True).equal(expected)


def test_python_and_numpy_draw_the_same_in_every_call_of_a_module_and_are_noted() -> None:
    x, module = torch.randn(4), Drawing()
    before = random.getstate()
    with FixedRandomness() as fixed:
        assert module(x).equal(module(x))
    assert random.getstate() == before
    assert "Python's random" in fixed.notes()[0] and "numpy.random" in fixed.notes()[0]
    assert not module(x).equal(module(x))
    linear = nn.Linear(4, 4)
    with FixedRandomness() as quiet:
        linear(x)
    assert not quiet.notes()


def test_draws_that_nobody_fixes_are_named() -> None:
    x = torch.randn(1, 1, 8, 8)
    with FixedRandomness() as fixed:
        torch.nn.functional.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5))
    assert fixed.notes() == ["fractional_max_pool2d drew random numbers, which differ between the two"]


def test_a_few_roundings_of_the_largest_gradient_are_no_difference_and_more_are() -> None:
    eps = torch.finfo(torch.float64).eps
    large = torch.ones(4, dtype=torch.float64)
    nothing = torch.full((4,), 1e-20, dtype=torch.float64)
    for roundings, equal in ((2, True), (10, False)):
        comparison = Comparison("gradient")
        comparison.add({"w": large, "b": nothing + roundings * eps}, {"w": large, "b": nothing})
        assert (comparison.worst <= TOLERANCES[torch.float64]) == equal


def test_gradients_that_are_all_nothing_are_held_against_the_loss() -> None:
    tiny, other = torch.tensor([1e-17], dtype=torch.float64), torch.tensor([-2e-17], dtype=torch.float64)
    alone, beside_loss = Comparison("gradient"), Comparison("gradient")
    alone.add({"w": tiny}, {"w": other})
    beside_loss.add({"w": tiny}, {"w": other}, least_scale=1.0)
    assert alone.worst > 1 and beside_loss.worst <= TOLERANCES[torch.float64]
