"""Verification jobs in the shared worker pool instead of under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import JobError, Pool

from autopart.errors import VerificationError
from autopart.runtime.process import Process
from autopart.verification.check import Launch
from autopart.verification.worker import execute, imported


def run_job(rank: int, job_file: str) -> dict[str, Any]:
    """One process of a job."""
    job = torch.load(job_file, weights_only=True)
    with imported(job["package"]):
        return execute(job, Process(rank, dist.get_world_size(), torch.device("cpu")))


def in_pool(pool: Pool) -> Launch:
    """A launcher for `verify` that uses the pool."""

    def launch(job_file: Path, processes: int, timeout_s: float) -> list[dict[str, Any]]:
        try:
            return pool.run(processes, run_job, str(job_file), timeout_s=timeout_s)
        except JobError as error:
            raise VerificationError(str(error)) from error

    return launch
