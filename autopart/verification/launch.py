"""Starting the processes of a verification on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from autopart.errors import VerificationError

WORKER = Path(__file__).with_name("worker.py")
# Longer than the 30 s after which torchrun kills processes that do not end: killed before that, it would leave them.
GRACE_S = 45.0
# How often it is looked at what a launcher that ends has started.
POLL_S = 0.05


def with_torchrun(job_file: Path, processes: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run a job in `processes` processes over gloo, one thread each; the results by rank.

    Raises:
        VerificationError: A process failed, or they did not finish in time.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(WORKER), str(job_file)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise VerificationError(f"the package did not finish within {timeout_s:g} s") from error
    finally:
        _stop(process)
    if process.returncode:
        said = [line for line in errors.splitlines() if line.startswith("autopart:")]
        raise VerificationError("the package failed: " + (said or errors.splitlines()[-1:] or ["no message"])[0])
    files = [job_file.with_name(f"results-{rank}.pt") for rank in range(processes)]
    for rank, file in enumerate(files):
        if not file.is_file():
            raise VerificationError(f"the package failed: process {rank} ended without a result")
    return [torch.load(file, weights_only=True) for file in files]


def _stop(process: subprocess.Popen[str]) -> None:
    """End a launcher that still runs, and what it started.

    Told to end, torchrun ends its processes first; killed, it would leave them. It also leaves one that it is just
    starting when it is told.
    """
    if process.poll() is not None:
        return
    launcher, started = psutil.Process(process.pid), set[psutil.Process]()
    deadline = time.monotonic() + GRACE_S
    process.terminate()
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            started.update(launcher.children(recursive=True))
        if time.monotonic() > deadline:
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=POLL_S)
    for left in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
