"""The stages found so far, and what they say of the potentials: cutting planes of the most that stages gain.

A stage s before which are the items B and behind which are those not in I, B within I, gains

    lambda_{s+1}(I) - lambda_s(B)

at potentials lambda: a linear function of these, so the stages known say where the most that all places gain in sum may
be below a level, and where it is not (Kelley, 1960).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver.nonnegative import least_nonnegative
from autopart.solver.problem import Floats
from autopart.solver.sweep import BEFORE, IN

# What the gains of places weigh, beside the way of the potentials, in the distance of a point: next to nothing.
LIGHT = 1.0 / 30
# Sets of stages that decide a point, tried before it is given up.
MOST_SETS = 3000
# A remainder of least squares that is as good as none: then there is no such point.
LEAST_REST = 1e-9


@dataclass(frozen=True, eq=False)
class Stages:
    """Stages by number: the place of each among the stages of a plan, the labels of all items, the seconds."""

    place: NDArray[np.int64]
    labels: NDArray[np.int8]
    seconds: Floats

    def __len__(self) -> int:
        return len(self.place)

    def of(self, which: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Stages:
        return Stages(self.place[which], self.labels[which], self.seconds[which])

    def and_also(self, other: Stages) -> Stages:
        return Stages(
            np.concatenate([self.place, other.place]),
            np.concatenate([self.labels, other.labels]),
            np.concatenate([self.seconds, other.seconds]),
        )

    def names(self) -> list[tuple[int, bytes]]:
        """Equal for equal stages of one place."""
        return [(int(place), labels.tobytes()) for place, labels in zip(self.place, self.labels, strict=True)]

    @classmethod
    def none(cls, items: int) -> Stages:
        return cls(np.zeros(0, np.int64), np.zeros((0, items), np.int8), np.zeros(0))


@dataclass(frozen=True, eq=False)
class Nearest:
    """A point, (stages + 1, items); how far it is; the weight of each stage that holds it there; what it took."""

    table: Floats
    far: float
    weights: Floats
    work: int


class Cuts:
    """Stages of all places, and the products of their gains.

    Attributes:
        stages: All of them; there is one of each place before anything is asked.
        start: Where the next search for a nearest point begins: what each weighed in the last one, and the sum.
    """

    def __init__(self, stages: Stages, scale: Floats) -> None:
        """
        Args:
            scale: By boundary and item, (stages + 1, items), what a potential moves while the distance grows by one;
                zero for potentials that stay.
        """
        self.stages, self.scale = Stages.none(scale.shape[1]), scale
        self.before, self.inside = np.zeros((2, 0, scale.shape[1]))
        self.products, self.start = np.zeros((0, 0)), np.zeros(1)
        self.known: set[tuple[int, bytes]] = set()
        self.learn(stages)

    def learn(self, stages: Stages) -> int:
        """Add what is new; how many these are."""
        new = []
        for i, name in enumerate(stages.names()):
            if name not in self.known:
                self.known.add(name)
                new.append(i)
        stages = stages.of(np.array(new, dtype=np.int64))
        known = len(self.stages)
        self.stages = self.stages.and_also(stages)
        self.before = np.concatenate([self.before, stages.labels == BEFORE])
        self.inside = np.concatenate([self.inside, stages.labels <= IN])
        more = self._products(np.arange(known, len(self.stages)))
        grown = np.zeros((len(self.stages), len(self.stages)))
        grown[:known, :known], grown[known:], grown[:, known:] = self.products, more, more.T
        self.products, self.start = grown, np.insert(self.start, known, np.zeros(len(new)))
        return len(new)

    def of(self, which: NDArray[np.int64]) -> Cuts:
        """Some of the stages alone."""
        some = copy.copy(self)
        some.stages, some.before, some.inside = self.stages.of(which), self.before[which], self.inside[which]
        some.products, some.start = self.products[np.ix_(which, which)], self.start[[*which, -1]]
        some.known = set(some.stages.names())
        return some

    def _products(self, which: NDArray[np.int64]) -> Floats:
        """Of some stages' gains with all others, potentials by their scale; only neighbours have any in common."""
        place, squares = self.stages.place, self.scale**2
        products = np.zeros((len(which), len(place)))
        for s in np.unique(place[which]):
            rows = which[place[which] == s]
            before, inside = self.before[rows] * squares[s], self.inside[rows] * squares[s + 1]
            at = {other: np.flatnonzero(place == other) for other in (s - 1, s, s + 1)}
            own = np.flatnonzero(place[which] == s)
            products[np.ix_(own, at[s - 1])] = -before @ self.inside[at[s - 1]].T
            products[np.ix_(own, at[s])] = before @ self.before[at[s]].T + inside @ self.inside[at[s]].T
            products[np.ix_(own, at[s + 1])] = -inside @ self.before[at[s + 1]].T
        return products

    def gains(self, table: Floats) -> Floats:
        """Of each stage, at these potentials."""
        place = self.stages.place
        inside = np.einsum("cv,cv->c", self.inside, table[place + 1])
        return inside - np.einsum("cv,cv->c", self.before, table[place])

    def claims(self, table: Floats) -> Floats:
        """The most that a stage known gains, by place."""
        claims = np.full(len(table) - 1, -np.inf)
        np.maximum.at(claims, self.stages.place, self.gains(table))
        return claims

    def nearest(self, centre: Floats, level: float) -> Nearest | None:
        """The point nearest to the centre where the known stages gain `level` in all; None if that is not found.

        With y the scaled way from the centre and t the gains of the places, which weigh next to nothing: t_s >= gain of
        each stage of s, sum t = level. The least of y under linear inequalities is a problem of non-negative least
        squares (Lawson and Hanson, 1974, section 23.4); its solution has a weight for each stage, and one for the sum.
        """
        place, places = self.stages.place, len(centre) - 1
        gains, claims = self.gains(centre), self.claims(centre)
        light, stages = LIGHT**-2, len(place)
        worth = np.append(gains - claims[place], claims.sum() - level)
        products = np.outer(worth, worth)
        products[:-1, :-1] += self.products + light * (place[:, None] == place)
        products[-1, :-1] -= light
        products[:-1, -1] -= light
        products[-1, -1] += places * light
        least = least_nonnegative(products, worth, self.start, MOST_SETS)
        rest = 1.0 - float(worth @ least.x)
        if not least.found or rest < LEAST_REST:
            return None
        self.start = least.x
        weights = least.x[:-1] / rest
        pull = np.zeros_like(centre)
        for s in range(places):
            own = np.flatnonzero((place == s) & (weights > 0))
            pull[s + 1] += weights[own] @ self.inside[own]
            pull[s] -= weights[own] @ self.before[own]
        way = -self.scale * pull
        far = float(np.linalg.norm(way))
        return Nearest(centre + self.scale * way, far, weights, least.sets * stages)
