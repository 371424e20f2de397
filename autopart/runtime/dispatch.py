"""Rows sent to the ranks that hold their experts, and back: by all-to-all, however many there are.

Every rank has rows sorted by expert, and holds the matrices of consecutive experts: rank 0 of the first ones, and so
on. `ends[rank, expert]` says behind which of a rank's rows those of an expert end; all ranks know it.
"""

from __future__ import annotations

import torch

from .collectives import all_to_all_rows, group, shapes_only


def ends_of_all_ranks(ends: torch.Tensor) -> torch.Tensor:
    """From this rank's ends, [experts], those of all ranks, [ranks, experts]."""
    return torch.stack(group().all_gather(ends))


def counts_of_sorted(keys: torch.Tensor, bins: int, low: float, high: float) -> torch.Tensor:
    """`torch.histc` of this rank's keys, which are sorted: how many rows each expert has, [bins].

    Rows are where these numbers say only if the first expert's are the first: keys below `low`, which are not counted,
    would shift all others.

    Raises:
        RuntimeError: There is such a key (on a GPU: when the device next waits for it).
    """
    if keys.shape[0] and not shapes_only():
        torch._assert_async(keys[0] >= low, f"an expert's number is below {low}, the first that is counted")
    return torch.histc(keys, bins, low, high)


def send_to_experts(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rows that all ranks have for this rank's experts, sorted by expert.

    Args:
        x: This rank's rows, sorted by expert, [rows, ...]; those behind the last end are not sent.
        ends: See the module, [ranks, experts].
    """
    sent, received = _sizes(x, ends)
    rows = all_to_all_rows(x[: sum(sent)], sent, received)
    return rows[_by_expert(rows, ends)]


def return_from_experts(x: torch.Tensor, ends: torch.Tensor, rows: int) -> torch.Tensor:
    """This rank's rows, in the order in which they were given to `send_to_experts`.

    Args:
        x: The rows of this rank's experts, sorted by expert.
        ends: See the module, [ranks, experts].
        rows: How many there were; those behind the last end are zeros.
    """
    sent, received = _sizes(x, ends)
    found = all_to_all_rows(x[_by_expert(x, ends).argsort()], received, sent)
    rest = rows - found.shape[0]
    return torch.cat([found, found.new_zeros(rest, *found.shape[1:])]) if rest else found


def ends_of_own_experts(ends: torch.Tensor) -> torch.Tensor:
    """Where the rows of each expert of this rank end in what `send_to_experts` gives, [experts of a rank]."""
    return _received(ends).sum(0).cumsum(0, dtype=ends.dtype)


def _counts(ends: torch.Tensor) -> torch.Tensor:
    """How many rows each rank has for each expert, [ranks, experts]."""
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))


def _received(ends: torch.Tensor) -> torch.Tensor:
    """How many rows each rank has for each expert of this rank, [ranks, experts of a rank]."""
    ranks = group()
    return _counts(ends).chunk(ranks.size, 1)[ranks.rank]


def _sizes(x: torch.Tensor, ends: torch.Tensor) -> tuple[list[int], list[int]]:
    """How many rows this rank has for each rank, and each rank for this one."""
    ranks = group()
    if shapes_only():  # how many there are is not known: as many for each
        even = [x.shape[0] * (r + 1) // ranks.size - x.shape[0] * r // ranks.size for r in range(ranks.size)]
        return even, even
    counts = _counts(ends).view(ranks.size, ranks.size, -1).sum(2)
    sent, received = torch.stack([counts[ranks.rank], counts[:, ranks.rank]]).tolist()
    return sent, received


def _by_expert(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of received rows, which come rank by rank: the order in which they are sorted by expert."""
    borders = _received(ends).flatten().cumsum(0)
    run = torch.searchsorted(borders, torch.arange(x.shape[0], device=x.device), right=True)
    return (run % (ends.shape[1] // group().size)).argsort(stable=True)
