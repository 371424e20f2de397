"""What a process does for the tests of tensor ranks."""

from __future__ import annotations

import importlib
import io
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist

from autopart.runtime.process import Process
from autopart.verification.worker import imported

LEARNING_RATE = 0.05
Place = tuple[int, str]


def process(rank: int) -> Process:
    return Process(rank, dist.get_world_size(), torch.device("cpu"))


def train(
    rank: int, folder: str, schedule: str, weights: str, batches: list[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Steps of gradient descent, then one evaluation; what this process holds, by (stage, name)."""
    with imported(folder) as module:
        engine = importlib.import_module("runtime.train").build(
            module.PIPELINE,
            schedule=schedule,
            microbatches=module.PIPELINE.microbatches,
            seed=0,
            dtype=torch.float64,
            process=process(rank),
            weights_file=weights,
        )
        optimizer = torch.optim.SGD(engine.parameters(), LEARNING_RATE)
        steps: list[dict[str, Any]] = []
        for batch in batches:
            optimizer.zero_grad()
            loss, kept = engine.step(batch, ("logits",))
            tensors: dict[Place, torch.Tensor | None] = {}
            for stage, part in engine.modules.items():
                tensors |= {(stage, name): p.grad for name, p in part.named_parameters()}
                tensors |= {(stage, name): b.clone() for name, b in part.named_buffers()}
            steps.append({"loss": loss, "tensors": tensors, "logits": [k["logits"] for k in kept]})
            optimizer.step()
        result = engine.evaluate(batches[0])
        return {"rank": engine.mesh.rank, "steps": steps, "evaluated": None if result is None else result["logits"]}


def command(rank: int, folder: str, arguments: list[str]) -> str:
    """What `train.py` prints with these arguments, in this process."""
    with imported(folder) as module:
        runtime = importlib.import_module("runtime.train")
        options = runtime.parser(module.PIPELINE).parse_args(arguments)
        with redirect_stdout(io.StringIO()) as printed:
            runtime.run(module.PIPELINE, options, process(rank))
        return printed.getvalue()
