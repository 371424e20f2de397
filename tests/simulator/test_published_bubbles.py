"""The benchmark's bubbles are those of the paper's formulas where messages take no time (Qi et al., table 1)."""

import pytest

from autopart.simulator.actions import actions
from benchmarks.published_bubbles import bubble, zb_h1

F, B, W = 3.0, 2.5, 2.0


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 24)])
def test_bubbles_without_messages_are_those_of_the_formulas(p, m):
    work = m * (F + B + W)
    for order, size in ((actions("1f1b", p, m), (p - 1) * (F + B + W)), (zb_h1(p, m), (p - 1) * (F + B - W))):
        assert bubble(order, p, m, (F, B, W, 0.0)) == pytest.approx(size / (work + size))


def test_messages_make_bubbles_larger():
    assert bubble(zb_h1(4, 8), 4, 8, (F, B, W, 0.5)) > bubble(zb_h1(4, 8), 4, 8, (F, B, W, 0.0))
