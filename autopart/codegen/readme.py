"""README.md of a package: what it is, how to run it, what each stage is predicted to cost."""

from __future__ import annotations

import re

from autopart.codegen.files import milliseconds, size
from autopart.codegen.opaque import OpaqueCalls
from autopart.codegen.table import ranks_of, tensor_degree
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.runtime.schedules import SCHEDULES
from autopart.sharding import LocalGraph, describe


def _order(plan: Plan) -> list[str]:
    """Where devices come in another order than their numbers'."""
    ranks = ", ".join(map(str, ranks_of(plan)))
    return [f"The pipeline goes through torchrun's ranks in this order: {ranks}.", ""] if ranks else []


def readme(graph: Graph, plan: Plan, libraries: list[str], opaque: OpaqueCalls) -> str:
    """The text.

    Args:
        libraries: Modules whose operators the model uses.
        opaque: What was kept of the user's own code.
    """
    stages = len(plan.per_stage)
    s = plan.strategy
    info = SCHEDULES[s.schedule]
    ranks = tensor_degree(graph)
    places = stages // info.stages_per_process
    lines = [
        f"# {_inline(graph.name)} in {stages} stages" + (f" of {ranks} tensor ranks" if ranks > 1 else ""),
        "",
        f"Written by autopart from the plan in `plan.json`. It needs {_needs(libraries, opaque)}. Captured in "
        f"{str(graph.dtype).removeprefix('torch.')}, {s.microbatches} microbatches of {s.microbatch_size} rows, "
        f"schedule {s.schedule}.",
        "",
        "```",
        f"torchrun --nproc-per-node {places * ranks} train.py --steps 10",
        "```",
        "",
        "Without `--weights` the weights are random; `train.py --help` lists the options.",
        "",
        *_order(plan),
        *(_tensor_ranks(graph, places) if isinstance(graph, LocalGraph) else ()),
        "| stage | operations | parameters | forward | backward | communication | peak memory | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for i, p in enumerate(plan.per_stage):
        times = [milliseconds(t) for t in (p.forward_s, p.backward_s, p.communication_s)]
        lines.append(
            f"| {i} | {p.nodes:,} | {p.parameters:,} | {' | '.join(times)} | "
            f"{size(p.peak_memory_bytes)} | {size(p.memory_limit_bytes)} |"
        )
    lines += [
        "",
        f"Times are predictions for one microbatch. Predicted step: {milliseconds(plan.step_time_s)}, proven to be "
        f"within {plan.gap:.2%} of the best ({plan.status}).",
        "",
        "`stage_K.py` holds the model code of stage K and `blocks.py` what several stages share; module and parameter "
        "names are the original's. `pipeline.py` says what crosses between stages and where each weight lives.",
    ]
    if opaque.user_code.sources:
        lines += ["", "`user_code/` holds copies of the user's own files: parts of the model that run as they are."]
    notes = list(dict.fromkeys([*graph.notes, *plan.notes]))
    if notes:
        lines += ["", "## Notes", "", *(f"- {_inline(note)}" for note in notes)]
    return "\n".join(lines) + "\n"


def _tensor_ranks(graph: LocalGraph, places: int) -> list[str]:
    """How the work of one stage is shared out; blocks that are split alike stand in one row."""
    t = graph.tensor
    rows: dict[tuple[str, str], list[str]] = {}
    for path, words in describe(graph.whole, graph.choice, t).items():
        rows.setdefault((re.sub(r"\d+", "*", path), words), []).append(path)
    return [
        f"It needs {places * t} processes: {places} (places in the pipeline) x {t} (tensor ranks, which share out the "
        "work of every stage). The ranks of one place are consecutive processes. Weights that are not in this table "
        "are whole on every rank.",
        "",
        "| modules | split |",
        "|---|---|",
        *(f"| {_code(paths[0] if len(paths) == 1 else alike)} | {words} |" for (alike, words), paths in rows.items()),
        "",
    ]


def _code(path: str) -> str:
    return f"`{_inline(path)}`" if path else "the model itself"


def _needs(libraries: list[str], opaque: OpaqueCalls) -> str:
    other = sorted({module.partition(".")[0] for module in [*libraries, *opaque.libraries]} - {"torch"})
    return "torch alone" if not other else f"torch and {', '.join(other)}"


def _inline(text: str) -> str:
    return " ".join(text.split())
