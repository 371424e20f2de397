"""When are tokens sent to their experts? One layer of Mixtral-8x7B and of Qwen3-30B-A3B on 2, 4 and 8 GPUs.

Every row is one microbatch, forward and backward, of a model of one layer with embedding, head and loss, at its
published width, priced on H100 GPUs by the analytic profile, the catalogue's link and an even routing. The experts are
forced into one way, and the rest is chosen: `all-to-all` sends tokens to the ranks that hold their experts, `select`
lets every rank pick the rows of its own experts out of all, `columns` cuts each expert. Times are those of a rank;
`chosen` is the way that the layout program takes if it is free.

    python -m benchmarks.expert_dispatch [--gpus 8xH100-80G] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import fx
from transformers.utils import logging

from autopart.cluster import Cluster
from autopart.graph import Graph
from autopart.profiler import LayoutPrices
from autopart.sharding import Strategy
from autopart.solver.layouts import choose_layouts
from autopart.tracer import trace
from benchmarks.output import parser, show
from benchmarks.tensor_splits import LossOnly

logging.set_verbosity_error()

COMMON = {"num_hidden_layers": 1, "experts_implementation": "grouped_mm", "use_cache": False, "vocab_size": 32000}
MODELS = {
    "Mixtral-8x7B": transformers.MixtralConfig(
        **COMMON, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8
    ),
    "Qwen3-30B-A3B": transformers.Qwen3MoeConfig(
        **COMMON,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        norm_topk_prob=True,
    ),
}
SIZES = ((1, 2048), (4, 2048))
DEGREES = (2, 4, 8)
# Way -> strategies of the grouped products.
WAYS = {"all-to-all": ("all-to-all",), "select": ("experts", "owned"), "columns": ("n", "k")}


def captured(name: str, rows: int, tokens: int) -> Graph:
    with torch.device("meta"):
        model = LossOnly(transformers.AutoModelForCausalLM.from_config(MODELS[name])).bfloat16()
        ids = torch.randint(100, (rows, tokens))
    return trace(model, (ids, ids), {}, check=False)


def is_product(node: fx.Node) -> bool:
    return "grouped_mm" in str(node.target)


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, size and degree."""
    cluster = Cluster.parse(options.gpus)
    for name in MODELS:
        for rows, tokens in SIZES:
            graph = captured(name, rows, tokens)
            prices = LayoutPrices(graph, cluster)
            for t in (t for t in DEGREES if t <= len(cluster)):
                start = time.perf_counter()
                free = choose_layouts(graph, prices, cluster, t)
                row: dict[str, Any] = {"model": name, "rows": rows, "tokens": tokens, "t": t}
                for way, names in WAYS.items():

                    def allow(node: fx.Node, strategy: Strategy, names: tuple[str, ...] = names) -> bool:
                        return not is_product(node) or strategy.name in names

                    row[f"{way} ms"] = choose_layouts(graph, prices, cluster, t, allow=allow).time_s * 1e3
                taken = {free.strategies[n.name].name for n in graph.primary.calls if is_product(n)}
                row["chosen"] = ", ".join(way for way, names in WAYS.items() if taken & set(names))
                row["chosen ms"], row["s"] = free.time_s * 1e3, round(time.perf_counter() - start, 1)
                yield row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--gpus", default="8xH100-80G", help="devices (default: %(default)s)")
    arguments = options.parse_args()
    show(list(rows_of(arguments)), arguments.json)


if __name__ == "__main__":
    main()
