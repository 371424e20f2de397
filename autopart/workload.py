"""Workload: what one optimizer step (or one inference pass) has to do."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.graph import Mode


@dataclass(frozen=True)
class Workload:
    """One optimizer step (or one inference pass) over a global batch.

    Attributes:
        microbatches: Microbatches that flow through the pipeline in one step.
        microbatch_size: Rows in one of them.
        schedule: Name of the pipeline schedule, lower case ("gpipe", "1f1b", ...; see `autopart.schedules`).
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw"; decides the bytes of optimizer state.
    """

    mode: Mode
    microbatches: int
    microbatch_size: int
    schedule: str
    optimizer: str

    @property
    def global_batch(self) -> int:
        return self.microbatches * self.microbatch_size
