"""verify(): run a package on local processes and compare everything it computes with the original model."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart import codegen
from autopart.errors import UsageError, VerificationError
from autopart.tracer import trace
from autopart.verification.comparison import TOLERANCES, Comparison
from autopart.verification.data import make_batches
from autopart.verification.folder import opened
from autopart.verification.launch import with_torchrun
from autopart.verification.reference import LossFunction, Reference, run_reference
from autopart.verification.report import KINDS, VerifyReport
from autopart.verification.worker import OPTIMIZERS

Place = tuple[int, str]
Launch = Callable[[Path, int, float], list[dict[str, Any]]]


def verify(
    package: str | PathLike[str] | Any,
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    processes: int | None = None,
    schedule: str | None = None,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    optimizer: str = "sgd",
    seed: int = 0,
    timeout_s: float = 600.0,
    launch: Launch = with_torchrun,
) -> VerifyReport:
    """Run a package over gloo and the original model eagerly, on the same weights and data, and compare.

    Both train for `steps` optimizer steps with different data in each, then evaluate. The model is run microbatch by
    microbatch, as the package does, and left as it was. Compared are the outputs and the loss of every microbatch,
    every gradient and buffer in every step, every weight after the last, and the outputs in evaluation mode in their
    original structure. Dropout is set to zero in both, and other random draws are replaced by fixed numbers.

    The comparison is made in the dtype that the package was captured in. Rounding hides small faults in float32: pass
    `dtype=torch.float64`, or make the package in it, for a sharp one. The model is converted while it runs.

    Args:
        package: A folder written by `emit`, or what `partition()` returned (it is then emitted to a temporary folder).
        model: The original model with real weights; the package is given its `state_dict`.
        args, kwargs, target: The global batch of the first step; random inputs of the captured shapes if left out.
        loss_fn: The one that the package was made with, if it was.
        processes, schedule: As planned, unless another schedule is forced; one process runs all stages itself.
        dtype: Capture the model anew in this dtype, and verify the package of the same plan; needs what `partition()`
            returned and the arguments of a call, because a captured graph has its dtype written into it.
        optimizer: "sgd" or "adamw". Adam divides by the size of the gradient, which turns the rounding of gradients
            that are zero into steps of full size: with it, such weights differ without a fault.
        launch: How processes are started (job file, processes, seconds) -> results by rank.

    Returns:
        The report; `passed` says whether all is equal within the tolerance of the dtype.

    Raises:
        UsageError: An argument does not fit the package.
        InputFileError: A file of the package is missing or does not run.
    """
    start = time.perf_counter()
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; not {optimizer!r}")
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise UsageError("the model is on the meta device, without values", "Build it with real weights to verify.")
    with tempfile.TemporaryDirectory(prefix="autopart-verify-") as work:
        folder = _folder(package, Path(work))
        if dtype is not None:
            folder = _in_dtype(package, dtype, Path(work), model, args, kwargs, target, loss_fn) or folder
        with opened(folder) as pipeline:
            schedule = schedule or pipeline.schedule
            processes = _processes(pipeline, schedule, processes)
            batch = {"args": _as_tuple(args), "kwargs": dict(kwargs or {}), "target": target}
            given = any(value for value in (batch["args"], batch["kwargs"]))
            runtime_batches = importlib.import_module("runtime.batches")
            batches = make_batches(
                pipeline, runtime_batches, pipeline.microbatches, steps, batch if given else None, seed
            )
            weights = Path(work) / "weights.pt"
            state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
            if state.keys() != pipeline.names.keys():
                other = sorted(state.keys() ^ pipeline.names.keys())[0]
                raise UsageError(f"the package was made from another model: only one of the two has {other!r}")
            torch.save(state, weights)
            job_file = Path(work) / "job.pt"
            job = {
                "package": str(folder),
                "schedule": schedule,
                "microbatches": pipeline.microbatches,
                "weights": str(weights),
                "batches": batches,
                "optimizer": optimizer,
                "timeout_s": timeout_s,
            }
            torch.save(job, job_file)
            reference = run_reference(model, pipeline, batches, loss_fn, pipeline.microbatches, optimizer)
            comparisons = {kind: Comparison(kind) for kind in KINDS}
            failures, notes = [], list(reference.notes)
            try:
                results = launch(job_file, processes, timeout_s)
            except VerificationError as error:
                failures.append(str(error))
            else:
                notes += [note for result in results for note in result["notes"] if note not in notes]
                failures += _compare(comparisons, pipeline, reference, results)
            if not given:
                notes.append("inputs were random")
            return _report(
                comparisons,
                failures,
                processes=processes,
                schedule=schedule,
                dtype=pipeline.dtype,
                parameters=len(reference.weights),
                steps=len(reference.steps),
                notes=tuple(notes),
                seconds=time.perf_counter() - start,
            )


def _report(
    comparisons: Mapping[str, Comparison], failures: list[str], *, dtype: torch.dtype, **fields: Any
) -> VerifyReport:
    tolerance = TOLERANCES[dtype]
    for comparison in comparisons.values():
        failures = failures + comparison.failures
    ran = {kind: c for kind, c in comparisons.items() if c.compared}
    passed = bool(ran) and not failures and all(c.worst <= tolerance for c in ran.values())
    return VerifyReport(
        passed=passed,
        dtype=str(dtype).removeprefix("torch."),
        worst_relative_error={kind: ran[kind].worst if kind in ran else None for kind in KINDS},
        worst_name={kind: c.worst_name for kind, c in ran.items()},
        compared={kind: c.compared for kind, c in comparisons.items()},
        tolerance=tolerance,
        failures=tuple(failures),
        **fields,
    )


def _compare(
    comparisons: Mapping[str, Comparison], pipeline: Any, reference: Reference, results: list[dict[str, Any]]
) -> list[str]:
    """Compare everything; the sentences say what differs beyond the numbers."""
    names = _original_names(pipeline)
    last = next(r for r in results if r["evaluation"] is not None)
    for number, step in enumerate(reference.steps):
        ran = [r["steps"][number] for r in results]
        label = f"step {number}"
        gradients = {place: t for part in ran for place, t in part["gradients"].items()}
        _by_name(comparisons["gradient"], label, gradients, step.gradients, names)
        buffers = {place: t for part in ran for place, t in part["buffers"].items()}
        held = {name for place in buffers for name in names.get(place, [place[1]])}
        # Buffers outside of the state_dict that nothing reads are not in a package; its constants are no buffers.
        expected = {n: b for n, b in step.buffers.items() if n in held or n in pipeline.names}
        known = {p: t for p, t in buffers.items() if any(n in step.buffers for n in names.get(p, [p[1]]))}
        _by_name(comparisons["buffer"], label, known, expected, names)
        own = last["steps"][number]
        for microbatch, expected_outputs in enumerate(step.outputs):
            here = f"{label} microbatch {microbatch}"
            comparisons["loss"].add({here: own["losses"][microbatch]}, {here: step.losses[microbatch].reshape(())})
            comparisons["output"].add(_labelled(here, own["outputs"][microbatch]), _labelled(here, expected_outputs))
    weights = {place: t for r in results for place, t in r["weights"].items()}
    _by_name(
        comparisons["weight_after_steps"], f"after {len(reference.steps)} steps", weights, reference.weights, names
    )
    joined = _joined(reference)
    comparisons["output"].add(_labelled("evaluation", last["evaluation"]), _labelled("evaluation", joined))
    if _skeleton(pipeline.result) != _skeleton(reference.structure):
        return ["the package's result does not have the structure of the model's"]
    return []


def _by_name(
    comparison: Comparison,
    label: str,
    held: Mapping[Place, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    names: Mapping[Place, list[str]],
) -> None:
    """Compare what every stage holds with the original of that name; no name may be left out."""
    actual: dict[str, torch.Tensor | None] = {}
    wanted: dict[str, torch.Tensor | None] = {}
    seen = set()
    for (stage, name), tensor in held.items():
        for original in names.get((stage, name), [name]):
            key = f"{original} in stage {stage}, {label}"
            actual[key] = tensor
            if original in expected:
                wanted[key] = expected[original]
                seen.add(original)
    wanted |= {f"{name}, {label}": expected[name] for name in expected if name not in seen}
    comparison.add(actual, wanted)


def _original_names(pipeline: Any) -> dict[Place, list[str]]:
    found: dict[Place, list[str]] = {}
    for name, place in pipeline.names.items():
        found.setdefault(place, []).append(name)
    return found


def _joined(reference: Reference) -> dict[str, torch.Tensor]:
    """The outputs of the whole first batch in evaluation mode, from those of its microbatches.

    They are joined along the dimension in which the model's output for the whole batch is longer; without one, a number
    is the mean, and what does not depend on the microbatch is itself.
    """
    found = {}
    for path, first in reference.evaluation[0].items():
        pieces = [outputs[path] for outputs in reference.evaluation]
        whole = reference.whole.get(path, first.shape)
        dims = [d for d, (n, m) in enumerate(zip(whole, first.shape, strict=True)) if n != m]
        if dims:
            found[path] = torch.cat(pieces, dims[0])
        elif first.dim() == 0 and first.is_floating_point():
            found[path] = torch.stack(pieces).mean()
        elif all(torch.equal(first, piece) for piece in pieces):
            found[path] = first
        else:
            found[path] = torch.stack(pieces)
    return found


def _labelled(label: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{path}, {label}": tensor for path, tensor in tensors.items()}


def _skeleton(structure: Any) -> Any:
    """A structure without the numbers of its tensors."""
    if isinstance(structure, Mapping):
        return {key: None if key == "tensor" else _skeleton(item) for key, item in structure.items()}
    return [_skeleton(item) for item in structure] if isinstance(structure, (list, tuple)) else structure


def _folder(package: Any, work: Path) -> Path:
    if isinstance(package, (str, PathLike)):
        folder = Path(package).resolve()
        if not (folder / "pipeline.py").is_file():
            raise UsageError(f"{folder} is not a package: it has no pipeline.py")
        return folder
    codegen.emit(package.graph, package, work / "package")
    return work / "package"


def _in_dtype(
    package: Any,
    dtype: torch.dtype,
    work: Path,
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    target: Any,
    loss_fn: LossFunction | None,
) -> Path | None:
    """The package of the same plan for the model captured in another dtype; None if it is captured in it already."""
    graph = getattr(package, "graph", None)
    if graph is None or not (args or kwargs):
        raise UsageError(
            "dtype needs what partition() returned and the arguments of a call",
            f"Or make the package with partition(..., dtype={dtype}).",
        )
    if graph.dtype == dtype:
        return None
    captured = trace(
        model,
        _as_tuple(args),
        dict(kwargs or {}),
        mode=graph.mode,
        loss_fn=loss_fn,
        target=target,
        microbatches=package.strategy.microbatches,
        batch_dims={spec.path: spec.batch_dim for spec in graph.inputs},
        dtype=dtype,
        check=False,
    )
    codegen.emit(captured, package, work / "converted")
    return work / "converted"


def _processes(pipeline: Any, schedule: str, asked: int | None) -> int:
    schedules = importlib.import_module("runtime.schedules").SCHEDULES
    if schedule not in schedules:
        raise UsageError(f"unknown schedule {schedule!r}; choose from {', '.join(schedules)}")
    stages, per_process = len(pipeline.stages), schedules[schedule].stages_per_process
    if asked == 1 or (asked is None and stages == 1):
        return 1
    if stages % per_process or asked not in (None, stages // per_process):
        raise UsageError(
            f"the package has {stages} stages and schedule {schedule} puts {per_process} on each process, "
            f"which does not make {asked or 'whole'} processes",
            "Leave processes out, or choose another schedule.",
        )
    return stages // per_process


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)
