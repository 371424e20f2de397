"""The Python files of a package that hold the model: `blocks.py` and one file for each stage."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Set

from autopart.codegen.classes import ClassWriter
from autopart.codegen.forms import ClassKind, Forms
from autopart.codegen.frames import Frame
from autopart.codegen.modules import Holding, Module
from autopart.codegen.names import RESERVED, identifier
from autopart.codegen.program import Op
from autopart.graph import Graph, StateEntry
from autopart.plan import Plan, StagePlan
from autopart.sharding import LocalGraph
from autopart.torch_private import OPDEFS

HEADER = "# Written by autopart; see README.md."
_TAKEN = (
    set(RESERVED) | {"nn", "torch", "F", "OrderedDict", "fill_constants", "build_opaque", "encode"} | set(dir(builtins))
)


def name_classes(kinds: list[ClassKind], roots: list[Module], reserved: Set[str]) -> None:
    """Give every class a name: its original one, with a number where several classes would share it."""
    shared = [k for k in kinds if len(k.stages) > 1]
    taken = _TAKEN | reserved | {f"Stage{i}" for i in range(len(roots))}
    for kind in shared:
        kind.name = _unique(kind, taken)
    for stage in range(len(roots)):
        here = set(taken)
        for kind in kinds:
            if kind.stages == {stage}:
                root = kind.example.module.path == ""
                kind.name = f"Stage{stage}" if root else _unique(kind, here)


def _unique(kind: ClassKind, taken: set[str]) -> str:
    base = identifier(kind.example.module.kind, "Block")
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}{number}" if not base[-1].isdigit() else f"{base}_{number}"
    taken.add(name)
    return name


def blocks_file(forms: Forms, writer: ClassWriter, graph: Graph) -> str | None:
    """The classes that several stages share; None if there are none."""
    shared = [k for k in forms.kinds if len(k.stages) > 1]
    if not shared:
        return None
    lines = []
    for kind in shared:
        lines += ["", "", *writer.write(kind, "", [], False)]
    note = (
        f"Blocks of {identifier(graph.name)} that several stages have.\n\n"
        f"Shapes in comments are those of one microbatch{_rank(graph)}; dtypes that are not shown are "
        f"{_dtype(graph)}.\n"
    )
    return _module(note, lines, writer.imports, {})


def stage_file(
    stage: int,
    root: Module,
    forms: Forms,
    writer: ClassWriter,
    graph: Graph,
    plan: Plan,
    holding: Holding,
    fill: bool,
    notes: list[str],
) -> str:
    """One stage: the classes that it alone has, and its own, which comes last."""
    lines: list[str] = []
    own = [k for k in forms.kinds if k.stages == {stage}]
    for kind in own:
        is_root = kind.example.module is root
        docstring = stage_docstring(stage, graph, plan, notes) if is_root else ""
        ties = _ties(holding.names[stage]) if is_root else []
        lines += ["", "", *writer.write(kind, docstring, ties, is_root and fill)]
    shared = sorted(k.name for k in forms.kinds if len(k.stages) > 1)
    note = f"Stage {stage} of {len(plan.per_stage)} of {identifier(graph.name)}."
    local = {"blocks": shared, "constants": ["fill_constants"], "opaque": ["build_opaque"]}
    return _module(note, lines, writer.imports, local)


def _ties(names: Mapping[str, StateEntry]) -> list[tuple[str, str]]:
    """(name, first name) of each further name of an entry in one stage."""
    first: dict[int, str] = {}
    found = []
    for name, entry in names.items():
        if entry.kind == "constant":
            continue
        if id(entry) in first:
            found.append((name, first[id(entry)]))
        else:
            first[id(entry)] = name
    return found


def stage_docstring(stage: int, graph: Graph, plan: Plan, notes: list[str]) -> str:
    """What the plan predicts for a stage."""
    p = plan.per_stage[stage]
    lines = [
        f"Stage {stage} of {len(plan.per_stage)}, captured in {_dtype(graph)}; shapes are those of one microbatch"
        f"{_rank(graph)}.",
        "",
        "Predicted for one microbatch:",
        *(f"    {line}" for line in predictions(p)),
    ]
    for note in notes:
        lines += ["", note]
    return "\n".join(lines)


def predictions(p: StagePlan) -> list[str]:
    """The figures of one stage, for people."""
    return [
        f"forward {milliseconds(p.forward_s)}, backward {milliseconds(p.backward_s)}, "
        f"communication {milliseconds(p.communication_s)}",
        f"peak memory {size(p.peak_memory_bytes)} of {size(p.memory_limit_bytes)}; "
        f"parameters {size(p.parameter_bytes)}",
    ]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def size(amount: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.4g} {unit}"
    return f"{amount} bytes"


def _rank(graph: Graph) -> str:
    return f" on one of {graph.tensor} tensor ranks" if isinstance(graph, LocalGraph) else ""


def _dtype(graph: Graph) -> str:
    return str(graph.dtype).removeprefix("torch.")


def _module(note: str, lines: list[str], imports: dict[str, str], local: dict[str, list[str]]) -> str:
    """A Python file with the imports that its text uses."""
    body = "\n".join(lines)
    used = {n.id for n in ast.walk(ast.parse(body)) if isinstance(n, ast.Name)}
    libraries = registrations(body)
    head = [HEADER, f'"""{note}"""', ""]
    if "OrderedDict" in used:
        head += ["from collections import OrderedDict", ""]
    outside = [text for name, text in (("torch", "import torch"),) if name in used]
    outside += ["import torch.nn.functional as F"] if "F" in used else []
    outside += ["from torch import nn"] if "nn" in used else []
    outside += ["from torch.utils.checkpoint import checkpoint"] if "checkpoint" in used else []
    head += outside
    wanted = [f"from {module} import {', '.join(n for n in names if n in used)}" for module, names in local.items()]
    wanted = [w for w in wanted if not w.endswith("import ")]
    wanted += [statement for name, statement in imports.items() if name in used]
    if libraries:
        head += ["", "# Registers operators of another library, which this package therefore needs."]
        head += [f"import {module}  # noqa: F401" for module in libraries]
    if wanted:
        head += ["", *wanted]
    return "\n".join([*head, body, ""])


def registrations(code: str) -> list[str]:
    """Modules that must be imported for the operators in `code` that are not torch's own."""
    found = set()
    for namespace, name in re.findall(r"torch\.ops\.(\w+)\.(\w+)\.", code):
        if namespace not in ("aten", "prims"):
            defined = OPDEFS.get(f"{namespace}::{name}")
            found.add(defined._init_fn.__module__ if defined is not None else namespace)
    return sorted(found)


def uniform_checkpoints(root: Frame) -> tuple[set[Frame], set[object]]:
    """The calls that are checkpointed as a whole, and the regions that are no single call."""
    sizes: dict[object, int] = {}
    for op in root.operations():
        if op.checkpoint is not None:
            sizes[op.checkpoint] = sizes.get(op.checkpoint, 0) + 1
    found: set[Frame] = set()
    done: set[object] = set()

    def visit(frame: Frame) -> None:
        for item in _frames(frame):
            regions = {op.checkpoint for op in item.operations()}
            region = next(iter(regions))
            if len(regions) == 1 and region is not None and sizes[region] == sum(1 for _ in item.operations()):
                found.add(item)
                done.add(region)
            else:
                visit(item)

    visit(root)
    return found, set(sizes) - done


def _frames(frame: Frame) -> Iterator[Frame]:
    return (item for item in frame.body if not isinstance(item, Op))
