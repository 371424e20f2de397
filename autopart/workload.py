"""Workload: what one optimizer step (or one inference pass) has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopart.graph import Graph, Mode

# Optimizer -> how many values of state it keeps for each trained parameter, in the parameter's dtype.
OPTIMIZER_STATES = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}
# How often its operators read or write as many bytes as the parameter has: torch/optim/sgd.py and adamw.py, whose
# operators run one after the other, over all parameters together (`foreach`, on a GPU) or one by one (on a CPU).
OPTIMIZER_PASSES = {"sgd": 3, "sgd-momentum": 8, "adam": 18, "adamw": 20}


def update_bytes(optimizer: str, size: int, cache_bytes: int) -> int:
    """Bytes to and from memory when one parameter is updated.

    Args:
        size: Of the parameter.
        cache_bytes: What stays near between two operators. A parameter that fits, with its gradient and state, is read
            once and written once.
    """
    states = OPTIMIZER_STATES[optimizer]
    once = 3 + 2 * states
    return size * (once if size * (2 + states) <= cache_bytes else OPTIMIZER_PASSES[optimizer])


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
