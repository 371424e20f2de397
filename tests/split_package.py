"""A hand-written package whose stages run on several tensor ranks, and the whole model that it stands for.

What it has: a table and a head that are one weight, cut by words that do not divide; a column and a row split; a fused
weight of two unequal parts, both padded; a batch norm whose channels are cut; weights that are whole; boundary values
that are scattered (floats, complex numbers, integers, in sizes that do not divide), and one that is not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autopart.runtime

WORDS, WIDTH, HIDDEN, PARTS, ROWS, LENGTH, MICROBATCHES = 33, 7, 12, (5, 3), 2, 3, 8

PIPELINE = '''
import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_gather, all_reduce, copy_to
from runtime.interface import Input, Output, Pipeline, Shard, Stage, Tie, Value
from runtime.shards import local_size
from runtime.split_operators import vocabulary_cross_entropy, vocabulary_embedding

STAGES, TENSOR = 2, 2
WORDS, WIDTH, HIDDEN, PARTS, ROWS, LENGTH = 33, 7, 12, (5, 3), 2, 3


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(local_size((WORDS,), TENSOR), WIDTH)

    def forward(self, ids):
        return (all_reduce(vocabulary_embedding(self.table.weight, ids)), ids + 1)


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN // TENSOR)
        self.channels = nn.BatchNorm1d(HIDDEN // TENSOR)
        self.down = nn.Linear(HIDDEN // TENSOR, WIDTH, bias=False)

    def forward(self, x, later):
        hidden = F.gelu(self.up(copy_to(x)))
        hidden = self.channels(hidden.transpose(1, 2)).transpose(1, 2)
        x = x + all_reduce(self.down(hidden))
        return (x, torch.complex(x, 2 * x), later)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused = nn.Linear(WIDTH, local_size(PARTS, TENSOR), bias=False)
        self.one = nn.Linear(local_size(PARTS[:1], TENSOR), WIDTH, bias=False)
        self.other = nn.Linear(local_size(PARTS[1:], TENSOR), WIDTH, bias=False)

    def forward(self, x, z, later):
        one, other = self.fused(copy_to(x)).split([local_size(PARTS[:1], TENSOR), local_size(PARTS[1:], TENSOR)], -1)
        return (x + z.imag + all_reduce(self.one(torch.tanh(one)) + self.other(other * other)), later)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(local_size((WORDS,), TENSOR), WIDTH)

    def forward(self, y, later, labels):
        y = self.whole(self.norm(y)) * later.unsqueeze(-1)
        logits = F.linear(copy_to(y), self.table.weight)
        loss = vocabulary_cross_entropy(logits.flatten(0, 1), labels.flatten(), WORDS)
        return (logits if self.training else all_gather(logits, 2, (WORDS,)), loss)


class Both(nn.Module):
    """Two pieces in one stage."""

    def __init__(self, *pieces):
        super().__init__()
        for piece in pieces:
            for name, child in piece().named_children():
                self.add_module(name, child)
        self.pieces = pieces

    def forward(self, *values):
        first, second = self.pieces
        count = 1 if first is Table else 3
        return second.forward(self, *first.forward(self, *values[:count]), *values[count:])


class Stage0(Both):
    def __init__(self):
        super().__init__(Table, Split)


class Stage1(Both):
    def __init__(self):
        super().__init__(Fused, Head)


X = Value("x", (ROWS, LENGTH, WIDTH), torch.float64, True, scattered=TENSOR > 1)
Z = Value("z", (ROWS, LENGTH, WIDTH), torch.complex128, True, scattered=TENSOR > 1)
LATER = Value("later", (ROWS, LENGTH), torch.int64, False, scattered=TENSOR > 1)
Y = Value("y", (ROWS, LENGTH, WIDTH), torch.float64, True)

if STAGES == 2:
    stages = (
        Stage(Stage0, ("ids",), ("x", "z", "later")),
        Stage(Stage1, ("x", "z", "later", "labels"), ("logits", "loss")),
    )
    boundaries = ((X, Z, LATER),)
    of_piece = {"Table": 0, "Split": 0, "Fused": 1, "Head": 1}
else:
    stages = (
        Stage(Table, ("ids",), ("e", "later")),
        Stage(Split, ("e", "later"), ("x", "z", "later")),
        Stage(Fused, ("x", "z", "later"), ("y", "later")),
        Stage(Head, ("y", "later", "labels"), ("logits", "loss")),
    )
    boundaries = ((Value("e", X.shape, X.dtype, True), LATER), (X, Z, LATER), (Y, LATER))
    of_piece = {"Table": 0, "Split": 1, "Fused": 2, "Head": 3}

NAMES = {
    "table.weight": "Table",
    "up.weight": "Split",
    "up.bias": "Split",
    "channels.weight": "Split",
    "channels.bias": "Split",
    "channels.running_mean": "Split",
    "channels.running_var": "Split",
    "channels.num_batches_tracked": "Split",
    "down.weight": "Split",
    "fused.weight": "Fused",
    "one.weight": "Fused",
    "other.weight": "Fused",
    "norm.weight": "Head",
    "norm.bias": "Head",
    "whole.weight": "Head",
    "whole.bias": "Head",
    "head.weight": "Head",
}

PIPELINE = Pipeline(
    model="Written",
    mode="training",
    dtype=torch.float64,
    schedule="1f1b" if STAGES == 2 else "zbv",
    microbatches=8,
    microbatch_size=ROWS,
    inputs=(
        Input("ids", "args[0]", (ROWS, LENGTH), torch.int64, 0, WORDS),
        Input("labels", "args[1]", (ROWS, LENGTH), torch.int64, 0, WORDS),
    ),
    call={"tuple": [{"tuple": [{"tensor": 0}, {"tensor": 1}]}, {"dict": []}]},
    outputs=(Output("loss", "loss", None), Output("logits", "logits", 0, shard=Shard(2, (WORDS,)))),
    result={"dict": [["loss", {"tensor": 0}], ["logits", {"tensor": 1}]]},
    loss="loss",
    loss_name="loss",
    stages=stages,
    boundaries=boundaries,
    ties=(Tie(((0, "table.weight"), (STAGES - 1, "table.weight"))),),
    names={name: (of_piece[p], name.replace("head", "table")) for name, p in NAMES.items()},
    initialization={
        **{name: ("uniform", -0.4, 0.4) for name in NAMES if name.endswith("weight")},
        "channels.running_mean": ("constant", 0.0),
        "channels.running_var": ("constant", 1.0),
        "channels.weight": ("data", [float(i + 1) for i in range(HIDDEN)]),
        "up.bias": ("normal", 0.0, 0.5),
        "whole.bias": ("normal", 0.0, 0.5),
    },
    tensor=TENSOR,
    shards={
        "table.weight": Shard(0, (WORDS,)),
        "head.weight": Shard(0, (WORDS,)),
        "up.weight": Shard(0, (HIDDEN,)),
        "up.bias": Shard(0, (HIDDEN,)),
        "channels.weight": Shard(0, (HIDDEN,)),
        "channels.bias": Shard(0, (HIDDEN,)),
        "channels.running_mean": Shard(0, (HIDDEN,)),
        "channels.running_var": Shard(0, (HIDDEN,)),
        "down.weight": Shard(1, (HIDDEN,)),
        "fused.weight": Shard(0, PARTS),
        "one.weight": Shard(1, PARTS[:1]),
        "other.weight": Shard(1, PARTS[1:]),
    }
    if TENSOR > 1
    else {},
)
'''


TRAIN = """
from pipeline import PIPELINE
from runtime.train import main

if __name__ == "__main__":
    main(PIPELINE)
"""


class Written(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.channels = nn.BatchNorm1d(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.fused = nn.Linear(WIDTH, sum(PARTS), bias=False)
        self.one = nn.Linear(PARTS[0], WIDTH, bias=False)
        self.other = nn.Linear(PARTS[1], WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids)
        hidden = self.channels(F.gelu(self.up(x)).transpose(1, 2)).transpose(1, 2)
        x = x + self.down(hidden)
        one, other = self.fused(x).split(PARTS, -1)
        y = 3 * x + self.one(torch.tanh(one)) + self.other(other * other)
        y = self.whole(self.norm(y)) * (ids + 1).unsqueeze(-1)
        logits = self.head(y)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def whole_model() -> Written:
    """In float64, with values that are no defaults in every weight and buffer."""
    torch.manual_seed(7)
    model = Written().double()
    for tensor in (*model.parameters(), model.channels.running_mean):
        tensor.data.uniform_(-0.4, 0.4)
    model.channels.running_var.uniform_(0.1, 0.9)
    return model


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * MICROBATCHES, LENGTH)
    return {name: torch.randint(WORDS, shape, generator=generator) for name in ("ids", "labels")}


def write(folder: Path, stages: int, tensor: int) -> Path:
    """Write the package; its folder."""
    folder.mkdir(parents=True)
    source = Path(autopart.runtime.__file__).parent
    shutil.copytree(source, folder / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    table = PIPELINE.replace("STAGES, TENSOR = 2, 2", f"STAGES, TENSOR = {stages}, {tensor}")
    (folder / "pipeline.py").write_text(table)
    (folder / "train.py").write_text(
        "from pipeline import PIPELINE\nfrom runtime.train import main\n\nmain(PIPELINE)\n"
    )
    return folder
