"""Clocks: what a GPU's would tell, on a made-up device and host whose times are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopart.profiler import clocks
from autopart.profiler.clocks import CpuClock, CudaClock


class Machine:
    """A host that starts kernels and a device that runs them one after the other; `now` is the host's time."""

    def __init__(self, launch_s: float, run_s: float, waits: bool = False) -> None:
        self.launch_s, self.run_s, self.waits = launch_s, run_s, waits
        self.now = self.device_free = 0.0

    def operator(self) -> None:
        self.now += self.launch_s
        self.device_free = max(self.device_free, self.now) + self.run_s
        if self.waits:
            self.now = self.device_free

    def sleep(self, cycles: int) -> None:
        self.device_free = max(self.device_free, self.now) + cycles / CudaClock._CYCLES_PER_S

    def synchronize(self) -> None:
        self.now = max(self.now, self.device_free)

    def event(self, enable_timing: bool) -> Any:
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", max(self.device_free, self.now))
        made.elapsed_time = lambda end: 1e3 * (end.at - made.at)
        return made


def told(machine: Machine, monkeypatch: pytest.MonkeyPatch, overhead_s: float = 0.0) -> float:
    for name, value in (("synchronize", machine.synchronize), ("_sleep", machine.sleep), ("Event", machine.event)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    (seconds,) = CudaClock().samples([machine.operator] * 8, overhead_s)
    return seconds


@pytest.mark.parametrize(("launch_us", "run_us"), [(5, 100), (5, 6), (5, 2), (50, 1)])
def test_the_slower_of_host_and_device_counts(launch_us: float, run_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = told(Machine(1e-6 * launch_us, 1e-6 * run_us), monkeypatch)
    assert seconds == pytest.approx(1e-6 * max(launch_us, run_us))


def test_overhead_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(Machine(30e-6, 1e-6), monkeypatch, overhead_s=20e-6) == pytest.approx(10e-6)
    assert told(Machine(30e-6, 40e-6), monkeypatch, overhead_s=20e-6) == pytest.approx(40e-6)


def test_an_operator_that_waits_for_its_device_is_not_charged_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(Machine(5e-6, 10e-6, waits=True), monkeypatch) == pytest.approx(15e-6)


def test_one_thread_is_timed_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the thread's clock only; with two threads the wall's."""
    ticks = {"thread": 0.0, "wall": 0.0}

    def reader(name: str, step: float) -> Any:
        def read() -> float:
            ticks[name] += step
            return ticks[name]

        return read

    fake = SimpleNamespace(thread_time=reader("thread", 1.0), perf_counter=reader("wall", 1.0))
    monkeypatch.setattr(clocks, "time", fake)
    for threads, used in ((1, "thread"), (2, "wall")):
        ticks.update(thread=0.0, wall=0.0)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert CpuClock().samples([lambda: None] * 3, 0.0) == [0.0] * 3
        assert [name for name, ticked in ticks.items() if ticked] == [used]


def test_reading_the_clock_is_not_charged_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"now": 0.0}

    def read() -> float:
        state["now"] += 0.5
        return state["now"]

    def run() -> None:
        state["now"] += 2.0

    monkeypatch.setattr(clocks, "time", SimpleNamespace(thread_time=read, perf_counter=read))
    assert CpuClock().samples([run] * 4, 0.75) == [pytest.approx(1.25)] * 4
