"""`pipeline.py`: the table that the runtime reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopart.codegen.modules import Holding
from autopart.codegen.names import identifier, unique
from autopart.codegen.placement import Placement, reaches_loss
from autopart.codegen.program import SELECT, Program, Value
from autopart.codegen.split_backward import may_split_backward
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.runtime.schedules import SCHEDULES
from autopart.sharding import LocalGraph, Split, alike


def name_values(program: Program, placement: Placement, hint: Mapping[Value, str]) -> dict[Value, str]:
    """A unique name for each value that a stage takes or gives: inputs keep theirs."""
    names = {v: v.name for v in program.inputs.values()}
    for stage in placement.stages:
        for value in stage.gives:
            if value not in names:
                names[value] = unique(identifier(hint[value]), set(names.values()))
    return names


def pipeline_file(
    graph: Graph,
    plan: Plan,
    program: Program,
    placement: Placement,
    names: dict[Value, str],
    holding: Holding,
    recomputing: Sequence[bool],
    header: str,
) -> str:
    """The text of `pipeline.py`.

    Args:
        recomputing: Whether a stage computes anything again in backward. Its backward is not split then: torch would
            compute it again for the input gradients and for the weight gradients.
    """
    loss = program.outputs[graph.loss] if graph.loss is not None else None
    reached = reaches_loss(program, loss)
    stages = len(placement.stages)
    out = [
        header,
        f'"""{_plain(graph.name)} in {stages} stages: what crosses each boundary, and where each weight lives."""',
        "",
        "import torch",
        "",
        "from runtime.interface import Input, Output, Pipeline, Shard, Stage, Tie, Value",
        *(f"from stage_{s} import Stage{s}" for s in range(stages)),
        "",
        "STAGES = (",
    ]
    for s, stage in enumerate(placement.stages):
        splits = not recomputing[s] and may_split_backward(stage, reached)
        whole = "" if splits else ", whole_backward=True"
        takes = tuple(names[v] for v in stage.takes)
        gives = tuple(names[v] for v in stage.gives)
        out.append(f"    Stage(Stage{s}, takes={literal(takes)}, gives={literal(gives)}{whole}),")
    out += [")", "", "BOUNDARIES = ("]
    for s, boundary in enumerate(placement.boundaries):
        out.append(f"    (  # from stage {s} to stage {s + 1}")
        for value in boundary:
            flows = value.requires_grad and value in reached
            shape = tuple(int(n) for n in value.tensor.shape)
            how = ", scattered=True" if value.node.name in plan.per_stage[s].sliced and _is_alike(value) else ""
            what = f"{literal(names[value])}, {shape}, {value.tensor.dtype}, requires_grad={flows}{how}"
            out.append(f"        Value({what}),")
        out.append("    ),")
    out += [")", "", "INPUTS = ("]
    maximum = input_maxima(graph)
    for spec in graph.inputs:
        bound = f", maximum={maximum[spec.name]}" if spec.name in maximum else ""
        shape = tuple(int(n) for n in spec.shape)
        what = f"{literal(spec.name)}, {literal(spec.path)}, {shape}, {spec.dtype}"
        out.append(f"    Input({what}, batch_dim={spec.batch_dim}{bound}),")
    out += [")", "", "OUTPUTS = ("]
    shards = output_splits(graph)
    for value, spec_out, evaluated, split in zip(
        program.outputs, graph.outputs, program.evaluated, shards, strict=True
    ):
        what = f"{literal(names[value])}, {literal(spec_out.path)}, batch_dim={spec_out.batch_dim}"
        held = "" if split is None else f", shard={_shard(split)}"
        out.append(f"    Output({what}{'' if evaluated else ', in_evaluation=False'}{held}),")
    out += [")", "", "# Parameters that several stages hold: their gradients are summed.", "TIES = ("]
    for key, places in holding.copies().items():
        if graph.state[key].kind == "parameter" and len(places) > 1:
            out.append(f"    Tie({literal(tuple(places.items()))}),")
    out += [")", "", "# Key of the original state_dict -> (stage, name in that stage).", "NAMES = {"]
    for name in original_keys(graph):
        stage_of = next(s for s, held in enumerate(holding.names) if name in held)
        out.append(f"    {literal(name)}: ({stage_of}, {literal(name)}),")
    out += ["}", "", "# How each weight is drawn when no weights are given.", "INITIALIZATION = {"]
    for name, rule in initialization(graph).items():
        out.append(f"    {literal(name)}: {literal(rule)},")
    if tensor_degree(graph) > 1:
        out += [
            "}",
            "",
            "# Key of the original state_dict -> how the tensor ranks hold it; the others are whole.",
            "SHARDS = {",
        ]
        for name, split in state_splits(graph).items():
            out.append(f"    {literal(name)}: {_shard(split)},")
    out += [
        "}",
        "",
        f"CALL = {literal(graph.call)}",
        "",
        f"RESULT = {literal(graph.result)}",
        "",
        "PIPELINE = Pipeline(",
        f"    model={literal(graph.name)},",
        f"    mode={literal(graph.mode)},",
        f"    dtype={graph.dtype},",
        f"    schedule={literal(plan.strategy.schedule)},",
        f"    microbatches={plan.strategy.microbatches},",
        f"    microbatch_size={plan.strategy.microbatch_size},",
        "    inputs=INPUTS,",
        "    call=CALL,",
        "    outputs=OUTPUTS,",
        "    result=RESULT,",
        f"    loss={literal(names[loss]) if loss is not None else None},",
        f"    loss_name={literal(graph.loss_name)},",
        "    stages=STAGES,",
        "    boundaries=BOUNDARIES,",
        "    ties=TIES,",
        "    names=NAMES,",
        "    initialization=INITIALIZATION,",
        *_tensor_ranks(graph),
        *([f"    ranks={literal(ranks)},"] if (ranks := ranks_of(plan)) else []),
        ")",
    ]
    text = "\n".join(out) + "\n"
    for kind in ("Tie", "Value", "Input", "Output", "Shard"):
        if not re.search(rf"\b{kind}\(", text):
            text = text.replace(f" {kind},", "", 1) if f" {kind}," in text else text.replace(f", {kind}\n", "\n", 1)
    if "torch." not in text:
        text = text.replace("import torch\n\n", "", 1)
    return text


def ranks_of(plan: Plan) -> tuple[int, ...]:
    """Process -> rank of torchrun, counted among the devices that are used; empty where they come in order."""
    per_process = SCHEDULES[plan.strategy.schedule].stages_per_process
    places = len(plan.per_stage) // per_process
    devices = [device for stage in plan.per_stage[:places] for device in stage.devices]
    used = sorted(devices)
    return () if devices == used else tuple(used.index(device) for device in devices)


def _tensor_ranks(graph: Graph) -> list[str]:
    """What a table says of the ranks that share out a stage's work."""
    if tensor_degree(graph) == 1:
        return []
    dtypes = {node.meta["val"].dtype for node in graph.primary.calls if isinstance(node.meta["val"], torch.Tensor)}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point] + [graph.dtype]
    coarsest = max(floating, key=lambda dtype: torch.finfo(dtype).eps)
    lines = [f"    tensor={tensor_degree(graph)},", "    shards=SHARDS,"]
    return lines if coarsest == graph.dtype else [*lines, f"    coarsest={coarsest},"]


def _is_alike(value: Value) -> bool:
    """Whether tensor ranks hold a value alike, in both modes."""
    if value.op is None or value.op.target == SELECT or value.index is not None:
        return False
    return alike(value.node) and (value.op.evaluation is None or alike(value.op.evaluation))


def original_keys(graph: Graph) -> list[str]:
    """The keys of the model's `state_dict`, in the order of the state table."""
    return [n for e in graph.state.values() if e.persistent and e.kind != "constant" for n in e.names]


def initialization(graph: Graph) -> dict[str, Any]:
    """Name -> rule of every weight that has one which draws numbers."""
    found = {}
    for key, rule in graph.initialization.items():
        entry = graph.state[key]
        if entry.persistent and entry.kind != "constant" and rule[0] in ("normal", "uniform", "constant"):
            found[entry.name] = tuple(rule)
    return found


def tensor_degree(graph: Graph) -> int:
    """How many ranks run a stage together."""
    return graph.tensor if isinstance(graph, LocalGraph) else 1


def state_splits(graph: Graph) -> dict[str, Split]:
    """Every name in the model's `state_dict` of what the ranks hold in shards -> how it is cut."""
    splits = graph.shards if isinstance(graph, LocalGraph) else {}
    return {n: split for key, split in splits.items() if split is not None for n in graph.state[key].names}


def output_splits(graph: Graph) -> Sequence[Split | None]:
    """How the ranks hold each output in training; None: each has all of it."""
    return graph.output_splits if isinstance(graph, LocalGraph) else [None] * len(graph.outputs)


def _shard(split: Split) -> str:
    return f"Shard({split.dim}, {literal(tuple(int(part) for part in split.parts))})"


def input_maxima(graph: Graph) -> dict[str, int]:
    """Bounds for random integer inputs: the rows of the embedding, or the classes of the loss, that they index."""
    found: dict[str, int] = {}
    whole = graph.whole if isinstance(graph, LocalGraph) else graph
    for node in whole.primary.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name, args = node.target._schema.name, node.args
        if name == "aten::embedding":
            source, bound = args[1], int(args[0].meta["val"].shape[0])  # type: ignore[union-attr]
        elif name in ("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss"):
            source, bound = args[1], int(args[0].meta["val"].shape[1])  # type: ignore[union-attr]
        else:
            continue
        while isinstance(source, torch.fx.Node) and source.op == "call_function" and source.args:
            source = source.args[0]  # type: ignore[assignment]
        if (
            isinstance(source, torch.fx.Node)
            and source.op == "placeholder"
            and not source.meta["val"].is_floating_point()
        ):
            found[source.name] = min(found.get(source.name, bound), bound)
    return found


def literal(value: Any) -> str:
    """A constant as code, in ASCII: what a name of the user says is data here, whatever it says."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | float | str):
        return ascii(value)
    raise TypeError(f"a {type(value).__name__} cannot be written into pipeline.py")


def _plain(name: str) -> str:
    return identifier(name, "Model")
