"""What a worker does for the hazard table, and the same thing in plain eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from hazards import HAZARDS, MICROBATCHES
from torch import nn
from torch.distributed.pipelining import PipelineStage

from autopart.runtime import boundary, engine
from autopart.runtime.batches import random_batch
from autopart.runtime.engine import Pipelined, stages_of_process
from autopart.runtime.interface import Pipeline
from autopart.runtime.mesh import make_mesh
from autopart.runtime.process import Process
from autopart.runtime.schedules import SCHEDULES

STEPS, LEARNING_RATE = 2, 0.1
Trace = dict[str, torch.Tensor | None]


def batches(pipeline: Pipeline) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [random_batch(pipeline, MICROBATCHES, generator) for _ in range(STEPS)]


def note(trace: Trace, step: int, modules: dict[int, nn.Module]) -> None:
    """Write down every gradient and buffer, then take a step of gradient descent."""
    for s, module in modules.items():
        for name, parameter in module.named_parameters():
            trace[f"step {step} gradient s{s}.{name}"] = None if parameter.grad is None else parameter.grad.clone()
        for name, buffer in module.named_buffers():
            trace[f"step {step} buffer s{s}.{name}"] = buffer.clone()


def _pipelined(
    pipeline: Pipeline, modules: dict[int, nn.Module], schedule: str, rank: int, processes: int
) -> Pipelined:
    device = torch.device("cpu")
    mesh = make_mesh(Process(rank, processes, device), pipeline.tensor)
    return Pipelined(pipeline, modules, schedule=schedule, mesh=mesh, microbatches=MICROBATCHES, device=device, seed=1)


def pipelined(rank: int, hazard: str, schedule: str, without: str | None = None) -> Trace:
    """Train the stages of one process; `without` names a guard of the runtime to switch off."""
    pipeline = HAZARDS[hazard]()
    processes = len(pipeline.stages) // SCHEDULES[schedule].stages_per_process
    with switched_off(without):
        modules = {s: pipeline.stages[s].module() for s in stages_of_process(pipeline, schedule, rank, processes)}
        runner = _pipelined(pipeline, modules, schedule, rank, processes)
        optimizer = torch.optim.SGD([*runner.parameters(), nn.Parameter(torch.zeros(1))], LEARNING_RATE)
        trace: Trace = {}
        for step, batch in enumerate(batches(pipeline)):
            optimizer.zero_grad()
            loss, _ = runner.step(batch)
            if loss is not None:
                trace[f"step {step} loss"] = torch.tensor(loss, dtype=torch.float64)
            note(trace, step, modules)
            optimizer.step()
        result = runner.evaluate(batches(pipeline)[0])
        if result is not None:
            trace |= {f"output {i}": tensor for i, tensor in enumerate(result)}
    return trace


def tied_modules(pipeline: Pipeline) -> dict[int, nn.Module]:
    """The stages, copies of a tied parameter being one parameter."""
    modules = {s: part.module() for s, part in enumerate(pipeline.stages)}
    for tie in pipeline.ties:
        first_stage, first_name = tie.copies[0]
        for s, name in tie.copies[1:]:
            modules[s].register_parameter(name, modules[first_stage].get_parameter(first_name))
    return modules


def run(
    pipeline: Pipeline, modules: dict[int, nn.Module], batch: dict[str, torch.Tensor], number: int
) -> dict[str, torch.Tensor]:
    """All values of one microbatch."""
    dims = {i.name: i.batch_dim for i in pipeline.inputs}
    known = {n: t if dims[n] is None else t.chunk(MICROBATCHES, dims[n])[number] for n, t in batch.items()}
    for s, part in enumerate(pipeline.stages):
        values = [known[n].clone() if n in batch else known[n] for n in part.takes]
        known |= dict(zip(part.gives, modules[s](*values), strict=True))
    return known


def eager(hazard: str) -> Trace:
    """The stages called one after the other on each microbatch, copies of tied parameters being one parameter."""
    pipeline = HAZARDS[hazard]()
    modules = tied_modules(pipeline)
    optimizer = torch.optim.SGD({p: None for m in modules.values() for p in m.parameters()}, LEARNING_RATE)
    trace: Trace = {}
    for step, batch in enumerate(batches(pipeline)):
        optimizer.zero_grad()
        losses = [run(pipeline, modules, batch, number)["loss"] for number in range(MICROBATCHES)]
        torch.stack(losses).mean().backward()
        trace[f"step {step} loss"] = torch.stack(losses).mean().detach()
        note(trace, step, modules)
        optimizer.step()
    for module in modules.values():
        module.eval()
    with torch.no_grad():
        passes = [run(pipeline, modules, batches(pipeline)[0], number) for number in range(MICROBATCHES)]
    for i, output in enumerate(pipeline.outputs):
        trace[f"output {i}"] = torch.cat([p[output.value] for p in passes])
    return trace


def accumulated(rank: int, hazard: str, schedule: str) -> Trace:
    """Gradients of one process after two steps without clearing them between."""
    pipeline = HAZARDS[hazard]()
    modules = {
        s: pipeline.stages[s].module() for s in stages_of_process(pipeline, schedule, rank, len(pipeline.stages))
    }
    runner = _pipelined(pipeline, modules, schedule, rank, len(pipeline.stages))
    for batch in batches(pipeline):
        runner.step(batch)
    return {f"s{s}.{n}": p.grad for s, m in modules.items() for n, p in m.named_parameters()}


def accumulated_eagerly(hazard: str) -> Trace:
    pipeline = HAZARDS[hazard]()
    modules = tied_modules(pipeline)
    for batch in batches(pipeline):
        torch.stack([run(pipeline, modules, batch, m)["loss"] for m in range(MICROBATCHES)]).mean().backward()
    return {f"s{s}.{n}": p.grad for s, m in modules.items() for n, p in m.named_parameters()}


def _plain_gate(token: torch.Tensor, tensors: list[torch.Tensor], carries: list[bool]) -> tuple[torch.Tensor, ...]:
    return (token, *(t if c else t.detach() for t, c in zip(tensors, carries, strict=True)))


def _no_entry_gate(adapter: Any, wires: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if adapter.is_first:
        return torch.zeros(1, dtype=adapter.dtype, requires_grad=True), {}
    values = {v.name: boundary.from_wire(t, v) for v, t in zip(adapter.received, wires[1:], strict=True)}
    return wires[0], values


def _no_token(token: torch.Tensor, tensors: list[torch.Tensor], carries: list[bool]) -> tuple[torch.Tensor, ...]:
    through = [t for t, c in zip(tensors, carries, strict=True) if c]
    passed = iter(boundary.Gate.apply(*through) if through else ())
    return (token, *(next(passed) if c else t.detach().contiguous() for t, c in zip(tensors, carries, strict=True)))


def _no_exit_gate(adapter: Any, token: torch.Tensor, known: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if adapter.is_last:
        return (known[adapter.loss] * adapter.work.loss_scale,)
    return _plain_gate(
        token, [boundary.to_wire(known[v.name], v) for v in adapter.sent], [v.requires_grad for v in adapter.sent]
    )


def _split(*arguments: Any, dw_builder: Any, **options: Any) -> PipelineStage:
    return PipelineStage(*arguments, **options)


def _dynamic(*arguments: Any, input_args: Any, output_args: Any, **options: Any) -> PipelineStage:
    return PipelineStage(*arguments, **options)


GUARDS: dict[str, list[tuple[Any, str, Any]]] = {
    "token": [(boundary, "gated", _no_token)],
    "entry gate": [(boundary.StageAdapter, "enter", _no_entry_gate)],
    "exit gate": [(boundary.StageAdapter, "leave", _no_exit_gate)],
    "whole backward": [(engine, "PipelineStage", _split)],
    "static metadata": [(engine, "PipelineStage", _dynamic)],
}


@contextmanager
def switched_off(guard: str | None) -> Iterator[None]:
    """Replace one guard of the runtime by what a plain implementation would do."""
    with ExitStack() as stack:
        for owner, name, replacement in GUARDS.get(guard or "", []):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
