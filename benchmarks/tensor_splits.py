"""Do the chosen tensor splits beat the layouts that people write by hand? Layers of GPT-2 and Llama-3 on 2, 4, 8 GPUs.

Every row is one microbatch, forward and backward, of a model of one or two layers with embedding, head and loss, at its
published width, priced on H100 GPUs by the analytic profile and the catalogue's link. `classic` and `sequence` are
Megatron-LM's layouts, forced through the same program at the same prices; a ratio above 1 says how much slower they are
than the chosen one. `-`: the layout does not exist, for t does not divide the heads. Words and collectives are those of
the (first) layer. `solve` is wall time of stating and solving the program for the chosen layouts.

AutoParallel (meta-pytorch) publishes no times of layers; what is known of its planning time stands below the table.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from autopart.cluster import Cluster
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.profiler import LayoutPrices
from autopart.solver.layouts import LayoutChoice, choose_layouts
from autopart.solver.megatron import megatron
from autopart.tracer import trace
from benchmarks.output import parser, show

logging.set_verbosity_error()

LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "use_cache": False}
WIDTHS = {
    "Llama-3-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "Llama-3-70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}
# Model -> (rows, tokens of a row) of one microbatch.
SIZES = {
    "GPT-2": ((1, 1024), (8, 1024)),
    "Llama-3-8B": ((1, 2048), (4, 2048), (1, 8192)),
    "Llama-3-70B": ((1, 2048), (4, 2048), (1, 8192)),
}
DEGREES = (2, 4, 8)

PUBLISHED = {
    "AutoParallel, GPT-2 small on a 2 x 4 mesh, measured on two CPU cores": "302 s in all, 540,812 variables",
    "AutoParallel, Llama-3-8B on 64 GPUs in 2-D, their statement": "15.1 s to build + 36.5 s to solve",
}


class LossOnly(nn.Module):
    """A language model whose one result is its loss: all that training needs of the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def built(name: str, layers: int) -> nn.Module:
    """A model of `layers` layers at its published width, without weights and without dropout."""
    with torch.device("meta"):
        if name == "GPT-2":
            rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            return LossOnly(GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False, **rates))).bfloat16()
        config = LlamaConfig(**LLAMA, **WIDTHS[name], num_hidden_layers=layers, max_position_embeddings=8192)
        return LossOnly(LlamaForCausalLM(config)).bfloat16()


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, size and degree."""
    cluster = Cluster.parse(options.gpus)
    for name, sizes in SIZES.items():
        if options.models and name not in options.models:
            continue
        for layers in options.layers:
            model = built(name, layers)
            for batch, length in sizes:
                ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
                graph = trace(model, (), {"ids": ids, "labels": ids}, check=False)
                prices = LayoutPrices(graph, cluster)
                for t in DEGREES:
                    row = {"model": name, "layers": layers, "batch": f"{batch} x {length}", "t": t}
                    yield {**row, **compared(graph, prices, cluster, t)}


def compared(graph: Graph, prices: LayoutPrices, cluster: Cluster, t: int) -> dict[str, Any]:
    """The chosen layouts and Megatron's two."""
    ours = choose_layouts(graph, prices, cluster, t)
    value = ours.value
    classic, sequence = (forced(graph, prices, cluster, t, between) for between in ("replicated", "sequence"))
    return {
        "ours, ms": 1e3 * ours.time_s,
        "of which sent": 1e3 * value.communication_s,
        "classic": ratio(classic, ours),
        "sequence": ratio(sequence, ours),
        "gap": f"{ours.gap:.0e}",
        "MB sent": (value.forward_bytes + value.backward_bytes + value.inside_bytes) / 1e6,
        "state": value.state_bytes / sum(_whole_state(graph)),
        "solve, s": ours.seconds,
        "variables": ours.variables,
        **in_words(ours),
    }


def ratio(forced_s: float | None, ours: LayoutChoice) -> float | str:
    """How much slower a forced layout is."""
    return "-" if forced_s is None else round(forced_s / ours.time_s, 4)


def forced(graph: Graph, prices: LayoutPrices, cluster: Cluster, t: int, between: Any) -> float | None:
    """Seconds of one of Megatron's layouts; None where it does not exist."""
    try:
        return choose_layouts(graph, prices, cluster, t, allow=megatron(graph, between)).time_s
    except UsageError:
        return None


def in_words(choice: LayoutChoice) -> dict[str, str]:
    """How the first layer is split, and its collectives."""
    layer = next((block for block in choice.blocks if re.search(r"\.(layers|h)\.0$", block.block)), None)
    if layer is None:
        return {"layer": "nothing is split", "collectives": ""}
    modules: dict[str, list[str]] = {}
    for path, text in layer.splits.items():
        modules.setdefault(text.partition(":")[0], []).append(".".join(path.split(".")[-2:]))
    words = [f"{word}: {' '.join(paths)}" for word, paths in modules.items()]
    sent = [f"{count} {what}" for what, count in sorted(layer.collectives.items())]
    return {"layer": "; ".join(words), "collectives": ", ".join(sent)}


def _whole_state(graph: Graph) -> Iterator[int]:
    """Bytes of every entry of state with its gradient and Adam's two values."""
    return (entry.bytes * (4 if entry.requires_grad else 1) for entry in graph.state.values() if entry.used)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--gpus", default="8xH100-80G")
    arguments.add_argument("--models", nargs="*", choices=SIZES, help="only these")
    arguments.add_argument("--layers", nargs="*", type=int, default=[1, 2])
    chosen = arguments.parse_args()
    found = list(rows_of(chosen))
    ratios = [row[key] for row in found for key in ("classic", "sequence") if row[key] != "-"]
    facts = {
        "rows": len(found),
        "least ratio of a Megatron layout to ours": min(ratios),
        "largest": max(ratios),
        "slowest solve, s": max(row["solve, s"] for row in found),
        **PUBLISHED,
    }
    show(found, chosen.json, facts)
