"""Experts behind a routing that is given, so that tests choose it; the same by loops; and choices that send tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import fx, nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from autopart.sharding import Choice, Layout, Program, Strategy, choose

EXPERTS, TOP, WIDTH, HIDDEN, ROWS, LENGTH = 8, 2, 6, 5, 2, 8


def by_plain_products() -> AbstractContextManager[object]:
    """The library's experts without torch's grouped product, which knows no float64."""
    return patch("transformers.integrations.moe._can_use_grouped_mm", lambda *_, **__: False)


class GivenRouting(nn.Module):
    """`ids` [tokens, k] says which experts a token goes to; how much each counts is learned."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        config = transformers.MixtralConfig(
            hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=experts, experts_implementation="grouped_mm"
        )
        self.before = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = MixtralExperts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens = self.before(x).view(-1, WIDTH)
        weights = self.gate(tokens).softmax(-1).gather(1, ids)
        found = self.experts(tokens, ids, weights).view(x.shape)
        return {"loss": (found * found).mean() + found.sum(), "found": found}


def by_loops(model: GivenRouting, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The loss, token by token and expert by expert."""
    total, found = torch.zeros((), dtype=x.dtype), []
    for token, chosen in zip(model.before(x).view(-1, WIDTH), ids.tolist(), strict=True):
        probabilities = model.gate(token).softmax(-1)
        result = torch.zeros_like(token)
        for expert in chosen:
            up = model.experts.gate_up_proj[expert] @ token
            inner = F.silu(up[:HIDDEN]) * up[HIDDEN:]
            result = result + probabilities[expert] * (model.experts.down_proj[expert] @ inner)
        found.append(result)
        total = total + result.sum()
    return torch.stack(found).square().mean() + total


Generator = torch.Generator
# Name -> (generator, tokens, k) -> experts of each token.
ROUTINGS: dict[str, Callable[[Generator, int, int], torch.Tensor]] = {
    "random": lambda g, n, k: torch.rand(n, EXPERTS, generator=g).topk(k).indices,
    "all to one expert": lambda g, n, k: torch.full((n, k), 3),
    "all to the last experts": lambda g, n, k: torch.arange(EXPERTS - k, EXPERTS).expand(n, k).clone(),
    "one rank's experts empty": lambda g, n, k: torch.randint(EXPERTS // 4, EXPERTS, (n, k), generator=g),
    "each token to one expert, twice": lambda g, n, k: torch.randint(EXPERTS, (n, 1), generator=g).expand(n, k).clone(),
}


def dispatching(program: Program, seed: int) -> Choice:
    """Tokens are sent to experts; what else can be chosen is random."""
    generator = random.Random(seed)
    wanted = {node: [s for s in found if routed(s)] for node, found in program.strategies.items()}

    def pick(node: fx.Node, legal: list[Strategy], layout: Callable[[int], Layout]) -> Strategy:
        return generator.choice([s for s in legal if s in wanted[node]] or legal)

    state = {
        str(node.target): generator.choice(layouts)
        for node, layouts in program.layouts.items()
        if node.op == "get_attr"
    }
    return choose(program, state, pick)


def routed(strategy: Strategy) -> bool:
    return any(layout.routed for layout in (*strategy.inputs, *strategy.outputs))
