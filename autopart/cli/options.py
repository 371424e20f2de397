"""The command line's app, and the options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopart.errors import UsageError

SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}

app = typer.Typer(
    help="Split a PyTorch model over several devices: plan, emit, verify.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings=SETTINGS,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="hf:NAME, timm:NAME, torchvision:NAME, zoo:NAME, FILE.py:FUNCTION or package.module:FUNCTION, "
        "each with ?key=value&... if you like.",
    ),
]
Gpus = Annotated[str, typer.Option("--gpus", help="4, 8xH100-80G, 2x8xA100-80G (machines x GPUs), or a cluster file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, also when it fails.")]
Stages = Annotated[str, typer.Option(help="Number of pipeline stages, or auto.")]
Tensor = Annotated[
    str, typer.Option(help="Over how many GPUs the tensors of a stage are split (named: for least memory), or auto.")
]
Schedule = Annotated[str, typer.Option(help="gpipe, 1f1b, another schedule of torch.distributed.pipelining, or auto.")]
Microbatches = Annotated[str, typer.Option(help="Microbatches of one step, or auto.")]
GlobalBatch = Annotated[int | None, typer.Option(min=1, help="Rows of one step. Default: those of the model's inputs.")]
Optimizer = Annotated[str, typer.Option(help="sgd, sgd-momentum, adam or adamw: decides the memory of its state.")]
Dtype = Annotated[str | None, typer.Option(help="Convert the model first: float32, bfloat16, ...")]
Recompute = Annotated[
    str, typer.Option(help="Whether backward may compute blocks again to save memory: auto (where it helps), or none.")
]
Granularity = Annotated[str, typer.Option(help="Where cuts may be: block, operator, or auto.")]
Threshold = Annotated[float, typer.Option(min=0, help="Gain in step time that a cut inside a block must bring.")]
TimeLimit = Annotated[float, typer.Option(min=0, help="Seconds for the solver.")]
Measured = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="What was measured: of autopart profile, or of train.py --record."),
]
Mode = Annotated[str, typer.Option(help="training or inference.")]


def number_or_auto(option: str, text: str) -> int | str:
    """The value of an option that is a positive number or auto."""
    if text == "auto":
        return text
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise UsageError(f"{option} is a positive number or auto, not {text!r}")
    return int(text)
