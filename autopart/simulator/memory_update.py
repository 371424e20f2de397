"""What the end of a step takes for a moment: summing the gradients of tied parameters, and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise


def tie_bytes(tied: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> int:
    """Most bytes at once on top of the gradients while tied ones are summed (see `runtime.ties`).

    One parameter after the other: the sum, and for each copy on the process a copy of the sum, which becomes its
    gradient; the old ones are there till the end.

    Args:
        tied: For each stage of a process, the parameters that other stages hold as well.
        sizes: Bytes of each.
    """
    copies = Counter(name for stage in tied for name in stage)
    return max(((count + 1) * sizes[name] for name, count in copies.items()), default=0)


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
