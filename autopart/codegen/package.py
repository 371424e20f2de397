"""emit(): from a graph and a plan to a folder that `torchrun` runs and that needs nothing but torch."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import autopart.runtime
from autopart.blocks import spans
from autopart.codegen.classes import ClassWriter
from autopart.codegen.conversions import settle
from autopart.codegen.data import CONSTANTS_MODULE, Constant, held_by_value, values
from autopart.codegen.files import HEADER, blocks_file, name_classes, registrations, stage_file, uniform_checkpoints
from autopart.codegen.forms import Forms
from autopart.codegen.frames import ConstantNames, Frame, build_frames
from autopart.codegen.functions import imports
from autopart.codegen.hints import Hints
from autopart.codegen.modules import build_modules, hold_state
from autopart.codegen.opaque import OPAQUE_MODULE, OpaqueCalls
from autopart.codegen.placement import place
from autopart.codegen.program import build_program
from autopart.codegen.readme import readme
from autopart.codegen.recomputed import check_recomputed, recomputed_calls
from autopart.codegen.table import name_values, pipeline_file
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.sharding import chosen, rewrite

LINE_LENGTH = 120
MARKER = "autopart-package.json"
SCHEMA = "autopart-package/1"

_TRAIN = f'''{HEADER}
"""Train this package: torchrun --nproc-per-node N train.py [--help]."""

from pipeline import PIPELINE

from runtime.train import main

if __name__ == "__main__":
    main(PIPELINE)
'''


def emit(graph: Graph, plan: Plan, directory: str | os.PathLike[str]) -> None:
    """Write the package of a plan.

    The folder holds one file for each stage, `blocks.py` for what they share, `pipeline.py`, `train.py`, `README.md`,
    `plan.json`, a copy of the runtime, and `constants.pt` where the model has tensors that are not weights.

    Args:
        graph: The captured model, whole.
        plan: A plan made for this graph; where it splits tensors, the package is that of one rank.
        directory: Where to write; made anew, or a package of before whose files nobody has changed since.

    Raises:
        UsageError: The plan is not for this graph, or the directory is not ours to overwrite or cannot be written.
        CaptureError: The plan cuts the model where evaluation mode cannot be cut.
    """
    target = Path(directory)
    with _writing(target):
        _check_target(target)
    files, tensors = package_files(_local(graph, plan), plan)
    with _writing(target), _new_folder(target.parent):
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write(folder, files)
            if tensors is not None:
                content = io.BytesIO()  # torch's own writer does not say why a file could not be written
                torch.save(tensors, content)
                (folder / "constants.pt").write_bytes(content.getbuffer())
            shutil.copytree(
                Path(autopart.runtime.__file__).parent,
                folder / "runtime",
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            _format(folder)
            _seal(folder)
            _replace(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _check_plan(graph: Graph, plan: Plan) -> None:
    """A plan for another graph, or one that was changed, is refused before anything is written from it."""
    names = {node.name for node in graph.primary.calls}
    strangers = [*sorted(names - plan.assignment.keys()), *sorted(plan.assignment.keys() - names)]
    strangers += [name for stage in plan.per_stage for name in stage.sliced if name not in names]
    if strangers:
        more = f" and {len(strangers) - 1} more operations" if len(strangers) > 1 else ""
        raise UsageError(
            f"the plan and the graph do not speak of the same operations ({strangers[0]}{more}): "
            "it was made for another graph",
            "Plan this model anew.",
        )
    strategy = plan.strategy
    if strategy.microbatch_size != graph.microbatch_size or (strategy.replicas, strategy.zero) != (1, 0):
        raise UsageError(
            f"the plan is for microbatches of {strategy.microbatch_size} rows, {strategy.replicas} replicas and ZeRO "
            f"stage {strategy.zero}; the graph has microbatches of {graph.microbatch_size}, one copy, and no ZeRO",
            "Plan this model anew.",
        )


def _local(graph: Graph, plan: Plan) -> Graph:
    """What a process runs: the graph itself, or that of one of its tensor ranks."""
    if plan.layouts is None:
        return graph
    t = plan.strategy.tensor
    layouts = plan.layouts
    return rewrite(graph, chosen(graph, t, layouts.state, layouts.strategies, layouts.again), t)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """What the system refuses, said of the folder that the user named."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        place = f" ({error.filename})" if error.filename and str(error.filename) != str(target) else ""
        raise UsageError(
            f"cannot write the package to {target}: {reason}{place}", "Choose another folder, or make room for it."
        ) from error


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """The folder, with those above it; if the block fails, the ones that were not there before go again."""
    made: list[Path] = []
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.is_dir():
                path.mkdir(exist_ok=True)
                made.append(path)
        yield
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()
        raise


def package_files(graph: Graph, plan: Plan) -> tuple[dict[str, str], dict[str, Constant] | None]:
    """File name -> text of everything that is written anew for a model, before formatting, and `constants.pt`.

    Args:
        graph: What each process runs: the whole graph, or a `LocalGraph`.
    """
    stages = len(plan.per_stage)
    _check_plan(graph, plan)
    check_recomputed(graph, plan)
    program = build_program(graph)
    settle(program)
    functions = imports(op.target for op in program.ops)
    placement = place(program, graph, plan.assignment, stages)
    constants: ConstantNames = {}
    roots = [
        build_frames(stage, graph.state, f"Stage{stage.index}", planned.recomputed, constants)
        for stage, planned in zip(placement.stages, plan.per_stage, strict=True)
    ]
    holding = hold_state(roots, graph)
    modules = [
        build_modules(s, root, names, graph) for s, (root, names) in enumerate(zip(roots, holding.names, strict=True))
    ]
    checkpoints, loose = list[set[Frame]](), list[set[object]]()
    for root, planned in zip(roots, plan.per_stage, strict=True):
        whole, rest = uniform_checkpoints(root)
        checkpoints.append(whole | recomputed_calls(root, planned.recomputed))
        loose.append(rest)
    forms = Forms(modules, set().union(*checkpoints))
    name_classes(forms.kinds, modules, functions.keys())
    opaque = OpaqueCalls(graph, functions.keys())
    hints = Hints(graph.state, graph.modules, graph.dtype, opaque.imports().keys() | functions.keys())
    names = name_values(program, placement, {v: hints.boundary_name(v) for s in placement.stages for v in s.gives})
    hints.fixed = names
    writer = ClassWriter(forms, hints, opaque, functions)
    by_value = held_by_value(graph, holding)
    files = {}
    blocks = blocks_file(forms, writer, graph)
    if blocks is not None:
        files["blocks.py"] = blocks
    for s, module in enumerate(modules):
        fill = any(name in by_value for name in holding.names[s])
        notes = ["Recomputation of a part that is not one module call is left out."] if loose[s] else []
        if again := plan.per_stage[s].recomputed:
            notes.append(f"Backward computes again, instead of keeping what they save: {spans(again)}.")
        files[f"stage_{s}.py"] = stage_file(s, module, forms, writer, graph, plan, holding, fill, notes)
    recomputing = [bool(calls) for calls in checkpoints]
    files["pipeline.py"] = pipeline_file(graph, plan, program, placement, names, holding, recomputing, HEADER)
    files["train.py"] = _TRAIN
    if by_value:
        files["constants.py"] = CONSTANTS_MODULE
    if opaque.modules:
        files |= {"opaque.py": OPAQUE_MODULE, "opaque.json": opaque.description()}
    for name in opaque.user_code.sources:
        files[f"user_code/{name}.py"] = opaque.user_code.text(name)
    files["plan.json"] = plan.to_json()
    files["README.md"] = readme(graph, plan, registrations("\n".join(files.values())), opaque)
    files["ruff.toml"] = f"line-length = {LINE_LENGTH}\n"
    return files, values(graph, by_value) if by_value else None


def _check_target(target: Path) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise UsageError(f"{target} exists and is not a folder")
    if not any(target.iterdir()):
        return
    try:
        sealed = json.loads((target / MARKER).read_text(encoding="utf-8"))
        hashes = sealed["files"]
        ours = sealed["schema"] == SCHEMA and isinstance(hashes, dict)
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise UsageError(f"{target} was not written by autopart, so it is not overwritten", "Choose another folder.")
    found = _hashes(target)
    changed = sorted(name for name in found if name in hashes and found[name] != hashes[name])
    added = sorted(name for name in found if name not in hashes)
    for names, what in ((changed, "was changed"), (added, "was added")):
        if names:
            raise UsageError(
                f"{target / names[0]} {what} since the package was written (and {len(names) - 1} more files)",
                "Move it away, or choose another folder.",
            )


def _hashes(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file, but for the marker and what Python leaves behind."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc")
    named = {p.relative_to(folder).as_posix(): p for p in paths}
    named.pop(MARKER, None)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in named.items()}


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _format(folder: Path) -> None:
    """Lay the Python files out as `ruff format` leaves them."""
    files = sorted(p.name for p in folder.glob("*.py"))
    command = [sys.executable, "-m", "ruff"]
    for step in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        ruff = [*command, *step, "--isolated", "--no-cache", "--target-version", "py311"]
        result = subprocess.run(
            [*ruff, "--line-length", str(LINE_LENGTH), *files] if step[0] == "format" else [*ruff, *files],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise RuntimeError(f"ruff could not lay out the package: {result.stderr.strip()}")


def _seal(folder: Path) -> None:
    sealed = {"schema": SCHEMA, "files": _hashes(folder)}
    (folder / MARKER).write_text(json.dumps(sealed, indent=2) + "\n", encoding="utf-8", newline="\n")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _replace(folder: Path, target: Path) -> None:
    """Put the new folder in the old one's place; a crash in between leaves one of them whole."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        target.rename(old / "package")
        try:
            folder.rename(target)
        except OSError:
            (old / "package").rename(target)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(target)
