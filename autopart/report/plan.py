"""A plan as text: its stages, its totals, what splits by hand would cost, and notes."""

from __future__ import annotations

import re
from collections import Counter

from autopart.cluster import Cluster
from autopart.plan import Baseline, BlockLayout, Plan
from autopart.simulator import simulate
from autopart.text import count, counted, gibibytes, milliseconds, percent, printable, table

_TIMES = {
    "measured": "of operators as they were measured, but for those that the notes name",
    "corrected": "of formulas: those of operators corrected by what was measured, those of messages not",
}


def format_plan(plan: Plan) -> str:
    """Everything a person wants to know of a plan, as lines of text."""
    cluster = Cluster.from_data(plan.cluster)
    parts = [_heading(plan, cluster), _stages(plan), _totals(plan)]
    if plan.layouts is not None:
        parts.append(_blocks(plan.layouts.blocks, plan.strategy.tensor))
    if plan.baselines:
        parts.append(_baselines(plan))
    notes = dict.fromkeys((*cluster.notes, *plan.notes))
    if notes:
        parts.append("Notes\n" + "\n".join(f"- {printable(note)}" for note in notes))
    return "\n\n".join(parts)


def _heading(plan: Plan, cluster: Cluster) -> str:
    strategy = plan.strategy
    stages = counted(strategy.stages, "stage")
    if strategy.tensor > 1:
        stages += f" x {strategy.tensor} tensor ranks"
    return (
        f"{printable(plan.model)} on {cluster}: {stages}, {strategy.schedule}, "
        f"{counted(strategy.microbatches, 'microbatch')} of {counted(strategy.microbatch_size, 'row')}, "
        f"{plan.mode} in {plan.dtype}" + (f" with {plan.optimizer}" if plan.mode == "training" else "")
    )


def _stages(plan: Plan) -> str:
    headers = ["stage", "devices", "nodes", "parameters", "forward", "backward", "communication", "memory", "of"]
    units = ["", "", "", "", "ms", "ms", "ms", "GiB", "GiB"]
    rows = [
        [
            i,
            ",".join(map(str, stage.devices)),
            stage.nodes,
            count(stage.parameters),
            milliseconds(stage.forward_s),
            milliseconds(stage.backward_s),
            milliseconds(stage.communication_s),
            gibibytes(stage.peak_memory_bytes),
            gibibytes(stage.memory_limit_bytes),
        ]
        for i, stage in enumerate(plan.per_stage)
    ]
    return table(rows, [f"{name}\n{unit}".rstrip() for name, unit in zip(headers, units, strict=True)], (1,))


def _totals(plan: Plan) -> str:
    rows = [
        ("step time", f"{milliseconds(plan.step_time_s)} ms"),
        ("simulated", _simulated(plan)),
        (
            "lower bound (of the formula)",
            f"{milliseconds(plan.lower_bound_s)} ms, gap {percent(plan.gap)}: {_proof(plan)}",
        ),
        ("balance", f"{plan.balance:.3f} (mean stage time / worst stage time)"),
        ("cuts", _cuts(plan)),
    ]
    if len(plan.degrees) > 1:
        degrees = [f"{t}: {milliseconds(time_s)} ms" for t, time_s in plan.degrees.items()]
        rows.append(("tensor ranks", ", ".join(degrees)))
    steps = [step for step in ("trace", "profile", "solve", "emit") if step in plan.seconds]
    if plan.times_from != "analytic":
        rows.append(("times", _TIMES[plan.times_from]))
    if steps:
        rows.append(("made in", ", ".join(f"{step} {plan.seconds[step]:.1f} s" for step in steps)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _simulated(plan: Plan) -> str:
    found = simulate(plan)
    return f"{milliseconds(found.step_s)} ms, event by event; devices compute nothing in {percent(found.bubble)} of it"


def _blocks(blocks: tuple[BlockLayout, ...], t: int) -> str:
    """What is split how, and what a rank sends for one microbatch; blocks that differ in numbers alone are one row."""
    alike: dict[tuple[str, ...], list[BlockLayout]] = {}
    for block in blocks:
        words = _words(block)
        alike.setdefault((re.sub(r"\d+", "#", block.block), *words, _collectives(block)), []).append(block)
    rows = []
    for (_, *words, collectives), found in alike.items():
        label = (found[0].block or "the model itself") + (f" and {len(found) - 1} like it" if len(found) > 1 else "")
        sent = f"{found[0].bytes_sent / 2**20:.2f}"
        rows.append((printable(label), "\n".join(map(printable, words)), collectives, sent))
    headers = ["block", f"split over {t} ranks", "collectives of one microbatch", "a rank sends\nMiB"]
    return table(rows, headers, (0, 1, 2))


def _words(block: BlockLayout) -> list[str]:
    """ "column: q_proj, k_proj" for each way in which modules of the block are split."""
    modules: dict[str, list[str]] = {}
    for path, text in block.splits.items():
        name = path.removeprefix(f"{block.block}.") if path != block.block else path.rpartition(".")[2]
        modules.setdefault(text.partition(":")[0], []).append(name)
    return [f"{how}: {', '.join(names)}" for how, names in modules.items()]


def _collectives(block: BlockLayout) -> str:
    found = Counter(block.collectives)
    return ", ".join(f"{number} {name.replace('_', '-')}" for name, number in sorted(found.items()) if number) or "none"


def _proof(plan: Plan) -> str:
    if plan.status == "optimal":
        return "proven optimal"
    return f"best found, stopped by the {plan.stopped_by}" if plan.stopped_by != "proof" else "best found"


def _cuts(plan: Plan) -> str:
    text = {"block": "between blocks", "operator": "between operators"}[plan.granularity]
    others = [
        f"{name} granularity: {milliseconds(time_s)} ms"
        for name, time_s in sorted(plan.alternatives.items())
        if name != plan.granularity
    ]
    return "; ".join([text, *others])


def _baselines(plan: Plan) -> str:
    rows = [
        (baseline.name, milliseconds(baseline.step_time_s), _verdict(baseline, plan)) for baseline in plan.baselines
    ]
    return table([("this plan", milliseconds(plan.step_time_s), ""), *rows], ["by hand", "step ms", ""], (0, 2))


def _verdict(baseline: Baseline, plan: Plan) -> str:
    if not baseline.fits:
        return f"does not fit: {baseline.reason}" if baseline.step_time_s is not None else baseline.reason or ""
    if baseline.step_time_s is None or plan.step_time_s <= 0:
        return baseline.reason or ""
    ratio = baseline.step_time_s / plan.step_time_s
    if abs(ratio - 1) < 0.0005:
        return "the same"
    return f"{ratio:.2f} times as long" if ratio >= 1 else f"{(1 - ratio) * 100:.1f} % shorter"
