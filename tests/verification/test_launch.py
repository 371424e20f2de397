"""A launcher that is stopped leaves none of its processes, whatever it does when it is told to end."""

import subprocess
import sys
import time

import psutil
import pytest

from autopart.verification import launch

# Starts a process in a session of its own, as torchrun does, says so, and waits.
LAUNCHER = """
import signal, subprocess, sys, time
{when_told}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""
WHEN_TOLD = {
    "it ends alone": "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(143)))",
    "it does not end": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
}


@pytest.mark.parametrize("told", WHEN_TOLD)
def test_no_process_is_left(monkeypatch, told):
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    command = [sys.executable, "-c", LAUNCHER.format(when_told=WHEN_TOLD[told])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    started = psutil.Process(process.pid).children(recursive=True)
    launch._stop(process)
    gone, alive = psutil.wait_procs(started, timeout=30)
    assert len(gone) == 1 and not alive and process.poll() is not None


def test_one_that_it_starts_when_it_is_told_is_not_left_either(tmp_path):
    """torchrun may be told between starting a process and noting that it has."""
    noted = tmp_path / "pid"
    late = f"""
import signal, subprocess, sys, time
def told(*_):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open({str(noted)!r}, "w").write(str(child.pid))
    time.sleep(0.5)
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
print("started", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", late], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    launch._stop(process)
    pid, deadline = int(noted.read_text()), time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
