"""How long the solver takes for deep models: a chain of n blocks with skips, of d distinct kinds, in k stages.

A block has 54 operators: attention, and a feed-forward part of two branches, each behind a norm and with a residual
around it. Values are relayed at 10 GB/s, memory is as `benchmarks.wide_graphs` has it for 1F1B, and the limit binds.

    python -m benchmarks.solver_scaling [--stages K] [--time-limit S] [--json FILE]

Exit status 1 if 512 equal blocks take more than 10 s, or a gap stays above 0.1 %.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from autopart.solver.search import search
from benchmarks.output import parser, show
from benchmarks.wide_graphs import Graph, as_problem

BLOCKS = (8, 16, 32, 64, 128, 256, 512)
KINDS = (1, 4, 16, 64, 256, 512)
TOLERANCE = 1e-3
MOST_SECONDS = 10.0


def deep(blocks: int, kinds: int) -> Graph:
    """Blocks of `kinds` kinds in turn, between an embedding and a head; blocks of a kind are equal."""
    graph = Graph(random.Random(-1))
    value = graph.add(0.5, 4.0, parameters=60.0)
    for block in range(blocks):
        graph.random = random.Random(block % kinds)
        value = _block(graph, value)
    graph.add(3.0, 0.01, value, parameters=60.0)
    return graph


def _block(graph: Graph, value: int) -> int:
    normed = _norm(graph, value)
    heads = [graph.chain((0.9, 0.05, 0.05, 0.1), 4.0, normed, parameters=4.0) for _ in range(3)]
    scores = graph.chain((0.05, 0.05, 0.4), 8.0, graph.add(0.8, 8.0, heads[0], heads[1]))
    mixed = graph.chain((0.05, 0.05, 0.9, 0.05), 4.0, graph.add(0.8, 4.0, scores, heads[2]), parameters=4.0)
    value = graph.add(0.1, 4.0, mixed, value)
    normed = _norm(graph, value)
    gates = [graph.chain((2.4, 0.1, 0.1, 0.2), 11.0, normed, parameters=11.0) for _ in range(2)]
    product = graph.chain((0.2, 0.1, 2.4, 0.05), 4.0, graph.add(0.2, 11.0, *gates), parameters=11.0)
    return graph.add(0.1, 4.0, product, value)


def _norm(graph: Graph, value: int) -> int:
    """As a captured graph has it: casts, squares, mean, root, product, scale."""
    wide = graph.add(0.05, 8.0, value)
    root = graph.chain((0.05, 0.05, 0.01, 0.01), 0.01, wide)
    return graph.chain((0.05, 0.05, 0.05), 4.0, graph.add(0.05, 8.0, wide, root), parameters=0.01)


def row(blocks: int, kinds: int, stages: int, time_limit_s: float) -> dict[str, Any]:
    graph = deep(blocks, kinds)
    problem = as_problem(graph, stages, relayed=True, memory_bytes=memory_bytes(graph, stages))
    start, cpu = time.perf_counter(), time.process_time()
    answer = search(problem, TOLERANCE, time_limit_s)
    return {
        "blocks": blocks,
        "kinds": kinds,
        "operators": problem.items,
        "s": time.perf_counter() - start,
        "CPU s": time.process_time() - cpu,
        "load, s": answer.value,
        "gap": (answer.value - answer.bound) / answer.value,
        "proved by": answer.method if answer.stopped_by == "proof" else answer.stopped_by,
    }


def memory_bytes(graph: Graph, stages: int) -> float:
    """What an even share of the model needs at the first stage, less a twentieth: it has to hold less than a share."""
    return 0.95 * (4 * sum(graph.parameter_bytes) + stages * sum(graph.output_bytes)) / stages


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--stages", type=int, default=8, metavar="K", help="stages (8)")
    options.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of each row (60 s)")
    arguments = options.parse_args()
    shapes = [(n, 1) for n in BLOCKS] + [(BLOCKS[-1], d) for d in KINDS[1:]]
    rows = [row(n, d, arguments.stages, arguments.time_limit) for n, d in shapes]
    (deepest,) = (r for r in rows if (r["blocks"], r["kinds"]) == (BLOCKS[-1], 1))
    holds = deepest["s"] <= MOST_SECONDS and all(r["gap"] <= TOLERANCE for r in rows)
    show(rows, arguments.json, {f"{BLOCKS[-1]} equal blocks, s": f"{deepest['s']:.1f}", "all holds": holds})
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
