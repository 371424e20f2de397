"""The chain of least worst load plus fill, for any table that can give its chain of least fill under a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

C = TypeVar("C", bound=Sequence[object])


class Chains(Protocol[C]):
    """Chains of stages, each with a load and a fill."""

    def least_load(self) -> C | None:
        """The chain whose worst load is least; none if nothing fits."""

    def least_fill(self, limit: float) -> C | None:
        """The chain with the least fill among those whose loads are at most `limit`."""

    def worst(self, chain: C) -> float: ...

    def total_fill(self, chain: C) -> float: ...


def least_sum(chains: Chains[C], tolerance: float) -> tuple[C | None, float]:
    """The chain of least worst load plus fill, and a lower bound within `tolerance` of it; none if none fits.

    If the chain of least fill under a limit L has load l and fill f, then every chain with a load from l to L costs
    at least l + f; so the next limit is below l, until even the least load with fill f could not be better.
    """
    chain = chains.least_load()
    if chain is None:
        return None, np.inf
    lowest = chains.worst(chain)
    best, value = chain, lowest + chains.total_fill(chain)
    limit = np.inf
    while True:
        chain = chains.least_fill(limit)
        if chain is None:
            return best, value
        load, fill = chains.worst(chain), chains.total_fill(chain)
        if load + fill < value:
            best, value = chain, load + fill
        if lowest + fill >= value * (1 - tolerance):
            return best, min(value, lowest + fill)
        limit = float(np.nextafter(min(load, value - fill), -np.inf))
