"""`torchrun --nproc-per-node N train.py`: trains the model of a package; every process runs this."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from . import weights
from .batches import load_batches, random_batch
from .engine import Engine, OneProcess, Pipelined, in_dtype, stages_of_process
from .errors import INPUT_FILE, PackageError
from .initialization import initialize
from .interface import Pipeline
from .mesh import make_mesh
from .process import Process, joined, number_of
from .record import Recorder, prepare
from .schedules import SCHEDULES

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@record
def main(pipeline: Pipeline, arguments: list[str] | None = None) -> None:
    """Parse the command line and train; the exit status is 2 for a wrong argument and 7 for a wrong file."""
    rank, count = (int(os.environ.get(name, alone)) for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1")))
    first = number_of(rank, count, pipeline.ranks) == 0
    with nullcontext() if first else redirect_stderr(io.StringIO()):
        options = parser(pipeline).parse_args(arguments)
    debugging = bool(os.environ.get("AUTOPART_DEBUG"))
    if not debugging:
        # It prints its whole plan for every error; the reason is told in one line instead.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    with joined(options.timeout_s, pipeline.ranks) as process:
        try:
            run(pipeline, options, process)
        except PackageError as error:
            process.say(str(error))
            sys.exit(error.exit_status)
        except KeyboardInterrupt:
            os._exit(130)
        except Exception as error:
            if not process.blame(error):
                process.end(1)
            if not debugging:
                sys.excepthook = lambda *_: None
            raise


def parser(pipeline: Pipeline) -> argparse.ArgumentParser:
    shape = f"{pipeline.size}, {pipeline.microbatches} microbatches of {pipeline.microbatch_size}"
    parser = argparse.ArgumentParser(description=f"Train {pipeline.model}: {shape}, schedule {pipeline.schedule}.")
    add = parser.add_argument
    add("--weights", metavar="FILE", help="model.safetensors or a .pt state_dict; random weights without it")
    add("--batches", metavar="FILE", help="torch.save'd list of {'args', 'kwargs', 'target'}; random inputs without it")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    add("--lr", type=float, default=1e-3, metavar="X", help="learning rate (%(default)s)")
    add("--steps", type=int, default=None, metavar="K", help="optimizer steps (one for each batch, or 3)")
    add("--dtype", choices=list(DTYPES), default=None, help=f"of weights and floating inputs ({_name(pipeline.dtype)})")
    add("--seed", type=int, default=0, metavar="S", help="of weights, inputs and dropout (%(default)s)")
    add("--save", metavar="DIR", help="write model.safetensors, in the original names, and log.jsonl")
    add("--record", metavar="FILE", help="write what the steps took, for autopart compare-run")
    add("--schedule", choices=list(SCHEDULES), default=pipeline.schedule, help="(%(default)s)")
    add("--microbatches", type=int, default=pipeline.microbatches, metavar="M", help="in one step (%(default)s)")
    add("--timeout-s", type=float, default=600.0, metavar="T", help="give up waiting for a process (%(default)s)")
    return parser


def run(pipeline: Pipeline, options: argparse.Namespace, process: Process) -> None:
    """Build this process's stages, and train (or, for a package made for inference, run)."""
    if options.microbatches < 1:
        raise PackageError("--microbatches must be at least 1")
    table = in_dtype(pipeline, DTYPES[options.dtype] if options.dtype else pipeline.dtype)
    steps, batches = _batches(table, options)
    recorded = Path(options.record) if options.record else None
    plan = prepare(recorded, steps, process) if recorded else {}
    folder = Path(options.save) if options.save else None
    if folder:
        claim(folder, process)
    engine = build(
        pipeline,
        schedule=options.schedule,
        microbatches=options.microbatches,
        seed=options.seed,
        dtype=table.dtype,
        process=process,
        weights_file=options.weights,
    )
    if process.number == 0:
        print(f"{pipeline.model}: {_describe(table, options, process)}", flush=True)
    optimizer = make_optimizer(options.optimizer, options.lr, engine)
    recorder = Recorder(engine, optimizer, process, steps) if recorded else None
    log = (folder / "log.jsonl").open("x") if folder and process.number == 0 else nullcontext()
    with log as file:
        for step, batch in enumerate(batches):
            process.step = step
            start = time.perf_counter()
            with recorder.step(step) if recorder else nullcontext():
                loss = _one(engine, optimizer, batch)
            loss = _on_first_process(loss, engine, process)
            if process.number == 0:
                result = "" if loss is None else f"  loss {loss:.6g}"
                print(f"step {step}{result}  {time.perf_counter() - start:.3f} s", flush=True)
            if file is not None:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
                file.flush()
    process.step = None
    if folder:
        path = folder / "model.safetensors"
        weights.save(table, engine.modules, path, engine.place, engine.mesh)
        if process.number == 0:
            print(f"wrote {path}", flush=True)
    if recorder and recorded:
        summary = recorder.write(recorded, {"plan": plan, **_how(table, options, engine)})
        if summary:
            print(summary, flush=True)


def build(
    pipeline: Pipeline,
    *,
    schedule: str,
    microbatches: int,
    seed: int,
    dtype: torch.dtype,
    process: Process,
    weights_file: str | None = None,
) -> Engine:
    """This process's engine, its stages filled with weights from a file, or drawn anew.

    One place runs every stage itself; several run the stages that the schedule gives them.
    """
    mine = stages_of_process(pipeline, schedule, process.number, process.count)
    mesh = make_mesh(process, pipeline.tensor)
    process.introduce(mine, len(pipeline.stages), mesh.rank, mesh.ranks)
    modules = {s: build_stage(pipeline, s, dtype, process.device, seed) for s in mine}
    table = in_dtype(pipeline, dtype)
    if weights_file:
        weights.load(table, modules, weights.open_weights(weights_file), weights_file, mesh.rank)
    else:
        initialize(table, modules, seed, mesh.rank)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches, "device": process.device, "seed": seed}
    if mesh.places == 1:
        return OneProcess(table, modules, **options)
    return Pipelined(table, modules, schedule=schedule, **options)


def build_stage(pipeline: Pipeline, stage: int, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    """An emitted stage on its device; what has the captured dtype gets that of the run."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(pipeline.dtype)
    try:
        module = pipeline.stages[stage].module().to(device)
    finally:
        torch.set_default_dtype(before)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype == pipeline.dtype:
            tensor.data = tensor.data.to(dtype)
    return module


def make_optimizer(name: str, lr: float, engine: Engine) -> torch.optim.Optimizer:
    """The optimizer of this process's parameters; a process without any gets one that does nothing."""
    trained = [p for p in engine.parameters() if p.requires_grad]
    return OPTIMIZERS[name](trained or [nn.Parameter(torch.zeros(1))], lr=lr)


def claim(folder: Path, process: Process) -> None:
    """Look whether the folder of --save is free, and make it.

    Every process looks, so that all end at once, and waits for the others, so that none finds what this run writes.

    Raises:
        PackageError: It holds a result already, or cannot be made.
    """
    for name in ("model.safetensors", "log.jsonl"):
        if (folder / name).exists():
            raise PackageError(f"--save {folder}: {name} is there already; choose another folder")
    if process.count > 1:
        dist.barrier()
    try:
        if process.number == 0:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackageError(f"--save {folder}: {error.strerror}", INPUT_FILE) from error


def _one(engine: Engine, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]) -> float | None:
    if engine.pipeline.loss is None:
        engine.evaluate(batch)
        return None
    optimizer.zero_grad()
    loss, _ = engine.step(batch)
    optimizer.step()
    return loss


def _on_first_process(loss: float | None, engine: Engine, process: Process) -> float | None:
    """The loss is known where the last stage lives, on every tensor rank; process 0 prints it."""
    source = engine.mesh.process(engine.place(engine.last), 0)
    if source == 0 or engine.pipeline.loss is None:
        return loss
    wire = torch.zeros(1, dtype=torch.float64, device=process.device)
    if process.number == source:
        assert loss is not None
        dist.send(wire.fill_(loss), 0)
    elif process.number == 0:
        dist.recv(wire, source)
        return wire.item()
    return loss


def _batches(pipeline: Pipeline, options: argparse.Namespace) -> tuple[int, Iterator[Mapping[str, torch.Tensor]]]:
    """How many steps, and their batches, checked before anything runs; those of a file are repeated as needed."""
    if options.batches:
        found = load_batches(options.batches, pipeline, options.microbatches)
        count = len(found) if options.steps is None else options.steps
        return count, (found[step % len(found)] for step in range(count))
    generator = torch.Generator().manual_seed(options.seed)
    count = 3 if options.steps is None else options.steps
    return count, (random_batch(pipeline, options.microbatches, generator) for _ in range(count))


def _how(pipeline: Pipeline, options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """How the model was run, for a record."""
    return {
        "schedule": options.schedule if engine.mesh.places > 1 else None,
        "microbatches": options.microbatches,
        "optimizer": options.optimizer,
        "dtype": _name(pipeline.dtype),
    }


def _describe(pipeline: Pipeline, options: argparse.Namespace, process: Process) -> str:
    how = "one process" if process.count == 1 else f"{process.count} processes"
    if process.count > pipeline.tensor:
        how += f", schedule {options.schedule}"
    source = options.weights or f"random weights (seed {options.seed})"
    inputs = options.batches or "random inputs of the captured shapes"
    work = f"{options.microbatches} microbatches of {pipeline.microbatch_size}"
    return f"{pipeline.size} on {how}, {work}, {_name(pipeline.dtype)}; {source}; {inputs}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
