"""Is everything really split? Llama-3-8B over 8 tensor ranks: what a rank holds and sends, counted from its package.

The emitted stage is built and run, forward and backward, on fake tensors in the shapes of one microbatch, beside the
whole model: bytes of parameters, bytes that autograd keeps (parameters and inputs aside, a storage once), and every
call of a collective in the emitted code. Shapes are equal on all ranks, so that one stands for each. Two plans are
made: for the degree by name, where backward gathers again what would be kept whole, and for the degree found by itself.

    python -m benchmarks.real_splitting [--tensor N] [--json FILE]

Exit status 1 if a rank holds more than 3 % above or below its share of the parameters, keeps (by the first plan) more
than 1.25 times its share of the activations, or its code makes other collectives than the plan says.
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
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopart
from autopart.cluster import Cluster
from autopart.verification.folder import opened
from benchmarks.llama import llama_3_8b
from benchmarks.output import parser, show

MOST_PARAMETERS = 1.03
MOST_ACTIVATIONS = 1.25
LENGTH = 2048
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


def planned(model: nn.Module, cluster: Cluster, tensor: int | str) -> autopart.Partition:
    """One stage over all GPUs of a cluster, a row a microbatch."""
    batch = torch.zeros(8, LENGTH, dtype=torch.long, device="meta")
    return autopart.partition(
        model,
        cluster,
        example_kwargs={"input_ids": batch, "labels": batch},
        microbatches=8,
        stages=1,
        tensor=tensor,
    )


def run(tensor: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each plan and what a rank has of it, and whether all holds."""
    model, cluster = llama_3_8b(), Cluster.parse(f"{tensor}xH100-80G")
    mode = FakeTensorMode()
    with mode:
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
        whole = llama_3_8b("cpu")
        kept, _ = kept_bytes(lambda: whole(input_ids=tokens, labels=tokens).loss, [*whole.parameters(), tokens])
    of_whole = {"parameters": sum(p.numel() * p.element_size() for p in model.parameters()), "kept": kept}
    rows, holds = [], True
    for degree in (tensor, "auto"):
        plan = planned(model, cluster, degree)
        with tempfile.TemporaryDirectory() as directory:
            found = rank(plan.emit(Path(directory) / "out"), tensor, mode, tokens)
        assert plan.layouts is not None
        said: Counter[str] = Counter()
        for block in plan.layouts.blocks:
            said.update(block.collectives)
        row: dict[str, Any] = {"tensor": degree, "step, s": plan.step_time_s}
        for what, size in of_whole.items():
            row[f"{what}, GiB"] = found[what] / 2**30
            row[f"{what}, times its share"] = found[what] * tensor / size
        counted = {f"{way} {kind}": found[way][kind] for way in ("forward", "backward") for kind in EXCHANGES}
        row["collectives in the code"] = sum(counted.values())
        row["in the plan"] = sum(said.values())
        row["inside operators"] = sum(
            found[w][f"inside operators {k}"] for w in ("forward", "backward") for k in EXCHANGES
        )
        holds &= abs(row["parameters, times its share"] - 1) <= MOST_PARAMETERS - 1
        holds &= all(said[key] == count for key, count in counted.items())
        rows.append(row)
    holds &= rows[0]["kept, times its share"] <= MOST_ACTIVATIONS
    return rows, {"all holds": holds}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tensor", type=int, default=8, help="ranks (8)")
    arguments = options.parse_args()
    rows, summary = run(arguments.tensor)
    show(rows, arguments.json, summary)
    sys.exit(0 if summary["all holds"] else 1)


if __name__ == "__main__":
    main()
