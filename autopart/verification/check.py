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
from autopart.verification.reference import LossFunction, run_reference
from autopart.verification.report import KINDS, VerifyReport
from autopart.verification.results import compare_all
from autopart.verification.worker import OPTIMIZERS

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
        processes, schedule: As planned, unless another schedule is forced; as many processes as the package has
            tensor ranks (without: one) run all stages in each.
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
                failures += compare_all(comparisons, pipeline, reference, results)
            if not given:
                notes.append("inputs were random")
            return _report(
                comparisons,
                failures,
                processes=processes,
                tensor=pipeline.tensor,
                schedule=schedule,
                dtype=pipeline.dtype,
                tolerance=TOLERANCES[pipeline.coarsest or pipeline.dtype],
                parameters=len(reference.weights),
                steps=len(reference.steps),
                notes=tuple(notes),
                seconds=time.perf_counter() - start,
            )


def _report(
    comparisons: Mapping[str, Comparison], failures: list[str], *, dtype: torch.dtype, tolerance: float, **fields: Any
) -> VerifyReport:
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
    stages, per_process, ranks = len(pipeline.stages), schedules[schedule].stages_per_process, pipeline.tensor
    if asked == ranks or (asked is None and stages == 1):
        return ranks
    if asked is not None and asked % ranks:
        raise UsageError(
            f"every stage of the package is split over {ranks} tensor ranks, and each needs a process of its own: "
            f"{asked} {'process' if asked == 1 else 'processes'} cannot run it",
            f"Leave processes out, or give {ranks} to run all stages in each.",
        )
    if stages % per_process or asked not in (None, stages // per_process * ranks):
        raise UsageError(
            f"the package has {pipeline.size} and schedule {schedule} puts {per_process} of the stages on each "
            f"process, which does not make {asked or 'whole'} processes",
            "Leave processes out, or choose another schedule.",
        )
    return stages // per_process * ranks


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)
