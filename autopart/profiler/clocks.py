"""Clocks: how long work takes on a device.

CPU: with one thread the clock is the thread's own CPU time, which is what an idle machine's wall clock would show and
does not count waiting for a busy one; with more threads it is the wall clock. A result is let go within its run. From
its second step on, a model too gets most of its memory from what was let go before (four layers of GPT-2 that save
79 MB touch 10 MB of new pages in a step); and both get large tensors from the system, and give them back, every time.

GPU: a run takes as long as the slower of the host, which starts its kernels, and the device, which executes them. Both
come from one pass, in which the device is kept waiting until the host has started everything, so that its events see no
gaps; a pass before it gauges how long that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch

Run = Callable[[], Any]


class Clock(Protocol):
    """Tells seconds of runs on one kind of device."""

    def samples(self, runs: Sequence[Run], overhead_s: float) -> list[float]:
        """Seconds of the runs, one for each or their mean alone.

        Args:
            overhead_s: What the host spends on each run that is not to be counted.
        """
        ...


class CpuClock:
    """Thread time, or wall time where torch has several threads."""

    def __init__(self) -> None:
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._reading_s = median(self._read() for _ in range(200))

    def samples(self, runs: Sequence[Run], overhead_s: float) -> list[float]:
        now, seconds = self._now, []
        for run in runs:
            start = now()
            run()
            seconds.append(now() - start)
        return [max(0.0, one - self._reading_s - overhead_s) for one in seconds]

    def _read(self) -> float:
        start = self._now()
        return self._now() - start


class CudaClock:
    """Host time and CUDA events of the current device."""

    # Of the clock that `_sleep` counts, on any GPU of the catalogue; a longer wait than needed does no harm.
    _CYCLES_PER_S = 2e9
    _LONGEST_WAIT_S = 0.1

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def samples(self, runs: Sequence[Run], overhead_s: float) -> list[float]:
        torch.cuda.synchronize()
        idle_s = self._host(runs)
        torch.cuda.synchronize()
        # Private, and the way in which torch's own tests keep a stream busy.
        torch.cuda._sleep(int(self._CYCLES_PER_S * min(2 * idle_s, self._LONGEST_WAIT_S)))
        self._start.record()
        waiting_s = self._host(runs)
        self._end.record()
        torch.cuda.synchronize()
        device_s = 1e-3 * self._start.elapsed_time(self._end)
        # An operator that waits for its result (a mask as an index) waits for the sleeping device too.
        host_s = min(idle_s, waiting_s)
        return [max(host_s / len(runs) - overhead_s, device_s / len(runs))]

    @staticmethod
    def _host(runs: Sequence[Run]) -> float:
        start = time.perf_counter()
        for run in runs:
            run()
        return time.perf_counter() - start


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
