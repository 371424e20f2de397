"""Are predicted GPU times near measured ones? Against the times that the zero-bubble paper printed.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), tables 3 and 6: milliseconds of one stage of a GPT for one
microbatch on A100 80 GB, apart for the forward (F), the gradients of activations (B) and those of weights (W). A stage
there has (layers + 2) / stages transformer layers, in half precision, by Megatron-LM, whose fused kernels eager PyTorch
does not have; so F and B are expected to be predicted somewhat high, and W, which is matrix products alone, close.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from transformers import GPT2Config, GPT2Model
from transformers.utils import logging

from autopart.cluster import Cluster
from autopart.profiler import profile
from autopart.tracer import trace
from benchmarks.output import parser, show

logging.set_verbosity_error()


@dataclass(frozen=True)
class Setting:
    """A row of table 3, and the first of its rows in table 6 (milliseconds)."""

    name: str
    layers: int
    heads: int
    hidden: int
    stages: int
    microbatch: int
    forward: float
    backward_input: float
    backward_weight: float


SEQUENCE = 1024
SETTINGS = (
    Setting("GPT 1.5B", 22, 24, 2304, 8, 6, 18.522, 18.086, 9.337),
    Setting("GPT 6.2B", 30, 32, 4096, 8, 3, 29.718, 29.444, 19.927),
    Setting("GPT 14.6B", 46, 40, 5120, 16, 1, 11.347, 11.248, 8.132),
    Setting("GPT 28.3B", 62, 48, 6144, 32, 1, 10.419, 10.207, 7.715),
)


def predicted(setting: Setting) -> tuple[float, float, float]:
    """Milliseconds of the transformer layers of one stage."""
    config = GPT2Config(
        n_layer=(setting.layers + 2) // setting.stages,
        n_head=setting.heads,
        n_embd=setting.hidden,
        n_positions=SEQUENCE,
        use_cache=False,
    )
    with torch.device("meta"):
        model = GPT2Model(config).bfloat16()
        embedded = torch.empty(setting.microbatch, SEQUENCE, setting.hidden, dtype=torch.bfloat16, requires_grad=True)
    graph = trace(model, (), {"inputs_embeds": embedded}, check=False)
    times = profile(graph, Cluster.parse("A100-80G")).times["A100-80G"]
    layers = [
        times[node.name]
        for node in graph.primary.calls
        if any(path.startswith("h.") for path, _ in node.meta["nn_module_stack"].values())
    ]
    return (
        1e3 * sum(time.forward_s for time in layers),
        1e3 * sum(time.backward_input_s for time in layers),
        1e3 * sum(time.backward_weight_s for time in layers),
    )


def run(_: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each setting and phase."""
    rows = []
    for setting in SETTINGS:
        measured = (setting.forward, setting.backward_input, setting.backward_weight)
        for phase, ours, theirs in zip("FBW", predicted(setting), measured, strict=True):
            rows.append(
                {
                    "model": setting.name,
                    "phase": phase,
                    "measured, ms": theirs,
                    "predicted, ms": ours,
                    "ratio": ours / theirs,
                }
            )
    summary = {
        f"mean ratio of {phase}": round(fmean(row["ratio"] for row in rows if row["phase"] == phase), 3)
        for phase in "FBW"
    }
    return rows, summary


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    comparison, means = run(options)
    show(comparison, options.json, means)
