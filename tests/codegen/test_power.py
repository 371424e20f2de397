"""The comparison of `emitted.check_equal` notices small faults in the written code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emitted import check_equal, random_cuts
from small_models import MODELS, in_double

from autopart.tracer import trace


def _replace(pattern: str, by: str) -> Callable[[Path], None]:
    """Change the first place in the model's files where the pattern stands."""

    def edit(folder: Path) -> None:
        for path in [folder / "blocks.py", *sorted(folder.glob("stage_*.py"))]:
            text = path.read_text() if path.exists() else ""
            changed = re.sub(pattern, by, text, count=1)
            if changed != text:
                path.write_text(changed)
                return
        raise AssertionError(f"nothing to change: {pattern}")

    return edit


FAULTS = {
    "gpt2": {
        "an activation": (r"torch\.tanh\(", "torch.sin("),
        "a constant": (r"0\.044715", "0.044716"),
        "a residual": (r"(\n *hidden_states = )(\w+) \+ (\w+)", r"\1\2 - \3"),
        "dropout": (r"nn\.Dropout\(0\.1\)", "nn.Dropout(0.2)"),
        "attention's dropout": (r"dropout_p=.*0\.1 if self\.training else 0\.0", "dropout_p=0.1"),
        "epsilon": (r"nn\.LayerNorm\((\d+)\)", r"nn.LayerNorm(\1, eps=1e-6)"),
    },
    "unet": {
        "an order": (r"torch\.cat\(\[(\w+), (.*?)\], dim=1\)", r"torch.cat([\2, \1], dim=1)"),
        "padding's bias": (r"padding=1\)", "padding=1, bias=False)"),
        "a momentum": (r"nn\.BatchNorm2d\((\d+)\)", r"nn.BatchNorm2d(\1, momentum=0.2)"),
        "a mask": (r" > 0", " < 0"),
    },
}


@pytest.mark.parametrize(("name", "fault"), [(n, f) for n, faults in FAULTS.items() for f in faults])
def test_faults_in_the_code_are_noticed(name: str, fault: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, args, kwargs = in_double(MODELS[name]())
    graph = trace(model, args, kwargs, check=False)
    with pytest.raises((AssertionError, RuntimeError), match=r"."):
        check_equal(
            model,
            graph,
            random_cuts(graph, 2, 1),
            2,
            tmp_path / "out",
            args,
            kwargs,
            edit=_replace(*FAULTS[name][fault]),
        )
