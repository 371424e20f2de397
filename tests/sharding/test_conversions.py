"""Every change of layout: value, gradient, and the bytes that it sends, which are those of its price."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopart.cluster import Link
from autopart.sharding import R_STAR, Layout, P, R, S, conversion, conversions, local_shape
from tests.sharding.holding import combine, decompose
from tests.sharding.ranks import ThreadRanks

SHAPE = (12, 10)
LAYOUTS = [R, R_STAR, P, S(0, 12), S(1, 10), S(0, 4, 8), S(1, 3, 7)]
LINK = Link("test", 1e-6, 1e9)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(("a", "b"), itertools.product(LAYOUTS, LAYOUTS), ids=str)
def test_conversions_keep_values_and_gradients_and_send_what_they_cost(a: Layout, b: Layout, t: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    gradient = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    held, seeds = decompose(x, a.forward, t, generator), decompose(gradient, b.gradient, t, generator)
    call = conversion(a, b, SHAPE, t)
    ranks = ThreadRanks(t)

    def program(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = held[rank].requires_grad_()
        y = mine if call.target is None else call.target(mine, *call.args, **dict(call.kwargs))
        assert tuple(y.shape) == local_shape(SHAPE, b, t)
        return y.detach(), torch.autograd.grad(y, mine, seeds[rank])[0]

    found = ranks.run(program)
    torch.testing.assert_close(combine([y for y, _ in found], b.forward), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(combine([g for _, g in found], a.gradient), gradient, rtol=0, atol=1e-12)
    price = conversions(a, b, x, t, LINK)
    sent = [(price.forward, price.forward_bytes), (price.backward, price.backward_bytes)]
    assert ranks.counts == [(name, size) for name, size in sent if name is not None]
