"""Is everything really split? Llama-3-8B over 8 tensor ranks: what a rank holds and sends, counted from its package.

The emitted stage is built and run, forward and backward, on fake tensors in the shapes of one microbatch, beside the
whole model: bytes of parameters, bytes that autograd keeps (parameters and inputs aside, a storage once), and every
call of a collective in the emitted code. Shapes are equal on all ranks, so that one stands for each. By default the
microbatch is so large that its activations fill the memory, which is when they have to be split well; where there is
memory to spare (`--rows 1`), gathered inputs of products are kept whole, which is faster.

    python -m benchmarks.real_splitting [--tensor N] [--json FILE]

Exit status 1 if a rank holds more than 3 % above or below its share of the parameters, keeps more than 1.25 times its
share of the activations, or its code makes other collectives than the plan says.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import autopart
from autopart.verification.folder import opened
from benchmarks.llama import llama_3_8b
from benchmarks.output import parser, show

MOST_PARAMETERS = 1.03
MOST_ACTIVATIONS = 1.25
# What a rank exchanges to go from one layout to another, by the names of `runtime.collectives.Ranks`.
EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def kept_bytes(
    run: Callable[[], Any],
    aside: Iterable[torch.Tensor],
    keep: Callable[[torch.Tensor], Any] = itself,
    restore: Callable[[Any], torch.Tensor] = itself,
) -> tuple[int, Any]:
    """Bytes of the storages that autograd keeps while `run` runs, but for those of `aside`, and its result.

    Args:
        keep, restore: How the package keeps a tensor for backward.
    """
    known = {tensor.untyped_storage()._cdata for tensor in aside}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> Any:
        found = keep(tensor)
        held = found if isinstance(found, torch.Tensor) else found[0].shard
        if held.untyped_storage()._cdata not in known:
            kept[held.untyped_storage()._cdata] = held
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, restore):
        result = run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), result


def counting(ranks: Any, inside: list[bool]) -> Counter[str]:
    """Count the exchanges of `ranks`, apart those that operators make inside."""
    counts: Counter[str] = Counter()
    for name in EXCHANGES:
        method = getattr(ranks, name)

        @wraps(method)
        def counted(*args: Any, method: Any = method, name: str = name, **kwargs: Any) -> Any:
            counts[f"inside operators {name}" if inside else name] += 1
            return method(*args, **kwargs)

        setattr(ranks, name, counted)
    return counts


@contextmanager
def marked(operators: Any, inside: list[bool]) -> Iterator[None]:
    """While an operator that exchanges something inside runs, `inside` says so."""
    before = dict(vars(operators))
    for name, operator in before.items():
        if callable(operator) and getattr(operator, "__module__", "") == operators.__name__ and name[0] != "_":

            @wraps(operator)
            def noted(*args: Any, operator: Any = operator, **kwargs: Any) -> Any:
                inside.append(True)
                try:
                    return operator(*args, **kwargs)
                finally:
                    inside.pop()

            setattr(operators, name, noted)
    try:
        yield
    finally:
        vars(operators).update(before)


def rank(folder: Path, tensor: int, mode: FakeTensorMode, tokens: torch.Tensor) -> dict[str, Any]:
    """What one rank of the package holds, keeps and exchanges."""
    with opened(folder) as pipeline:
        collectives = importlib.import_module("runtime.collectives")
        operators = importlib.import_module("runtime.split_operators")
        again = importlib.import_module("runtime.gathered_again")
        (stage,) = pipeline.stages
        ranks = collectives.ShapeRanks(tensor)
        inside: list[bool] = []
        counts = counting(ranks, inside)
        collectives.use(ranks)
        with marked(operators, inside):
            for name in [n for n in sys.modules if n == "blocks" or n.startswith("stage_")]:
                importlib.reload(sys.modules[name])
            with mode:
                module = sys.modules["stage_0"].Stage0()
                aside = [*module.parameters(), tokens]
                kept, outputs = kept_bytes(
                    lambda: module(*[tokens] * len(stage.takes)), aside, again.keep, again.restore
                )
                forward = Counter(counts)
                dict(zip(stage.gives, outputs, strict=True))[pipeline.loss].backward()
        collectives.use(None)
    return {
        "parameters": sum(p.numel() * p.element_size() for p in module.parameters()),
        "kept": kept,
        "forward": forward,
        "backward": counts - forward,
    }


def run(tensor: int, rows_of_batch: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and whether all holds."""
    model = llama_3_8b()
    batch = torch.zeros(rows_of_batch, 2048, dtype=torch.long, device="meta")
    plan = autopart.partition(
        model,
        f"{tensor}xH100-80G",
        example_kwargs={"input_ids": batch, "labels": batch},
        microbatches=1,
        stages=1,
        tensor=tensor,
    )
    mode = FakeTensorMode()
    with mode:
        tokens = torch.zeros(rows_of_batch, 2048, dtype=torch.long)
    with tempfile.TemporaryDirectory() as directory:
        found = rank(plan.emit(Path(directory) / "out"), tensor, mode, tokens)
    with mode:
        whole = llama_3_8b("cpu")
        kept, _ = kept_bytes(lambda: whole(input_ids=tokens, labels=tokens).loss, [*whole.parameters(), tokens])
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.layouts is not None
    planned: Counter[str] = Counter()
    for block in plan.layouts.blocks:
        planned.update(block.collectives)
    rows = [
        {"what": "parameters, GiB", "whole": parameters / 2**30, "a rank": found["parameters"] / 2**30},
        {"what": "kept for backward, GiB", "whole": kept / 2**30, "a rank": found["kept"] / 2**30},
    ]
    for row in rows:
        row["times its share"] = row["a rank"] * tensor / row["whole"]
    summary: dict[str, Any] = {}
    equal = True
    for way in ("forward", "backward"):
        for name in EXCHANGES:
            code, said = found[way][name], planned[f"{way} {name}"]
            equal &= code == said
            summary[f"{way} {name.replace('_', '-')}s in the code (in the plan)"] = f"{code} ({said})"
        within = {name: count for name, count in found[way].items() if name.startswith("inside")}
        summary[f"{way}, inside operators"] = within or "none"
    within_share = abs(rows[0]["times its share"] - 1) <= MOST_PARAMETERS - 1
    summary["all holds"] = bool(within_share and rows[1]["times its share"] <= MOST_ACTIVATIONS and equal)
    return rows, summary


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tensor", type=int, default=8, help="ranks (8)")
    options.add_argument("--rows", type=int, default=24, help="rows of 2048 tokens in the one microbatch (24)")
    arguments = options.parse_args()
    rows, summary = run(arguments.tensor, arguments.rows)
    show(rows, arguments.json, summary)
    sys.exit(0 if summary["all holds"] else 1)


if __name__ == "__main__":
    main()
