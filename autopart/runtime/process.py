"""This process among the others: its number, its device, and who is to blame when a step cannot go on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

PARENT_POLL_S = 0.5
# A process that fails writes the reason at once; its peers notice the closed connection a moment earlier.
REASON_WAIT_S = 2.0


@dataclass
class Process:
    """One process of a run.

    Attributes:
        store: Shared by all processes, None when there is only one.
        stages, rank: What it holds, and its tensor rank if there are several; set when known, for messages.
        step: Which step it is in, for messages.
    """

    number: int
    count: int
    device: torch.device
    store: Any = None
    timeout_s: float = 0.0
    stages: Sequence[int] = ()
    rank: int | None = None
    step: int | None = None
    _waits_for: str = ""
    _pids: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    _told: bool = False
    _telling: threading.Lock = field(default_factory=threading.Lock)

    @property
    def title(self) -> str:
        return f"process {self.number} ({self._holds()})" if self.stages else f"process {self.number}"

    def introduce(self, stages: Sequence[int], count: int, rank: int, ranks: int) -> None:
        """Tell the others which of `count` stages and which of `ranks` tensor ranks live here, and learn theirs."""
        self.stages, self.rank = stages, rank if ranks > 1 else None
        beside = {s + step for s in stages for step in (-1, 1)} - set(stages)
        neighbours = [s for s in sorted(beside) if 0 <= s < count]
        peers = [_numbers(neighbours)] * bool(neighbours) + [f"tensor ranks of {_numbers(stages)}"] * (ranks > 1)
        self._waits_for = " or ".join(peers)
        if self.store is not None:
            self.store.set(f"process/{self.number}", f"{socket.gethostname()} {os.getpid()} {self._holds()}")
            for other in range(self.count):
                host, pid, what = self.store.get(f"process/{other}").decode().split(" ", 2)
                self._pids[other] = (host, int(pid), what)

    def say(self, reason: str) -> bool:
        """Tell the person at the terminal why the run ends, unless another process has done so."""
        with self._telling:
            if self._told:
                return True
            if self.store is not None:
                mine = f"{self.number} {reason}"
                if self.store.compare_set("reason", "", mine).decode() != mine:
                    return False
            print(f"autopart: {reason}", file=sys.stderr, flush=True)
            self._told = True
            return True

    def end(self, status: int) -> NoReturn:
        """End at once, whatever other threads wait for, but not in the middle of telling the reason."""
        with self._telling:
            os._exit(status)

    def blame(self, error: BaseException) -> bool:
        """Tell what ended the run; False when that is for another process to tell.

        A failed exchange has its cause elsewhere: the process that raised has written its reason to the store, one that
        died shows by its process id.
        """
        where = f"in step {self.step}" if self.step is not None else "outside of the steps"
        error = _cause(error)
        if self.store is None or not _is_exchange(error):
            return self.say(f"{self.title} failed {where}: {_told(error)}")
        deadline = time.monotonic() + REASON_WAIT_S
        try:
            while time.monotonic() < deadline:
                if self.store.check(["reason"]):
                    return False
                if (reason := self._dead()) is not None:
                    return self.say(reason)
                time.sleep(0.05)
        except dist.DistError:
            return False  # torchrun, which hosts the store, is gone itself
        waited = f"after {self.timeout_s:g} s " if "imed out" in str(error) else ""
        return self.say(f"{self.title} gave up {where} {waited}waiting for {self._waits_for}: {_told(error)}")

    def leave_quietly(self, status: int) -> None:
        """End because of a signal, in a way that no peer takes this process for the cause."""
        try:
            if self.store is not None:
                self.store.set(f"leaving/{self.number}", "yes")
                if (reason := self._dead()) is not None:
                    self.say(reason)
        finally:
            self.end(status)

    def _holds(self) -> str:
        return _numbers(self.stages) + ("" if self.rank is None else f", tensor rank {self.rank}")

    def _dead(self) -> str | None:
        """Which process on this machine is gone without having said that it leaves."""
        for other, (host, pid, what) in self._pids.items():
            if other == self.number or host != socket.gethostname() or _alive(pid):
                continue
            if not self.store.check([f"leaving/{other}"]):
                return f"process {other} ({what}) died (process id {pid})"
        return None


@contextmanager
def joined(timeout_s: float, ranks: Sequence[int] = ()) -> Iterator[Process]:
    """Join the processes that torchrun started (gloo on CPUs, NCCL on GPUs); alone where it started none.

    Args:
        ranks: Process -> rank of torchrun (see `interface.Pipeline`); as they come, if there are not so many.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    number = int(os.environ.get("RANK", "0"))
    device = _device()
    if count == 1:
        yield Process(0, 1, device)
        return
    store, number, count = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    number = number_of(number, count, ranks)
    process = Process(number, count, device, dist.PrefixStore("autopart", store), timeout_s)
    _watch(process)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=number,
        world_size=count,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield process
    dist.destroy_process_group()


def number_of(rank: int, count: int, ranks: Sequence[int]) -> int:
    """The process that torchrun's rank is among `count`."""
    return ranks.index(rank) if len(ranks) == count else rank


def _watch(process: Process) -> None:
    """Two threads: one ends this process when torchrun is gone, one answers signals even while an exchange blocks."""
    parent = os.getppid()

    def parent_gone() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    # Whichever thread gets the signal, its number comes out of the pipe at once; a Python handler would have to wait
    # for the main thread.
    outlet, inlet = os.pipe()
    os.set_blocking(inlet, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(inlet)

    def signalled() -> None:
        while (number := os.read(outlet, 1)[0]) not in (signal.SIGTERM, signal.SIGINT):
            pass
        process.leave_quietly(128 + number)

    threading.Thread(target=parent_gone, daemon=True).start()
    threading.Thread(target=signalled, daemon=True).start()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _is_exchange(error: BaseException) -> bool:
    """Whether an error comes from talking to another process (gloo raises plain RuntimeErrors)."""
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(mark in text for mark in ("gloo", "NCCL", "by peer", "imed out"))


def _cause(error: BaseException) -> BaseException:
    """The innermost cause: schedules wrap what a stage raises, exchanges between its tensor ranks included."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _numbers(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"
