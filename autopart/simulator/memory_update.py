"""What the end of a step takes for a moment: summing the gradients of tied parameters, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise


def tie_bytes(tied: Sequence[Sequence[int]]) -> int:
    """Most bytes at once on top of the gradients while tied ones are summed (see `runtime.ties`).

    Args:
        tied: For each stage of a process, the bytes of its parameters that other stages hold as well.
    """
    sizes = [size for stage in tied for size in stage]
    # The sum, and a copy of it that becomes the gradient while the old one is still there.
    return 2 * max(sizes, default=0)


def update_bytes(optimizer: str, trained: Sequence[int], grouped: bool) -> int:
    """Most bytes at once that an optimizer step makes for itself, its state being there.

    Args:
        trained: Bytes of each trained parameter, in order.
        grouped: Whether torch updates all parameters together (`foreach`, its choice on a GPU) or one by one.
    """
    return (_TOGETHER if grouped else _ONE_BY_ONE)[optimizer](trained)


def _nothing(trained: Sequence[int]) -> int:
    return 0


def _adam(trained: Sequence[int]) -> int:
    """The root of the second moment, and its quotient, while the denominator of the parameter before is still named."""
    return max((last + 2 * size for last, size in pairwise([0, *trained])), default=0)


_ONE_BY_ONE: Mapping[str, Callable[[Sequence[int]], int]] = {
    "sgd": _nothing,
    "sgd-momentum": _nothing,
    "adam": _adam,
    "adamw": _adam,
}
_TOGETHER: Mapping[str, Callable[[Sequence[int]], int]] = {
    "sgd": _nothing,
    "sgd-momentum": _nothing,
    "adam": sum,
    "adamw": sum,
}
