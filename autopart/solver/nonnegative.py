"""The least of a convex quadratic function over non-negative numbers, from any start: a warm start of least squares.

    minimize  x' products x / 2 - worth' x        over x >= 0

Lawson and Hanson's active sets (Solving Least Squares Problems, 1974, chapter 23) on the normal equations (Bro and
De Jong, 1997): some variables are members, the others zero. The least over the members' space is found from a
Cholesky factor, in which a member's coming is a new row, and its going a few rotations. A member that would be
negative there goes; when none would, the variable comes that promises most.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats

# A variable whose product with itself depends on the members' to within this share cannot come; one that promises
# less than the other number need not.
DEPENDENT, PROMISE = 1e-10, 1e-7


class Least(NamedTuple):
    """Where the function is least, the sets of members that were tried, and whether that was enough of them."""

    x: Floats
    sets: int
    found: bool


def least_nonnegative(products: NDArray[np.float64], worth: Floats, start: Floats, most_sets: int) -> Least:
    """The least of the function in the first lines.

    Args:
        products: Symmetric, without negative eigenvalues, (variables, variables).
        start: Zero or more for each variable; those above zero are the first members.
        most_sets: Sets of members to try.
    """
    return Least(*_least(products, worth, start, most_sets))


@numba.njit(cache=True, nogil=True)
def _least(products, worth, start, most_sets):  # type: ignore[no-untyped-def]
    variables, size, sets = len(worth), 0, 0
    factor, members = np.empty((variables + 1, variables + 1)), np.empty(variables, np.int64)
    x, wanted = np.zeros(variables), np.empty(variables)
    barred = np.zeros(variables, np.bool_)
    for i in np.argsort(-start):
        if start[i] > 0 and _come(factor, members, size, products[i], i):
            x[i] = start[i]
            size += 1
    while True:
        while sets < most_sets:
            sets += 1
            _solve(factor, members, size, worth, wanted)
            step, leaves = 1.0, -1
            for a in range(size):
                if wanted[a] <= 0:
                    has = x[members[a]]
                    most = has / (has - wanted[a]) if has > 0 else 0.0
                    if leaves < 0 or most < step:
                        step, leaves = most, a
            for a in range(size):
                x[members[a]] = max(0.0, x[members[a]] + step * (wanted[a] - x[members[a]]))
            if leaves < 0:
                break
            x[members[leaves]] = 0.0
            _go(factor, members, size, leaves)
            size -= 1
        if sets == most_sets:
            return x, sets, False
        promise = worth.copy()
        for a in range(size):
            promise -= x[members[a]] * products[members[a]]
        promise[members[:size]] = 0.0
        promise[barred] = 0.0
        comes = -1
        while comes < 0:
            i = promise.argmax()
            if promise[i] <= PROMISE:
                return x, sets, True
            if _come(factor, members, size, products[i], i):
                comes = i
            else:
                barred[i], promise[i] = True, 0.0
        size += 1


@numba.njit(cache=True, nogil=True)
def _come(factor, members, size, row, i):  # type: ignore[no-untyped-def]
    """Add a last row to the factor for variable i; False if it depends on the members'."""
    rest = row[i]
    for a in range(size):
        entry = row[members[a]]
        for b in range(a):
            entry -= factor[a, b] * factor[size, b]
        entry /= factor[a, a]
        factor[size, a] = entry
        rest -= entry * entry
    if rest <= DEPENDENT * row[i]:
        return False
    factor[size, size], members[size] = np.sqrt(rest), i
    return True


@numba.njit(cache=True, nogil=True)
def _go(factor, members, size, leaves):  # type: ignore[no-untyped-def]
    """Take a member's row out; rotations of columns make the factor triangular again."""
    for a in range(leaves, size - 1):
        members[a] = members[a + 1]
        for b in range(a + 2):
            factor[a, b] = factor[a + 1, b]
    for a in range(leaves, size - 1):
        root = np.hypot(factor[a, a], factor[a, a + 1])
        cosine, sine = factor[a, a] / root, factor[a, a + 1] / root
        factor[a, a] = root
        for b in range(a + 1, size - 1):
            left, right = factor[b, a], factor[b, a + 1]
            factor[b, a] = cosine * left + sine * right
            factor[b, a + 1] = cosine * right - sine * left


@numba.njit(cache=True, nogil=True)
def _solve(factor, members, size, worth, wanted):  # type: ignore[no-untyped-def]
    """Where the function is least for the members alone, whatever their signs."""
    for a in range(size):
        entry = worth[members[a]]
        for b in range(a):
            entry -= factor[a, b] * wanted[b]
        wanted[a] = entry / factor[a, a]
    for a in range(size - 1, -1, -1):
        wanted[a] /= factor[a, a]
        for b in range(a):
            wanted[b] -= factor[a, b] * wanted[a]
