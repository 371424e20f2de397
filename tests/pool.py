"""Worker processes shared by all tests of a session: each job gets fresh process groups, the processes stay.

Starting a process that imports torch costs seconds, a process group in a running one milliseconds. A job that fails or
hangs takes only its own workers with it; the next job gets new ones.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 60
GRACE_AFTER_FAILURE_S = 10.0


class JobError(Exception):
    """A worker failed; the message holds the traceback of every worker that reported one.

    Attributes:
        reports: Rank -> traceback.
    """

    def __init__(self, reports: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(reports.items())))
        self.reports = reports


class Pool:
    """Runs `function(rank, *args)` in `count` processes with a gloo process group between them."""

    def __init__(self) -> None:
        # Workers are forked from one process that has imported torch and started no threads.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed.pipelining"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0

    def run(self, count: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """The results by rank.

        Raises:
            JobError: A worker raised, died, or did not finish in time.
        """
        while len(self._workers) < count:
            self._workers.append(self._start())
        self._jobs += 1
        job = pickle.dumps((f"job{self._jobs}", function, args))
        workers = self._workers[:count]
        for rank, (_, connection) in enumerate(workers):
            connection.send_bytes(pickle.dumps((rank, count, job)))
        results: dict[int, Any] = {}
        reports: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        ranks = {connection: rank for rank, (_, connection) in enumerate(workers)}
        while len(results) + len(reports) < count and time.monotonic() < deadline:
            pending = [c for c, rank in ranks.items() if rank not in results and rank not in reports]
            for ready in wait(pending, timeout=deadline - time.monotonic()):
                rank = ranks[ready]  # type: ignore[index]
                try:
                    failed, value = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    failed, value = True, "the process died"
                (reports if failed else results)[rank] = value
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        for rank, (process, _) in enumerate(workers):
            if rank not in results:
                reports.setdefault(rank, "no answer")
                process.kill()
                process.join()
                self._workers[rank] = self._start()
        if reports:
            raise JobError(reports)
        return [results[rank] for rank in range(count)]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._store.port, list(sys.path)), daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _serve(connection: Connection, port: int, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        try:
            rank, count, job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            name, function, args = pickle.loads(job)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(name, store),
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
            )
            answer = (False, function(rank, *args))
        except BaseException:
            answer = (True, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send_bytes(pickle.dumps(answer))
