"""Link times: messages and collectives timed over a process group, one class of links after the other.

Run by every process of the group alike (under torchrun, on one machine or several). Two classes are told apart: links
inside the first machine, and links between machines, of which one process each takes part.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autopart.profiler.links import COLLECTIVES, Timing, What
from autopart.runtime.collectives import reduce_scatter_single
from autopart.sharding.conversions import sent_bytes

SIZES_BYTES = tuple(2**power for power in range(10, 26, 3))
REPEATS = 7
"""Of which the median counts."""
IN_A_ROW = 5
"""Operations of one repeat, where they are small enough to be disturbed by the clock."""
SMALL_BYTES = 1 << 20


def classes() -> dict[str, list[int]]:
    """Class of links -> ranks between which they are measured; a class that the group does not have is left out."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    first = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    each = [hosts.index(host) for host in dict.fromkeys(hosts)]
    return {name: ranks for name, ranks in (("intra_node", first), ("inter_node", each)) if len(ranks) > 1}


def members(device: torch.device) -> list[list[str]]:
    """The catalogue's (or the vendor's) names of the devices that take part, machine by machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), name))
    return [[name for at, name in found if at == host] for host in dict.fromkeys(host for host, _ in found)]


Progress = Callable[[What, int], None]
"""What is measured next, and among how many ranks."""


def measure(
    ranks: Sequence[int], device: torch.device, sizes: Sequence[int] = SIZES_BYTES, progress: Progress | None = None
) -> list[Timing]:
    """Times of everything among these ranks, as the first of them saw it; elsewhere an empty list.

    Every process of the default group calls this with the same arguments; the first of `ranks` calls `progress`.
    """
    found: list[Timing] = []
    for count in _group_sizes(len(ranks)):
        group = dist.new_group(list(ranks[:count]))
        if not isinstance(group, dist.ProcessGroup):  # this process is not in it
            continue
        me = dist.get_rank(group)
        kinds: tuple[What, ...] = (*(("send", "both_ways") if count == 2 else ()), *COLLECTIVES)
        for what in kinds:
            if progress is not None and me == 0:
                progress(what, count)
            for size in sizes:
                run, sent = _operation(what, size, group, device)
                seconds = _seconds(run, IN_A_ROW if size <= SMALL_BYTES else 1, group, device) / (
                    2 if what == "send" else 1
                )
                if me == 0:
                    found.append(Timing(what, count, sent, seconds))
    return found


def _group_sizes(ranks: int) -> list[int]:
    """Powers of two, and all."""
    return sorted({2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks} | {ranks})


def _operation(
    what: What, size: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[[], object], int]:
    """One operation whose whole tensor has about `size` bytes, and the bytes that a rank sends in it."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    if what in ("send", "both_ways"):
        buffer, received = (torch.zeros(size // 4, device=device) for _ in range(2))
        peer = dist.get_global_rank(group, 1 - me)

        def there_and_back() -> None:
            for turn in (dist.send, dist.recv) if me == 0 else (dist.recv, dist.send):
                turn(buffer, peer, group)

        def both_ways() -> None:
            operations = [dist.P2POp(dist.isend, buffer, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
            for request in dist.batch_isend_irecv(operations):
                request.wait()

        return (there_and_back if what == "send" else both_ways), 4 * buffer.numel()
    shard = torch.zeros(max(1, size // 4 // ranks), device=device)
    whole = torch.zeros(shard.numel() * ranks, device=device)
    pieces = list(torch.zeros_like(whole).chunk(ranks))
    other = torch.zeros_like(whole)
    runs: dict[What, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather(pieces, shard, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(shard, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    # Of an all-to-all `whole` is what one rank has.
    held = 4 * whole.numel() * (ranks if what == "all_to_all" else 1)
    return runs[what], sent_bytes(what, held, ranks)  # type: ignore[arg-type]


def _seconds(run: Callable[[], object], times: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Median seconds of one operation out of `times` in a row; the first, which sets connections up, do not count."""
    found = []
    for repeat in range(REPEATS + 1):
        dist.barrier(group)
        _settle(device)
        start = time.perf_counter()
        for _ in range(times):
            run()
        _settle(device)
        if repeat:
            found.append((time.perf_counter() - start) / times)
    return statistics.median(found)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
