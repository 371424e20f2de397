"""Marks: from when on a process does what in a step, by whatever clock is asked for.

What lies between a mark and the next one belongs to the first: a piece of work, or nothing of these, which is waiting
for other processes, exchanging with them, and the Python of the schedule. So pieces and waiting always add up to the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from .engine import Engine, OneProcess, Pipelined


class Piece(NamedTuple):
    """What is computed: "forward", "backward" (of its inputs alone, where the schedule splits it), "weights" (the rest
    of a split backward) of a microbatch in a stage, or "optimizer"."""

    kind: str
    stage: int = -1
    microbatch: int = -1


Mark = tuple[Piece | None, Any]
"""What begins, and the clock's reading."""

OF_STAGES = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weights"}
"""Method of a `PipelineStage`, whose first argument is a microbatch's number -> kind of the piece."""


class Marks:
    """Follows the stages and the optimizer of one process."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._clock: Callable[[], Any] | None = None
        self._made: list[Mark] = []
        optimizer.register_step_pre_hook(lambda *_: self._mark(Piece("optimizer")))
        optimizer.register_step_post_hook(lambda *_: self._mark(None))
        if isinstance(engine, Pipelined) and engine.pipeline.loss is not None:
            for stage in engine.torch_stages:
                for method, kind in OF_STAGES.items():
                    setattr(stage, method, partial(self._piece, getattr(stage, method), kind, stage.stage_index))
            return
        for index, adapter in engine.adapters.items():
            adapter.run = partial(self._run, adapter.run, index)  # type: ignore[method-assign]
        if isinstance(engine, OneProcess):
            # Where one backward runs through all stages, it ends here.
            engine.ties.sum_gradients = partial(self._after_backward, engine.ties.sum_gradients)  # type: ignore[method-assign]

    @contextmanager
    def of_step(self, clock: Callable[[], Any]) -> Iterator[list[Mark]]:
        """The marks of what runs in this context, its beginning and its end included."""
        self._clock, self._made = clock, []
        self._mark(None)
        yield self._made
        self._mark(None)
        self._clock = None

    def _mark(self, piece: Piece | None) -> None:
        if self._clock is not None:
            self._made.append((piece, self._clock()))

    def _piece(self, run: Callable[..., Any], kind: str, stage: int, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        self._mark(Piece(kind, stage, microbatch))
        result = run(microbatch, *args, **kwargs)
        self._mark(None)
        return result

    def _run(
        self, run: Callable[..., Any], stage: int, microbatch: int, received: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """A stage's forward in an engine that calls it itself; backward is seen when it enters the stage."""
        known: dict[str, torch.Tensor] = self._piece(run, "forward", stage, microbatch, received)
        if self._clock is not None:
            for tensor in known.values():
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._entered, Piece("backward", stage, microbatch)))
        return known

    def _entered(self, piece: Piece, _: torch.Tensor) -> None:
        """Backward has come to a value that a stage gives. Autograd runs what was made last first, so from here on it
        is in that stage; for a value that only passes through, an earlier stage has said so already."""
        current = self._made[-1][0]
        if current is None or piece.stage < current.stage:
            self._mark(piece)

    def _after_backward(self, run: Callable[..., Any], *args: Any) -> None:
        self._mark(None)
        run(*args)
