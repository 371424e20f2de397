"""How long does the analytic profile itself take, and how much memory?

Llama-3-8B and a decoder of 126 layers and 405 billion parameters (Llama-3.1-405B's shape), both on `meta`: seconds of
this process's CPU for building, for the capture, and for the profile on one H100. Each distinct operator is run once,
so the profile grows with the number of nodes, not with their sizes.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from autopart.cluster import Cluster
from autopart.profiler import profile
from autopart.tracer import trace
from benchmarks.output import parser, show

logging.set_verbosity_error()

SHAPES = {
    "Llama-3-8B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "405B": {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}


def row_of(name: str, length: int) -> dict[str, Any]:
    """CPU seconds of each step for one model."""
    start = time.process_time()
    config = LlamaConfig(**SHAPES[name], num_key_value_heads=8, vocab_size=128256, use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tokens = torch.zeros(1, length, dtype=torch.long)
    built = time.process_time()
    graph = trace(model, (), {"input_ids": tokens, "labels": tokens}, check=False)
    captured = time.process_time()
    costs = profile(graph, Cluster.parse("H100-80G"))
    done = time.process_time()
    return {
        "model": name,
        "parameters, B": sum(p.numel() for p in model.parameters()) / 1e9,
        "nodes": len(graph.primary.calls),
        "build, s": built - start,
        "capture, s": captured - built,
        "profile, s": done - captured,
        "peak memory, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "predicted forward and backward, s": sum(
            time.forward_s + time.backward_s for time in costs.times["H100-80G"].values()
        ),
    }


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--length", type=int, default=4096, help="tokens of the one row")
    arguments: argparse.Namespace = options.parse_args()
    show([row_of(name, arguments.length) for name in SHAPES], arguments.json)
