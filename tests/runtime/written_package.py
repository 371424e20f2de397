"""A hand-written package in a folder: four stages, a weight tied between the first and the last, dropout."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import autopart.runtime
from autopart.verification.worker import imported

PIPELINE = '''
import os
import signal
import time

import torch
import torch.nn.functional as F
from torch import nn

from runtime.interface import Input, Output, Pipeline, Stage, Tie, Value

WIDTH, WORDS = 16, 32


def trouble(stage: int) -> None:
    """What the tests ask a stage to do, in its third forward pass."""
    what, _, where = os.environ.get("TROUBLE", "").partition("@")
    if where != str(stage):
        return
    trouble.calls = getattr(trouble, "calls", 0) + 1
    if trouble.calls < 6:
        return
    if what == "raise":
        raise ValueError("the coffee is cold")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "slow":
        time.sleep(60)


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids):
        trouble(0)
        return (self.dropout(self.linear(self.embedding(ids))),)


class Stage1(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, a):
        trouble(1)
        b = F.gelu(self.linear1(a))
        return (b[:, :-1] if os.environ.get("TROUBLE") == "shape@1" else b,)


class Stage2(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, b):
        trouble(2)
        return (self.norm(self.linear2(b)),)


class Stage3(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, c, labels):
        trouble(3)
        logits = F.linear(c, self.embedding.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def value(name):
    return (Value(name, (2, 4, WIDTH), torch.float32, True),)


PIPELINE = Pipeline(
    model="Written",
    mode="training",
    dtype=torch.float32,
    schedule="1f1b",
    microbatches=4,
    microbatch_size=2,
    inputs=(
        Input("ids", "args[0]", (2, 4), torch.int64, 0, WORDS),
        Input("labels", "target", (2, 4), torch.int64, 0, WORDS),
    ),
    call={"tuple": [{"tuple": [{"tensor": 0}]}, {"dict": [["scale", {"constant": 2.0}]]}, {"tensor": 1}]},
    outputs=(Output("logits", "logits", 0),),
    result={"dict": [["logits", {"tensor": 0}]]},
    loss="loss",
    loss_name="loss_fn",
    stages=(
        Stage(Stage0, ("ids",), ("a",)),
        Stage(Stage1, ("a",), ("b",)),
        Stage(Stage2, ("b",), ("c",)),
        Stage(Stage3, ("c", "labels"), ("logits", "loss")),
    ),
    boundaries=(value("a"), value("b"), value("c")),
    ties=(Tie(((0, "embedding.weight"), (3, "embedding.weight"))),),
    names={
        "embedding.weight": (0, "embedding.weight"),
        "linear.weight": (0, "linear.weight"),
        "linear.bias": (0, "linear.bias"),
        "linear1.weight": (1, "linear1.weight"),
        "linear1.bias": (1, "linear1.bias"),
        "linear2.weight": (2, "linear2.weight"),
        "linear2.bias": (2, "linear2.bias"),
        "norm.weight": (2, "norm.weight"),
        "norm.bias": (2, "norm.bias"),
        "decoder.weight": (3, "embedding.weight"),
    },
    initialization={
        "embedding.weight": ("normal", 0.0, 0.02),
        **{f"linear{n}.weight": ("uniform", -0.25, 0.25) for n in ("", "1", "2")},
        **{f"linear{n}.bias": ("constant", 0.0) for n in ("", "1", "2")},
    },
)
'''

TRAIN = """
from pipeline import PIPELINE
from runtime.train import main

if __name__ == "__main__":
    main(PIPELINE)
"""


def write(folder: Path) -> Path:
    """Write the package; the path of its train.py."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(autopart.runtime.__file__).parent
    shutil.copytree(source, folder / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pipeline.py").write_text(PIPELINE)
    (folder / "train.py").write_text(TRAIN)
    return folder / "train.py"


def environment(**more: str) -> dict[str, str]:
    """No autopart, one thread, and what the stages shall do."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def torchrun(processes: int, script: Path, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, str(script), *arguments]


def train(script: Path, *arguments: str, processes: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Run train.py under torchrun, without autopart."""
    return subprocess.run(
        torchrun(processes, script, *arguments),
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=script.parent,
    )


@dataclass
class Ended:
    """How a run in this process ended."""

    status: int
    stdout: str
    stderr: str


def train_here(script: Path, *arguments: str) -> Ended:
    """Run train.py in this process, all stages; an unexpected exception passes through."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with imported(str(script.parent)) as module, redirect_stdout(out), redirect_stderr(err):
        try:
            importlib.import_module("runtime.train").main(module.PIPELINE, list(arguments))
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Ended(status, out.getvalue(), err.getvalue())
