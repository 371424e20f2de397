"""Names of modules and parameters are data: whatever they say, they are kept, and never run."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import torch
from emitted import check_equal, random_cuts
from torch import nn

from autopart.tracer import trace

NAMES = [
    'x" if CANARY() else "y',
    "class",
    "None",
    'q"""',
    "'''",
    "\uff43lass",
    "a\nb",
    "u\u2028v",
    "it's",
    "__private",
    "training_",
    "0",
    "a b",
    "\\",
    "{x}",
    "# comment",
    "keys",
    "self",
    "forward_1",
    "size",
]


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(8, 8))
        self.register_parameter('p"""\nCANARY()', nn.Parameter(torch.randn(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = x + torch.tanh(child(x))
        return x * self._parameters['p"""\nCANARY()']


@pytest.mark.parametrize("stages", [1, 3])
def test_hostile_names_are_kept_and_never_run(stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(builtins, "CANARY", lambda: ran.append(1), raising=False)
    kind = type('M"""; CANARY(); """', (Hostile,), {})
    model, args = kind(), (torch.randn(4, 8),)
    graph = trace(model, args, check=False)
    check_equal(model, graph, random_cuts(graph, stages, 0), stages, tmp_path / "out", args)
    assert not ran
