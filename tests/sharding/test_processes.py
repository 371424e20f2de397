"""The collectives over real processes (gloo): every function against the same on threads, values and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopart.runtime import collectives
from autopart.runtime.collectives import ProcessRanks
from tests.sharding.ranks import ThreadRanks

SIZE = 2
# Rank -> how many rows it has for each rank, and each rank for it.
ROWS = [([1, 5], [1, 4]), ([4, 2], [5, 2])]
ALL_TO_ONE = [([0, 6], [0, 0]), ([0, 6], [6, 6])]


def programs() -> list[Any]:
    """Every function, on a value of shape [6, 4] or a shard of it."""
    return [
        collectives.copy_to,
        collectives.all_reduce,
        lambda x: collectives.all_reduce(x, partial_gradient=True),
        lambda x: collectives.all_gather(x, 1),
        lambda x: collectives.all_gather(x, 0, partial_gradient=True),
        lambda x: collectives.split(x, 0),
        lambda x: collectives.split(x, 0, [4, 2], partial_gradient=True),
        lambda x: collectives.reduce_scatter(x, 0),
        lambda x: collectives.reduce_scatter(x, 0, [5, 1]),
        lambda x: collectives.all_to_all(x, 0, 1),
        lambda x: collectives.all_to_all(x, 0, 0, [6, 6], [12]),
        lambda x: collectives.all_to_all_rows(x, *ROWS[collectives.group().rank]),
        lambda x: collectives.all_to_all_rows(x, *ALL_TO_ONE[collectives.group().rank]),
        collectives.share,
        collectives.share_gradient,
        lambda x: collectives.place(x, 1),
    ]


def run(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    results = []
    for number, program in enumerate(programs()):
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        y = program(x)
        seed = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        results.append((y.detach(), torch.autograd.grad(y, x, seed)[0]))
    return results


def worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
    collectives.use(ProcessRanks())
    torch.save(run(rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_processes_exchange_what_threads_exchange(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), SIZE)
    wanted = ThreadRanks(SIZE).run(run)
    for rank in range(SIZE):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found) == len(programs())
        for (a, b), (c, d) in zip(found, wanted[rank], strict=True):
            torch.testing.assert_close(a, c, rtol=0, atol=1e-14)
            torch.testing.assert_close(b, d, rtol=0, atol=1e-14)
