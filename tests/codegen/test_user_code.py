"""The user's own code in a package brings along every file beside it that it imports, or is refused by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from emitted import check_equal, random_cuts
from torch import nn

from autopart.errors import CaptureError
from autopart.tracer import trace

FILES = {
    "model_with_helpers": """
import math, helper_scales as scales  # the comment stays
from torch import nn
import torch
from helper_signs import (
    sign_of,
)
if math.pi > 3:
    import helper_scales


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return sign_of(x) * scales.scale() * math.sqrt(4.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * helper_scales.HALF


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(Straight.apply(self.a(x)))
""",
    "helper_scales": "from helper_more import FACTOR\n\nHALF = 0.5\n\ndef scale():\n    return FACTOR\n",
    "helper_more": "FACTOR = 0.25\n",
    "helper_signs": "import helper_scales\n\ndef sign_of(x):\n    return x.sign() + helper_scales.HALF\n",
    "helper_unused": "raise ImportError('nobody imports this')\n",
}


def _model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for name in FILES:
        sys.modules.pop(name, None)
    return importlib.import_module("model_with_helpers").Model()


def test_files_beside_the_users_file_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user").mkdir()
    model, args = _model(tmp_path / "user", monkeypatch), (torch.randn(4, 8),)
    graph = trace(model, args, check=False)

    def take_away(folder: Path) -> None:
        """The package must not need the originals."""
        for name in FILES:
            (tmp_path / "user" / f"{name}.py").unlink()
            sys.modules.pop(name, None)

    check_equal(model, graph, random_cuts(graph, 2, 0), 2, tmp_path / "out", args, edit=take_away)
    copies = {path.stem: path.read_text() for path in (tmp_path / "out" / "user_code").glob("*.py")}
    assert copies.keys() == FILES.keys() - {"helper_unused"}
    assert copies["helper_more"] == FILES["helper_more"]
    assert "# the comment stays" in copies["model_with_helpers"]


def test_what_cannot_come_along_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tmp_path, monkeypatch)
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_folder" / "__init__.py").write_text("")
    file = tmp_path / "helper_more.py"
    file.write_text("import a_folder\nFACTOR = 0.25\n")
    graph = trace(model, (torch.randn(4, 8),), check=False)
    with pytest.raises(CaptureError, match="a_folder") as caught:
        check_equal(model, graph, random_cuts(graph, 2, 0), 2, tmp_path / "out", (torch.randn(4, 8),))
    assert str(file) in caught.value.message and not (tmp_path / "out").exists()
