"""What recomputing blocks is worth where memory is short: plans with it, beside the best first plan without it.

A first plan is the best of some thousand cuts of a few topological orders; where it has none, "no plan found" is no
proof that there is none.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopart
from autopart.cluster import Cluster
from autopart.solver.solve import first_value
from autopart.workload import Workload
from benchmarks.output import parser, show


def gpt2_medium() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))


def llama_3_8b() -> nn.Module:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8, use_cache=False))


# Name -> (model, devices, rows, tokens, microbatches, dtype).
CASES = {
    "GPT-2 medium": (gpt2_medium, "4xT4", 32, 1024, 4, "float32"),
    "Llama-3-8B": (llama_3_8b, "4xA100-40G", 8, 4096, 8, "bfloat16"),
}


def main() -> None:
    """Plan each case, and show it."""
    chosen = parser(__doc__).parse_args()
    show([row(name, *case) for name, case in CASES.items()], chosen.json)


def row(name: str, build: Any, gpus: str, rows: int, tokens: int, microbatches: int, dtype: str) -> dict[str, Any]:
    """One case, in four stages of one device each."""
    with torch.device("meta"):
        model = build()
        ids = torch.zeros(rows, tokens, dtype=torch.long)
    start = time.perf_counter()
    plan = autopart.partition(
        model,
        gpus,
        example_kwargs={"input_ids": ids, "labels": ids},
        stages=4,
        tensor=1,
        microbatches=microbatches,
        dtype=dtype,
        check=False,
    )
    seconds = time.perf_counter() - start
    strategy = plan.strategy
    kept = Workload("training", microbatches, strategy.microbatch_size, strategy.schedule, plan.optimizer)
    without = min(
        first_value(plan.graph, plan.costs, Cluster.parse(gpus), kept, 4, granularity)
        for granularity in ("block", "operator")
    )
    layers = sum(len(stage.recomputed) for stage in plan.per_stage)
    return {
        "model": name,
        "devices": gpus,
        "step without, s": "no plan found" if math.isinf(without) else round(without, 3),
        "step, s": round(plan.step_time_s, 3),
        "gap, %": round(100 * plan.gap, 2),
        "blocks recomputed": layers,
        "in all, s": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
