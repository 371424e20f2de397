"""Small models, each with one thing that splits get wrong, under many random layouts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopart.runtime import collectives
from autopart.sharding import LocalGraph, Program, S, following, random_choice, rewrite
from autopart.tracer import trace
from tests.sharding.ranks import ThreadRanks
from tests.sharding.running import run_capture, run_split, run_whole, worst_error


class InPlaceThroughViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        before = y * 2
        y.view(4, 2, 16).transpose(0, 1).add_(1.5)  # y itself changes
        y[:, :8].mul_(3)
        return self.b(F.relu_(y.clone())) + before.sum() + y.tanh().sum(1, keepdim=True)


class InPlaceThroughQuietViews(nn.Module):
    """Results that share memory with an argument, though no schema says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        torch.einsum("ij->ji", y).add_(1.5)
        z = self.b(y)
        torch.atleast_3d(z).mul_(2)
        u = x + 1
        torch.broadcast_tensors(u, z)[0].mul_(3)
        return z.tanh() * y.sum(1, keepdim=True) + u


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.register_buffer("seen", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(y.abs().mean(0), alpha=0.1)
            self.steps += 1
        return y / (self.seen + 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8, padding_idx=3)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 40).long() % 13
        logits = self.head(self.embedding(ids).sum(1)) * self.scale
        labels = ids[:, 0].clone()
        labels[:2] = -100
        return F.cross_entropy(logits * 400, labels)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(2, 4, 8) + 1
        q, k, v = self.qkv(y).chunk(3, -1)
        q, k, v = (z.view(2, 4, 4, 2).transpose(1, 2) for z in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(8, 8)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.a(x).abs().mean() + 1
        return checkpoint(lambda y: self.b(self.a(y).tanh()), x, use_reentrant=False) / scale


class Squeezed(nn.Module):
    """Dimensions of as many elements as there are ranks: shards of size one must not be squeezed away."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return (y.unsqueeze(1).squeeze() * y.mean(1, keepdim=True).expand(8, 4)).squeeze(1) + y.var(0)


MODELS = [InPlaceThroughViews, InPlaceThroughQuietViews, Buffers, Tied, Causal, Checkpointed, Squeezed]


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_hazards_compute_what_the_model_computes(model: type[nn.Module], t: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    graph = trace(model().double(), (x,))
    wanted = run_whole(graph, [x])
    program = Program.of(graph, t)
    used: Counter[tuple[str, str]] = Counter()
    for seed in range(20):
        local = rewrite(graph, random_choice(program, random.Random(seed), used), t)
        found, _ = run_split(local, [x])
        errors = worst_error(found, wanted)
        assert max(errors.values()) < 1e-9, (seed, errors)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(torch.relu(self.norm(self.a(x))))
            return F.cross_entropy(y, torch.zeros(8, dtype=torch.long))


def test_autocast_regions_keep_their_dtypes() -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 8)
    graph = trace(Autocast(), (x,))
    wanted = run_whole(graph, [x])
    program = Program.of(graph, 2)
    for seed in range(10):
        local = rewrite(graph, random_choice(program, random.Random(seed)), 2)
        for node in local.primary.graph.nodes:
            before = next((n for n in graph.primary.graph.nodes if n.name == node.name), None)
            if before is not None and isinstance(before.meta.get("val"), torch.Tensor):
                assert before.meta["val"].dtype == node.meta["val"].dtype
        found, _ = run_split(local, [x], rtol=0.1)
        errors = worst_error(found, wanted)
        assert max(errors.values()) < 0.1, (seed, errors)  # bfloat16


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.a(x), 0.25)


def test_shards_are_dropped_independently_and_replicas_alike() -> None:
    model = Dropped()
    with torch.no_grad():
        model.a.weight.fill_(1.0)
    x = torch.ones(256, 64)
    graph = trace(model, (x,), check=False)
    program = Program.of(graph, 2)
    for layout, split in ((S(0, 64), True), (S(1, 64), False)):
        choice = following(program, {"t0": layout})
        local = rewrite(graph, choice, 2)
        dropped = next(n for n in local.primary.calls if "dropout" in str(n.target) and n.op == "call_function")
        assert (dropped.meta["val"].shape[1] == 32) == split
        state = {"t0": torch.ones(local.state["t0"].tensor.shape)}
        kept = [value_on(rank, local, state, x, dropped.name) != 0 for rank in range(2)]
        assert all(abs(float(k.float().mean()) - 0.75) < 0.02 for k in kept)
        same = float((kept[0] == kept[1]).float().mean())
        expected = 0.75**2 + 0.25**2 if split else 1.0
        assert abs(same - expected) < 0.03, (split, same)


class Alone(ThreadRanks):
    """One rank by itself; the others are taken to hold what it holds."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(size)
        self._local.rank = rank

    def exchange(self, value: object) -> list[object]:
        return [value] * self.size


def value_on(rank: int, local: LocalGraph, state: dict[str, torch.Tensor], x: torch.Tensor, name: str) -> torch.Tensor:
    """The value of one node on one rank; all ranks start from one seed."""
    torch.manual_seed(5)
    before = collectives.use(Alone(rank, local.tensor))
    values: dict[str, torch.Tensor] = {}
    try:
        run_capture(local, local.primary, state, [x], values)
    finally:
        collectives.use(before)
    return values[name].detach()
