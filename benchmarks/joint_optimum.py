"""What is lost by choosing layouts first and stages second? Small graphs, against the best of all choices made at once.

Every row is a training step of a small model on two pipeline stages of t tensor ranks. `ours` is what
`degrees.plan_degrees` returns; `optimum` is the least step time over every legal choice of layouts together with every
legal cut, found by `benchmarks.joint_oracle` and valued by the functions that plan (`rewrite`, `profile`, `lower`,
`score`); nothing is sampled. `loss` is (ours - optimum) / optimum, `operators` the same where cuts may fall anywhere
(the default keeps whole blocks if that costs less than 1 %). What could be better, each with its loss:

- `several`: stages are chosen for each of several layouts (`candidates`), and the fastest is taken;
- `repriced`: layouts are chosen first, but at the prices that the profiler gives the local graph, where a conversion
  also copies and starts kernels;
- `at the cut`: for each value that crosses the plan's cut, layouts are chosen anew with each strategy of the operator
  that makes it, and stages for each;
- `all`: the fastest of all these.

`memory` is that of a device, as a share of what the optimum would take if it had room; `refused`: nothing fits with the
chosen layouts, though something would; `-`: nothing fits at all.

Each row also draws `--checks` random layouts and cuts, and asserts that the oracle's rules give what the planning
functions give, in seconds and in bytes; and the optimum is valued by both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, isclose
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.degrees import plan_degrees
from autopart.errors import InfeasibleError, UsageError
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.profiler import LayoutPrices, profile
from autopart.sharding import Choice, Program, Strategy, random_choice, rewrite
from autopart.solver import choose_layouts, solve
from autopart.solver.lowering import RESERVE_SHARE
from autopart.solver.pipeline import IN_FLIGHT
from autopart.tracer import trace
from autopart.workload import Workload
from benchmarks.joint_draft import Fixed, Pricing
from benchmarks.joint_oracle import Optimum, Oracle, item_keys, truth, value
from benchmarks.output import parser, show

MICROBATCHES = 4
# Of the memory of all stages: what layouts may take that are tried where the fastest do not fit.
MEMORY_SHARES = (0.95, 0.8, 0.6)


class Mlp(nn.Module):
    """Layers of two linears with a residual."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


class Attention(nn.Module):
    """A block of causal attention, before its MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.out(y.transpose(1, 2).reshape(rows, length, width))).square().mean()


class Convolutions(nn.Module):
    """Two convolutions with batch norm, one residual, and a classifier."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(images)))
        x = torch.relu(x + self.norms[1](self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Words(nn.Module):
    """Embedding, one MLP, and a head with the embedding's weight."""

    def __init__(self, words: int, width: int, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(F.linear(x, self.words.weight), labels)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long, device="meta")


def _floats(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16, device="meta")


# Name -> model, and the batch of one microbatch.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "MLP, 2 layers, 32 rows": (lambda: Mlp(1024, 4096, 2), (_floats(32, 1024),)),
    "MLP, 2 layers, 4096 rows": (lambda: Mlp(1024, 4096, 2), (_floats(4096, 1024),)),
    "MLP, 3 layers, 512 rows": (lambda: Mlp(2048, 8192, 3), (_floats(512, 2048),)),
    "attention, 2 x 512": (lambda: Attention(1024, 16), (_floats(2, 512, 1024),)),
    "convolutions, 16 images": (lambda: Convolutions(64, 1000), (_floats(16, 3, 32, 32), _tokens(16))),
    "tied words, 512 tokens": (lambda: Words(32000, 512, 2048), (_tokens(512), _tokens(512))),
    "tied words, 8192 tokens": (lambda: Words(32000, 512, 2048), (_tokens(8192), _tokens(8192))),
}
NVLINK, PCIE, TWO_MACHINES = "4xH100-80G", "4xL4", "2x2xH100-80G"


@dataclass(frozen=True)
class Case:
    """A model on a cluster. `memory`: of a device, as a share of what the optimum takes without a limit."""

    model: str
    gpus: str
    t: int = 2
    memory: float | None = None


CASES = (
    *(Case(model, gpus) for model in MODELS for gpus in (NVLINK, PCIE)),
    Case("MLP, 2 layers, 32 rows", TWO_MACHINES),
    Case("tied words, 512 tokens", TWO_MACHINES),
    Case("MLP, 2 layers, 4096 rows", "8xH100-80G", 4),
    Case("MLP, 2 layers, 4096 rows", "8xL4", 4),
    Case("tied words, 8192 tokens", "8xL4", 4),
    Case("MLP, 2 layers, 32 rows", NVLINK, 2, 0.8),
    Case("MLP, 2 layers, 4096 rows", PCIE, 2, 0.95),
    Case("tied words, 512 tokens", NVLINK, 2, 0.9),
    Case("tied words, 512 tokens", NVLINK, 2, 0.7),
    Case("tied words, 8192 tokens", PCIE, 2, 0.95),
)


@cache
def captured(name: str) -> Graph:
    build, batch = MODELS[name]
    with torch.device("meta"):
        model = build().bfloat16()
    return trace(model, batch, check=False)


@cache
def explored(name: str, t: int) -> tuple[Program, Pricing]:
    """Strategies, and the profiler's outcomes, which clusters share."""
    return Program.of(captured(name), t), Pricing("cuda", t)


def row_of(case: Case, checks: int) -> dict[str, Any]:
    """One case."""
    start = time.process_time()
    graph, (program, pricing) = captured(case.model), explored(case.model, case.t)
    cluster = Cluster.parse(case.gpus)
    workload = Workload("training", MICROBATCHES, MODELS[case.model][1][0].shape[0], "1f1b", "adamw")
    if case.memory is not None:
        free = best_of(Oracle(graph, program, cluster, workload, pricing), inf)
        assert free.fixed is not None
        most = truth(Oracle(graph, program, cluster, workload, pricing), free.fixed)[0].memory.max()
        cluster = limited(cluster, int(case.memory * most / (1 - RESERVE_SHARE)))
    oracle = Oracle(graph, program, cluster, workload, pricing)
    check(oracle, checks)
    costs, prices = profile(graph, cluster), LayoutPrices(graph, cluster)
    plans = {granularity: planned(oracle, costs, granularity) for granularity in ("auto", "operator")}
    blocks, operators = (inf if plan is None else plan.step_time_s for plan in plans.values())
    several = min((staged(oracle, choice) for choice in candidates(oracle, prices)), default=inf)
    near_cut = at_the_cut(oracle, prices, plans["operator"])
    boundary = min((staged(oracle, choice) for choice in near_cut), default=inf)
    repriced = next((step_s for step_s in map(partial(staged, oracle), at_true_prices(oracle)) if step_s < inf), inf)
    best = best_of(oracle, min(blocks, operators, several, boundary, repriced))

    def loss(step_s: float) -> float | str:
        if best.fixed is None:
            return "-"
        return "refused" if step_s == inf else max(0.0, round(step_s / best.step_s - 1, 6))

    return {
        "model": case.model,
        "GPUs": case.gpus,
        "t": case.t,
        "memory": case.memory or "-",
        "ours, ms": 1e3 * blocks,
        "optimum, ms": 1e3 * best.step_s,
        "loss": loss(blocks),
        "operators": loss(operators),
        "several": loss(min(operators, several)),
        "at the cut": loss(min(operators, boundary)),
        "repriced": loss(repriced),
        "all": loss(min(operators, several, boundary, repriced)),
        "states": best.states,
        "CPU, s": time.process_time() - start,
    }


def limited(cluster: Cluster, memory_bytes: int) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in cluster.devices))


def planned(oracle: Oracle, costs: Costs, granularity: str) -> Plan | None:
    """What the planner returns; None where it says that nothing fits."""
    options = {"tensor": oracle.program.t, "stages": 2, "granularity": granularity}
    try:
        return plan_degrees(oracle.graph, costs, oracle.cluster, oracle.workload, **options).plan
    except InfeasibleError:
        return None


def candidates(oracle: Oracle, prices: LayoutPrices) -> Iterator[Choice]:
    """Layouts that a planner could try beside the fastest: cheap to find, and of different kinds."""
    yield from chosen(oracle, prices, tie=False)
    yield from chosen(oracle, prices, allow=rows_whole)
    for share in (0.9, 0.7, 0.6, 0.5, 0.4):
        yield from chosen(oracle, prices, memory_bytes=share * 2 * oracle.limit)


def at_the_cut(oracle: Oracle, prices: LayoutPrices, plan: Plan | None) -> Iterator[Choice]:
    """Layouts in which one value that crosses the plan's cut is made by another strategy."""
    stages = {} if plan is None else plan.assignment
    for node, strategies in oracle.program.strategies.items():
        if stages.get(node.name) == 0 and any(stages.get(user.name) == 1 for user in node.users):
            for strategy in strategies:

                def allow(other: fx.Node, tried: Strategy, node: fx.Node = node, key: Any = strategy.key) -> bool:
                    return other is not node or tried.key == key

                yield from chosen(oracle, prices, tie=False, allow=allow)


def chosen(oracle: Oracle, prices: LayoutPrices, **options: Any) -> Iterator[Choice]:
    """The fastest layouts under a restriction, if there are any."""
    in_flight = IN_FLIGHT[oracle.workload.schedule](oracle.workload.microbatches, 1, 2)
    with suppress(InfeasibleError, UsageError):
        t = oracle.program.t
        yield choose_layouts(oracle.graph, prices, oracle.cluster, t, in_flight=in_flight, **options).choice


def at_true_prices(oracle: Oracle) -> Iterator[Choice]:
    """The fastest layouts without a cut, by the profiler's prices: of all, then of those that need ever less memory."""
    for share in (inf, *MEMORY_SHARES):
        whole = replace(oracle, stages=1, memory=share < inf)
        whole.limit, whole.in_flight = share * 2 * oracle.limit, [oracle.in_flight[1]] * 2
        fixed = whole.optimum().fixed
        if fixed is not None:
            yield fixed.choice


def rows_whole(node: fx.Node, strategy: Strategy) -> bool:
    """Classic tensor parallelism: no activation is cut by its first dimension."""
    return not any(layout.split is not None and layout.split.dim == 0 for layout in strategy.outputs)


def staged(oracle: Oracle, choice: Choice) -> float:
    """Step time of the best stages for given layouts; infinite if none fits."""
    t = oracle.program.t
    places = oracle.cluster.grouped(t)
    local = rewrite(oracle.graph, choice, t)
    costs = profile(local, places, oracle.cluster.group_link(t))
    try:
        return solve(local, costs, places, oracle.workload, stages=2, granularity="operator", explain_s=0).step_time_s
    except InfeasibleError:
        return inf


def best_of(oracle: Oracle, to_beat_s: float) -> Optimum:
    """The joint optimum, valued by the planning functions too; with bytes limited only if the free one does not fit."""
    best = oracle.optimum(to_beat_s)
    assert best.fixed is not None
    found, fits = truth(oracle, best.fixed)
    if not fits:
        best = replace(oracle, memory=True).optimum(to_beat_s)
        if best.fixed is None:
            assert to_beat_s == inf
            return best
        found, fits = truth(oracle, best.fixed)
    assert fits and isclose(found.step_s, best.step_s, rel_tol=1e-9)
    return best


def check(oracle: Oracle, times: int) -> None:
    """Random layouts and cuts cost the same by the oracle's rules and by the planning functions."""
    draw = random.Random(0)
    for _ in range(times):
        fixed = drawn(oracle, draw)
        expected, found = truth(oracle, fixed)[0], value(oracle, fixed)
        assert isclose(expected.step_s, found.step_s, rel_tol=1e-9), (expected, found)
        assert found.bytes is not None and tuple(expected.memory) == tuple(map(float, found.bytes)), (expected, found)


def drawn(oracle: Oracle, draw: random.Random) -> Fixed:
    """Random layouts, and a random cut: items after a place go to stage 1, and a few before it, with what they feed."""
    while True:
        choice = random_choice(oracle.program, draw)
        local = rewrite(oracle.graph, choice, oracle.program.t)
        calls, keys = local.primary.calls, item_keys(oracle.program, local)
        place, stage = draw.randrange(len(calls)), {}
        for number, node in enumerate(calls):
            least = max((stage[source] for source in node.all_input_nodes if source in stage), default=0)
            stage[node] = max(least, int(number >= place or draw.random() < 0.05))
        by_name = {node.name: at for node, at in stage.items()}
        together = all(len({by_name[n] for n in names if n in by_name}) == 1 for names in local.primary.colocated)
        if together and len(set(stage.values())) == 2:
            return Fixed(choice, {keys[node]: at for node, at in stage.items()})


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--checks", type=int, default=2, help="random layouts and cuts that are valued twice, each row"
    )
    options.add_argument("--only", default="", metavar="WORD", help="only models whose name has this")
    arguments = options.parse_args()
    rows = []
    for case in CASES:
        if arguments.only in case.model:
            rows.append(row_of(case, arguments.checks))
            print(*rows[-1].values(), sep=" | ", flush=True)
    summary: dict[str, Any] = {"rows": len(rows), "CPU, s": sum(row["CPU, s"] for row in rows)}
    for column in ("loss", "operators", "several", "at the cut", "repriced", "all"):
        losses = [row[column] for row in rows if not isinstance(row[column], str)]
        refused = sum(row[column] == "refused" for row in rows)
        summary[column] = f"mean {sum(losses) / len(losses):.2%}, largest {max(losses):.2%}, refused {refused}"
    show(rows, arguments.json, summary)


if __name__ == "__main__":
    main()
