"""What small models are verified on: processes that stay, so that no run starts Python, and devices to plan for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopart.cluster import Cluster, Link
from autopart.errors import VerificationError
from autopart.runtime.process import Process
from autopart.verification.worker import execute, imported
from tests.pool import JobError, Pool


class Processes:
    """The pool of the tests as a launcher for `verify`."""

    def __enter__(self) -> Processes:
        self._pool = Pool()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    def launch(self, job_file: Path, processes: int, timeout_s: float) -> list[dict[str, Any]]:
        """Run a job (see `autopart.verification.worker`); the results by rank."""
        try:
            return self._pool.run(processes, run_job, str(job_file), timeout_s=timeout_s)
        except JobError as error:
            raise VerificationError(str(error)) from error


def run_job(rank: int, job_file: str) -> dict[str, Any]:
    """One process of a job."""
    job = torch.load(job_file, weights_only=True)
    with imported(job["package"]):
        return execute(job, Process(rank, dist.get_world_size(), torch.device("cpu")))


def swift_cluster(devices: int) -> Cluster:
    """CPUs that start everything in no time, joined by a fast link: on others small models are best not split."""
    cluster = Cluster.parse(["CPU"] * devices)
    link = Link("swift", 0.0, 1e12)
    swift = tuple(replace(device, launch_s=0.0) for device in cluster.devices)
    return replace(cluster, devices=swift, intra_node=link, inter_node=link)
