"""partition(): the five steps, in order, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart.cluster import Cluster
from autopart.codegen import emit, obstacle, recomputable
from autopart.costs import Costs
from autopart.degrees import plan_degrees
from autopart.errors import InputFileError, UsageError
from autopart.graph import Graph, Mode
from autopart.inputs import find_inputs
from autopart.microbatches import choose_count, schedule_for, stages_per_process
from autopart.plan import Plan
from autopart.profiler import Outcomes, known_of
from autopart.profiler import profile as profile_graph
from autopart.profiler.profile_file import SCHEMA as PROFILE_SCHEMA
from autopart.profiler.profile_file import Profile
from autopart.records import Record
from autopart.report.plan import format_plan
from autopart.runtime.record import SCHEMA as RECORD_SCHEMA
from autopart.runtime.schedules import SCHEDULES
from autopart.strict_json import parse, read, short
from autopart.text import counted
from autopart.tracer import find_batch, trace
from autopart.tracer.surroundings import neutral_surroundings
from autopart.workload import OPTIMIZER_STATES, Workload

# With 4 S microbatches the bubble of 1F1B is (S - 1) / (5 S - 1), less than a fifth of the step.
MICROBATCHES_PER_STAGE = 4

DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Partition(Plan):
    """A plan together with what it was made from, so that it can be emitted and verified.

    Attributes:
        graph: The captured model.
        costs: The predicted costs that the plan rests on: of the local graph, where tensors are split.
    """

    graph: Graph = dataclasses.field(kw_only=True, repr=False, compare=False)
    costs: Costs = dataclasses.field(kw_only=True, repr=False, compare=False)

    def emit(self, directory: str | Path) -> Path:
        """Write the package that `torchrun` runs, and return its folder; see `autopart.codegen.emit`."""
        with _clock(seconds := dict(self.seconds), "emit"):
            emit(self.graph, self.plan, directory)
        object.__setattr__(self, "seconds", seconds)
        return Path(directory)

    def __str__(self) -> str:
        return format_plan(self)

    @property
    def plan(self) -> Plan:
        """The plan alone, as it is written to `plan.json`."""
        return Plan(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Plan)})


@neutral_surroundings()
def partition(
    model: nn.Module,
    gpus: int | str | Sequence[str] | Cluster,
    *,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    mode: Mode = "training",
    stages: int | str = "auto",
    tensor: int | str = "auto",
    schedule: str = "auto",
    microbatches: int | str = "auto",
    global_batch: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    optimizer: str = "adamw",
    dtype: torch.dtype | str | None = None,
    recompute: str = "auto",
    granularity: str = "auto",
    threshold: float = 0.01,
    time_limit_s: float = 30.0,
    check: bool = True,
    name: str | None = None,
    profile: Profile | Record | str | os.PathLike[str] | None = None,
) -> Partition:
    """Split a model over devices: trace, profile, solve. The result can be emitted as a package.

    Args:
        model: Any module; its weights may be real or on `torch.device("meta")`. It is not changed.
        gpus: A number (this machine's GPUs, else a stated default), "8xH100-80G", "2x8xA100-80G" (machines x GPUs), a
            list of device names, a `Cluster`, or the path of a YAML file.
        example_inputs: Positional arguments of one global batch (a tuple, or one tensor). Found by themselves for
            transformers, timm and torchvision models.
        example_kwargs: Keyword arguments of the same batch.
        target: What `loss_fn` compares the output with.
        loss_fn: `loss_fn(output, target)`, a scalar. Left out: the loss that the model returns, else a stand-in.
        mode: "training" (one optimizer step) or "inference".
        stages: Number of pipeline stages; "auto": as many as the devices take, unless fewer are faster.
        tensor: Over how many GPUs each stage's tensors are split; "auto": whichever of the degrees that divide the
            devices (1 among them) is predicted to be fastest. Who names a degree gets its memory: what GPUs gather is
            then kept as shards for backward, and gathered again there, which takes more time.
        schedule: A key of `autopart.runtime.schedules.SCHEDULES`; "auto": "1f1b" where the microbatches suffice.
        microbatches: How many microbatches the global batch is cut into; "auto": the divisor of the batch that is
            estimated to be fastest.
        global_batch: Rows of one step, if not those of the example.
        batch_dims: Input (name or path) -> its batch dimension, or None; found by trial where left out.
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw": decides the memory of its state.
        dtype: Convert parameters, buffers and floating inputs first (on a copy of the model).
        recompute: "auto" (backward computes blocks again, instead of keeping what they save, where the plan would not
            fit otherwise, or is faster for it) or "none".
        granularity: "block" (cuts between blocks), "operator" (anywhere legal), or "auto": blocks, unless operators
            gain more than `threshold` of the step time.
        time_limit_s: For the solver.
        check: Compare the captured graph with the model by running both, where weights are real.
        name: How the model is named in the plan ("hf:gpt2"); its class name by default.
        profile: What was measured: a profile (`autopart.profile`) or a record of a package's run (`train.py --record`),
            or the file of one. Times come from it where it has them; formulas are corrected by it elsewhere.
            Microbatches are given as many rows as it has, if `microbatches` is "auto" and the batch divides.

    Raises:
        UsageError: An argument is missing or wrong; the message says which.
        CaptureError: The model cannot be captured.
        InfeasibleError: No plan fits; the message says what would.
    """
    cluster = Cluster.parse(gpus)
    known = None if profile is None else known_of(_measured(profile), cluster)
    if example_inputs is None and example_kwargs is None:
        args, kwargs = find_inputs(model)
    else:
        args, kwargs = _as_tuple(example_inputs), dict(example_kwargs or {})
    _check_options(mode, schedule, optimizer, recompute, stages, tensor, microbatches)
    if isinstance(tensor, int):
        cluster.grouped(tensor)

    seconds: dict[str, float] = {}
    with _clock(seconds, "trace"):
        batch = find_batch(model, args, kwargs, batch_dims=batch_dims)
        rows = global_batch or batch.rows
        notes = batch.notes
        if microbatches == "auto" and known is not None and known.rows and rows % known.rows == 0:
            microbatches = rows // known.rows
            notes = (*notes, f"microbatches have {counted(known.rows, 'row')}, as those of the {known.what}")
        places = len(cluster.devices) // (tensor if isinstance(tensor, int) else 1)
        wanted_stages = stages if isinstance(stages, int) else places * stages_per_process(schedule)

    capture = partial(
        trace,
        model,
        args,
        kwargs,
        mode=mode,
        loss_fn=loss_fn,
        target=target,
        global_batch=rows,
        batch_dims=batch.dims,
        dtype=as_dtype(dtype),
        check=check,
    )
    may_recompute = cache(recomputable) if recompute == "auto" else None
    outcomes: Outcomes = {}
    count = microbatches if isinstance(microbatches, int) else _first_count(rows, wanted_stages)
    with _clock(seconds, "trace"):
        graph = capture(microbatches=count)
        _refuse_nothing_to_train(graph)
    if microbatches == "auto" and rows > 1:
        with _clock(seconds, "microbatches"):
            workload = Workload(mode, count, graph.microbatch_size, schedule, optimizer, may_recompute)
            best = choose_count(graph, cluster, workload, tensor=tensor, stages=stages, outcomes=outcomes, known=known)
        if best.count != count:
            with _clock(seconds, "trace"):
                graph = capture(microbatches=best.count)
        notes = (*notes, *best.notes)
    if known is not None:
        notes = (*notes, *known.other_rows(graph.microbatch_size, rows))
    with _clock(seconds, "trace"):
        graph = _noted(graph, notes)
    with _clock(seconds, "profile"):
        costs = profile_graph(graph, cluster, outcomes=outcomes, known=known)
    count = rows // graph.microbatch_size
    schedule = schedule_for(schedule, count, wanted_stages)
    workload = Workload(mode, count, graph.microbatch_size, schedule, optimizer, may_recompute)
    with _clock(seconds, "solve"):
        planned = plan_degrees(
            graph,
            costs,
            cluster,
            workload,
            tensor=tensor,
            outcomes=outcomes,
            known=known,
            model=name,
            stages=stages,
            granularity=granularity,
            threshold=threshold,
            time_limit_s=time_limit_s,
        )
    fields = {f.name: getattr(planned.plan, f.name) for f in dataclasses.fields(Plan)}
    return Partition(**(fields | {"seconds": seconds}), graph=graph, costs=planned.costs)


def _check_options(
    mode: str,
    schedule: str,
    optimizer: str,
    recompute: str,
    stages: int | str,
    tensor: int | str,
    microbatches: int | str,
) -> None:
    for argument, value, known in (
        ("mode", mode, ("training", "inference")),
        ("schedule", schedule, ("auto", *SCHEDULES)),
        ("optimizer", optimizer, tuple(OPTIMIZER_STATES)),
        ("recompute", recompute, ("auto", "none")),
    ):
        if value not in known:
            raise UsageError(f"{argument} must be one of {', '.join(known)}; not {value!r}")
    for argument, count in (("stages", stages), ("tensor", tensor), ("microbatches", microbatches)):
        if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise UsageError(f'{argument} must be a positive number or "auto", not {count!r}')


def _measured(profile: Profile | Record | str | os.PathLike[str]) -> Profile | Record:
    """A profile or a record, read from its file where it is named; the file says which it is."""
    if isinstance(profile, (Profile, Record)):
        return profile
    if not isinstance(profile, (str, os.PathLike)):
        raise UsageError(f"profile must be a profile, a record, or the file of one; not {type(profile).__name__}")
    text, where = read(profile), str(profile)
    schema = str(parse(text, where, "a profile or a record").get("schema"))
    # Whatever its version: the reader refuses another one than its own.
    readers: dict[str, Callable[[bytes, str], Profile | Record]] = {
        PROFILE_SCHEMA.partition("/")[0]: Profile.from_json,
        RECORD_SCHEMA.partition("/")[0]: Record.from_json,
    }
    reader = readers.get(schema.partition("/")[0])
    if reader is None:
        raise InputFileError(
            f"{where}: neither a profile nor a record: its 'schema' is {short(schema)}",
            "Write one with `autopart profile`, or with `train.py --record`.",
        )
    return reader(text, where)


def _noted(graph: Graph, notes: Sequence[str]) -> Graph:
    """The graph with these notes before its own, and what will stand in a package's way behind them."""
    sentence = obstacle(graph)
    every = [*notes, *graph.notes, *([] if sentence is None else [sentence])]
    return dataclasses.replace(graph, notes=tuple(dict.fromkeys(every)))


def _refuse_nothing_to_train(graph: Graph) -> None:
    """No gradient exists where the loss depends on no parameter that requires one."""
    if graph.training is None or graph.loss is None:
        return
    loss = list(graph.training.graph.nodes)[-1].args[0][graph.loss]
    if loss.meta["requires_grad"]:
        return
    parameters = [entry for entry in graph.state.values() if entry.kind == "parameter"]
    if not parameters:
        reason = f"{graph.name} has no parameters"
    elif not any(entry.requires_grad for entry in parameters):
        reason = f"every parameter of {graph.name} is frozen (requires_grad=False)"
    else:
        reason = f"no parameter of {graph.name} reaches the loss ({graph.loss_name})"
    raise UsageError(f"there is nothing to train: {reason}", "Plan with mode='inference', or unfreeze what is trained.")


def _first_count(rows: int, stages: int) -> int:
    """The count to begin with: the largest divisor of `rows` that is at most four for each stage."""
    limit = min(rows, MICROBATCHES_PER_STAGE * stages)
    return max(m for m in range(1, limit + 1) if rows % m == 0)


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    if inputs is None:
        return ()
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by torch's name or a usual short one ("bf16").

    Raises:
        UsageError: There is none of that name.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, DTYPE_ALIASES.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"unknown dtype {dtype!r}", "Use a torch name, such as float32, bfloat16 or float64.")
    return found


@contextmanager
def _clock(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start
