"""The command line. Results go to stdout, progress and errors to stderr; docs/cli.md lists options and exit statuses.

torch and the solver are imported inside the commands: `autopart --help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from autopart.errors import (
    AutopartError,
    CaptureError,
    InfeasibleError,
    InputFileError,
    LimitError,
    UsageError,
    VerificationError,
)

if TYPE_CHECKING:
    from autopart.api import Partition
    from autopart.model_spec import LoadedModel
    from autopart.plan import Plan

CODES: dict[type[AutopartError], str] = {
    UsageError: "usage",
    InfeasibleError: "infeasible",
    LimitError: "limit",
    VerificationError: "verification",
    CaptureError: "capture",
    InputFileError: "input_file",
}
# Models up to this size are built with real weights where their package needs values that only these have.
MOST_REAL_WEIGHTS_BYTES = 4 << 30
INTERNAL_STATUS, INTERRUPTED_STATUS, TERMINATED_STATUS = 1, 130, 143

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}

app = typer.Typer(
    help="Split a PyTorch model over several devices: plan, emit, verify.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings=_SETTINGS,
)
zoo_app = typer.Typer(
    help="The zoo: models that autopart is measured on.", no_args_is_help=True, context_settings=_SETTINGS
)
app.add_typer(zoo_app, name="zoo")

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
Mode = Annotated[str, typer.Option(help="training or inference.")]


@app.command("partition", no_args_is_help=True, context_settings=_SETTINGS)
def partition_command(
    model: Model,
    gpus: Gpus,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the package there.")] = None,
    as_json: Json = False,
    stages: Stages = "auto",
    tensor: Tensor = "auto",
    schedule: Schedule = "auto",
    microbatches: Microbatches = "auto",
    global_batch: GlobalBatch = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = None,
    recompute: Recompute = "auto",
    granularity: Granularity = "auto",
    threshold: Threshold = 0.01,
    time_limit: TimeLimit = 30.0,
    mode: Mode = "training",
) -> None:
    """Plan the split of a model, and write the package that runs it."""
    with _working():
        from autopart.api import partition
        from autopart.cluster import Cluster
        from autopart.report.plan import format_plan

        stage_count = _number_or_auto("--stages", stages)
        tensor_count = _number_or_auto("--tensor", tensor)
        microbatch_count = _number_or_auto("--microbatches", microbatches)
        cluster = Cluster.parse(gpus)
        loaded = _load(model)
        _say(f"Planning for {cluster}: at most {time_limit:g} s in the solver.")
        options: dict[str, Any] = {
            "mode": mode,
            "stages": stage_count,
            "tensor": tensor_count,
            "schedule": schedule,
            "microbatches": microbatch_count,
            "global_batch": global_batch,
            "optimizer": optimizer,
            "dtype": dtype,
            "recompute": recompute,
            "granularity": granularity,
            "threshold": threshold,
            "time_limit_s": time_limit,
            "name": model,
        }
        plan = partition(loaded.model, cluster, example_inputs=loaded.args, example_kwargs=loaded.kwargs, **options)
        if out is not None and (real := _with_values(loaded, plan)) is not None:
            plan = partition(real.model, cluster, example_inputs=real.args, example_kwargs=real.kwargs, **options)
        if out is not None:
            plan.emit(out)
            _say(f"Wrote {out}. Run it: torchrun --nproc-per-node {len(_processes(plan))} {out / 'train.py'}")
    _print(plan.plan.to_json().rstrip() if as_json else format_plan(plan))


@app.command("verify", no_args_is_help=True, context_settings=_SETTINGS)
def verify_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that partition --out wrote.")],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Default: the model named in its plan.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="1 runs all stages in one process.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Another schedule than the plan's.")] = None,
    as_json: Json = False,
) -> None:
    """Run a package on local processes and compare it with the original model."""
    with _working():
        from autopart.plan import Plan
        from autopart.verification import verify

        plan = Plan.load(directory / "plan.json")
        loaded = _original(plan, model)
        _say(f"Running {directory} beside the original model.")
        inputs = (loaded.args, loaded.kwargs) if _has_rows(loaded, plan) else ((), {})
        report = verify(directory, loaded.model, *inputs, processes=processes, schedule=schedule)
    _print(report.to_json() if as_json else str(report))
    if not report.passed:
        raise typer.Exit(VerificationError.exit_status)


@app.command("devices", context_settings=_SETTINGS)
def devices_command(as_json: Json = False) -> None:
    """The hardware that plans can be made for, and the GPUs of this machine."""
    with _working():
        import torch

        from autopart.report.devices import devices_as_data, format_devices

        here = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    _print(json.dumps(devices_as_data(here), indent=1) if as_json else format_devices(here))


@zoo_app.command("list", context_settings=_SETTINGS)
def zoo_list_command(
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="Part of a name, a pattern, or core.")] = None,
    as_json: Json = False,
) -> None:
    """The models of the zoo and their specs."""
    from autopart.report.zoo import format_entries
    from autopart.zoo import selected

    chosen = selected(only)
    _print(json.dumps([dataclasses.asdict(entry) for entry in chosen], indent=1) if as_json else format_entries(chosen))


@zoo_app.command("run", no_args_is_help=True, context_settings=_SETTINGS)
def zoo_run_command(
    gpus: Gpus,
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="Part of a name, a pattern, or core.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the rows there.")] = None,
    small: Annotated[bool, typer.Option("--small", help="The small variants.")] = False,
    stages: Stages = "auto",
    tensor: Tensor = "auto",
    schedule: Schedule = "auto",
    dtype: Dtype = None,
    granularity: Granularity = "auto",
    time_limit: TimeLimit = 30.0,
) -> None:
    """Plan every model of the zoo: one row each. Ends with the status of the first that has no plan."""
    rows = []
    with _working():
        from autopart.cluster import Cluster
        from autopart.report.zoo import format_rows
        from autopart.zoo import selected
        from autopart.zoo_run import as_data, run

        cluster, chosen = Cluster.parse(gpus), selected(only)
        options: dict[str, Any] = {"schedule": schedule, "dtype": dtype}
        options |= {"stages": _number_or_auto("--stages", stages), "tensor": _number_or_auto("--tensor", tensor)}
        planned = run(chosen, cluster, small=small, granularity=granularity, time_limit_s=time_limit, **options)
    try:
        with _working():
            for row in planned:
                rows.append(row)
                _say(f"{len(rows):3}/{len(chosen)} {row.name}: {row.error or 'planned'}")
                if json_file is not None:
                    _write(json_file, json.dumps(as_data(rows, cluster), indent=1) + "\n")
    finally:  # an interrupted run shows what it has
        _print(format_rows(rows))
    raise typer.Exit(next((row.exit_status for row in rows if row.error is not None), 0))


# ------------------------------------------------------------------------------------------------- helpers


def _load(spec: str, meta: bool = True) -> LoadedModel:
    from autopart.model_spec import load
    from autopart.report.text import count

    start = time.perf_counter()
    loaded = load(spec, meta=meta)
    parameters = count(sum(p.numel() for p in loaded.model.parameters()))
    _say(f"Built {spec}: {parameters} parameters in {time.perf_counter() - start:.1f} s.")
    for note in loaded.notes:
        _say(f"Note: {note}")
    return loaded


def _with_values(loaded: LoadedModel, plan: Partition) -> LoadedModel | None:
    """The model with real weights, where a package needs values of it that the meta device does not have."""
    unknown = [plan.graph.state[key].name for key, rule in plan.graph.initialization.items() if rule[0] == "unknown"]
    if not unknown:
        return None
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    missing = f"the buffer {unknown[0]!r}{more} has no values on the meta device"
    if sum(p.numel() * p.element_size() for p in loaded.model.parameters()) > MOST_REAL_WEIGHTS_BYTES:
        _say(f"Note: {missing}, and the model is too large to be built here with real weights: the package cannot run.")
        _say("Build the model with real weights in Python, and pass it to autopart.partition().")
        return None
    _say(f"Note: {missing}: the model is built with real weights and planned anew.")
    return _load(loaded.spec, meta=False)


def _original(plan: Plan, spec: str | None) -> LoadedModel:
    """The model that a plan was made for, with real weights, in the plan's dtype."""
    import torch
    from torch.utils._pytree import tree_map

    try:
        loaded = _load(spec or plan.model, meta=False)
    except UsageError as error:
        if spec is not None:
            raise
        hint = "Name it with --model, for instance --model my_model.py:make, or call autopart.verify() in Python."
        raise UsageError(f"the plan's model {plan.model!r} cannot be built: {error.message}", hint) from error
    dtype = getattr(torch, plan.dtype)

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(converted, (loaded.args, dict(loaded.kwargs)))
    return dataclasses.replace(loaded, model=loaded.model.to(dtype), args=args, kwargs=kwargs)


def _has_rows(loaded: LoadedModel, plan: Plan) -> bool:
    """Whether the model's own inputs can be the plan's global batch; else random ones of that size are taken."""
    from torch.utils._pytree import tree_leaves

    rows = plan.strategy.microbatches * plan.strategy.microbatch_size
    return any(rows in getattr(leaf, "shape", ()) for leaf in tree_leaves((loaded.args, dict(loaded.kwargs))))


def _number_or_auto(option: str, text: str) -> int | str:
    if text == "auto":
        return text
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise UsageError(f"{option} is a positive number or auto, not {text!r}")
    return int(text)


def _processes(plan: Any) -> set[int]:
    return {device for stage in plan.per_stage for device in stage.devices}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _print(text: str) -> None:
    """The result."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever reads it has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(line: str) -> None:
    """One line of progress."""
    from autopart.report.text import printable

    print(printable(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _working() -> Iterator[None]:
    """While models are built and run, what they print goes to stderr: stdout is for the result alone."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not _debugging():
            warnings.simplefilter("ignore")
        yield


def _debugging() -> bool:
    return os.environ.get("AUTOPART_DEBUG", "") not in ("", "0")


# -------------------------------------------------------------------------------------- how a command ends


class _Terminated(BaseException):
    """SIGTERM arrived; raised so that child processes and files are cleaned up on the way out."""


def _on_terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; nothing but a fault of the interpreter escapes as an exception."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments and arguments[:2] != ["zoo", "run"]
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, _on_terminate)
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="autopart", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except TyperException as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # no arguments at all: the help
            _print(message)
            return UsageError.exit_status
        context = getattr(error, "ctx", None)
        hint = f"See: {context.command_path} --help" if context is not None else None
        return _fail("usage", message, hint, UsageError.exit_status, as_json)
    except AutopartError as error:
        _traceback()
        code = next((CODES[base] for base in type(error).__mro__ if base in CODES), "internal")
        return _fail(code, error.message, error.hint, error.exit_status, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", "interrupted", None, INTERRUPTED_STATUS, as_json)
    except _Terminated:
        return _fail("terminated", "terminated", None, TERMINATED_STATUS, as_json)
    except Exception as error:
        _traceback()
        message = f"this is a fault of autopart, not of your model: {type(error).__name__}: {error}"
        hint = "Please report it to the project with the command you ran; AUTOPART_DEBUG=1 shows the traceback."
        return _fail("internal", message, hint, INTERNAL_STATUS, as_json)


def _fail(code: str, message: str, hint: str | None, status: int, as_json: bool) -> int:
    from autopart.report.text import printable

    print(printable(f"error: {message}" + (f"\n{hint}" if hint else "")), file=sys.stderr)
    if as_json:
        _print(json.dumps({"error": {"code": code, "message": message, "hint": hint}}, indent=1))
    return status


def _traceback() -> None:
    if _debugging():
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
