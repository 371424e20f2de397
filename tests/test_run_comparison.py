"""Figures of compare-run: what a plan predicts is seconds, not the rounding of sums of them."""

from __future__ import annotations

import pytest

from autopart.comparison import left_s


def test_what_rounding_leaves_of_a_step_is_no_waiting() -> None:
    busy_s = sum([0.1] * 10)
    assert busy_s != 1.0  # what the test is about
    assert left_s(1.0, busy_s) == 0.0 and left_s(busy_s, 1.0) == 0.0
    assert left_s(1.0, 1.0 - 1e-6) == pytest.approx(1e-6)
    assert left_s(1.0, 0.0) == 1.0
