"""When a process fails, the run ends soon, nobody is left behind, and the culprit is named once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from written_package import environment, torchrun, train, write


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("package"))


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("autopart:")]


def test_the_process_that_raises_is_named_with_its_stage_and_reason(script: Path) -> None:
    done = train(script, "--steps", "50", processes=4, TROUBLE="raise@2")
    assert done.returncode != 0
    assert told(done) == ["autopart: process 2 (stage 2) failed in step 1: ValueError: the coffee is cold"]
    # torchrun's own summary holds the reason, too.
    assert "the coffee is cold" in done.stderr.partition("Root Cause")[2]


def test_the_process_that_is_killed_is_named_with_its_stage(script: Path) -> None:
    done = train(script, "--steps", "50", processes=4, TROUBLE="kill@1")
    assert done.returncode != 0
    assert len(told(done)) == 1
    assert re.fullmatch(r"autopart: process 1 \(stage 1\) died \(process id \d+\)", told(done)[0])


def test_a_stopped_process_ends_the_run_after_the_timeout(script: Path) -> None:
    done = train(script, "--steps", "50", "--timeout-s", "5", "--schedule", "zbv", processes=2, TROUBLE="stop@1")
    assert done.returncode != 0
    assert len(told(done)) == 1
    assert "process 0 (stages 0 and 3) gave up in step 1 after 5 s waiting for stages 1 and 2" in told(done)[0]


def test_no_process_outlives_torchrun(script: Path) -> None:
    run = subprocess.Popen(
        torchrun(2, script, "--steps", "100000", "--schedule", "zbv"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=script.parent,
    )
    assert run.stdout is not None
    while "step 1 " not in run.stdout.readline():
        assert run.poll() is None
    workers = psutil.Process(run.pid).children(recursive=True)
    assert len(workers) >= 2
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 10
    while any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.1)


def test_a_wrong_shape_at_a_boundary_is_told_with_both_shapes(script: Path) -> None:
    done = train(script, "--steps", "1", processes=4, TROUBLE="shape@1")
    assert done.returncode != 0
    assert len(told(done)) == 1
    assert "[2, 3, 16]" in told(done)[0] and "[2, 4, 16]" in told(done)[0] and "stage 1" in told(done)[0]
