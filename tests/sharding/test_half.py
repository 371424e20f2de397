"""Operators on shards in half precision: as near to the exact result as torch's own operators are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autopart.runtime import split_operators
from tests.sharding.ranks import ThreadRanks

RANKS = 2
HALVES = [torch.bfloat16, torch.float16]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def with_gradient(
    x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], seed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    result = run(x)
    result.backward(seed)
    assert x.grad is not None and x.grad.dtype == result.dtype == x.dtype
    return result.detach(), x.grad


@pytest.mark.parametrize("dtype", HALVES)
def test_cross_entropy_sums_many_rows_and_classes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 512, generator=generator).to(dtype)
    target = torch.randint(512, (4096,), generator=generator)
    exact = with_gradient(logits.double(), lambda x: F.cross_entropy(x, target))
    allowed = 2 * torch.finfo(dtype).eps

    def by_classes(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return with_gradient(
            logits.chunk(RANKS, 1)[rank], lambda x: split_operators.vocabulary_cross_entropy(x, target, 512)
        )

    def by_rows(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = target.chunk(RANKS)[rank]
        return with_gradient(logits.chunk(RANKS)[rank], lambda x: split_operators.cross_entropy_of_rows(x, own))

    found = ThreadRanks(RANKS).run(by_classes)
    assert error(found[0][0], exact[0]) < allowed
    assert error(torch.cat([gradient for _, gradient in found], 1), exact[1]) < allowed
    found = ThreadRanks(RANKS).run(by_rows)
    assert error(found[0][0].double() + found[1][0].double(), exact[0]) < allowed
    assert error(torch.cat([gradient for _, gradient in found]), exact[1]) < allowed


@pytest.mark.parametrize("dtype", HALVES)
def test_batch_norm_of_values_far_from_zero(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(16, 4, 16, 16, generator=generator) + 20).to(dtype)
    seed = torch.randn(16, 4, 16, 16, generator=generator).to(dtype)

    def run(x: torch.Tensor, normalise: Callable[..., torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
        mean, variance = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
        weight, bias = torch.ones(4, dtype=x.dtype), torch.zeros(4, dtype=x.dtype)
        return [*with_gradient(x, lambda x: normalise(x, weight, bias, mean, variance), seed), mean, variance]

    def whole(x: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        weight, bias, mean, variance = state
        return F.batch_norm(x, mean, variance, weight, bias, True)

    def split(x: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        return split_operators.batch_norm_of_split_batch(x, *state, True, 0.1, 1e-5)

    exact, torchs = run(x.double(), whole, seed.double()), run(x, whole, seed)
    found = ThreadRanks(RANKS).run(lambda rank: run(x.chunk(RANKS)[rank], split, seed.chunk(RANKS)[rank]))
    joined = [torch.cat([ranks[0] for ranks in found]), torch.cat([ranks[1] for ranks in found]), *found[0][2:]]
    for own, other, right in zip(joined, torchs, exact, strict=True):
        assert error(own, right) < 2 * error(other, right) + torch.finfo(dtype).eps
