"""Workload: what one optimizer step (or one inference pass) has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopart.graph import Graph, Mode

# Optimizer -> how many values of state it keeps for each trained parameter, in the parameter's dtype.
OPTIMIZER_STATES = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Workload:
    """One optimizer step (or one inference pass) over a global batch.

    Attributes:
        microbatches: Microbatches that flow through the pipeline in one step.
        microbatch_size: Rows in one of them.
        schedule: Name of the pipeline schedule, lower case ("gpipe", "1f1b", ...; see `autopart.schedules`).
        optimizer: A key of `OPTIMIZER_STATES`.
        recomputable: Says of each block of a graph why backward cannot compute it again under a schedule, None where it
            can (`codegen.recomputable`); it then does where that is needed to fit, or pays. None: nothing is.
    """

    mode: Mode
    microbatches: int
    microbatch_size: int
    schedule: str
    optimizer: str
    recomputable: Callable[[Graph, str], Mapping[str, str | None]] | None = None

    @property
    def global_batch(self) -> int:
        return self.microbatches * self.microbatch_size
