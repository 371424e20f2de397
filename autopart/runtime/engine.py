"""The stages of one process and how a step runs through them: on one process in a row, on several by a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from .batches import cut, join
from .boundary import StageAdapter, from_wire, real_dtype, to_wire, wire_metadata, wire_shape
from .errors import PackageError
from .interface import Pipeline
from .mesh import Mesh
from .schedules import SCHEDULES, ScheduleInfo, process_of_stage
from .structure import decode
from .ties import Ties
from .work import Work


class Engine(ABC):
    """Trains and evaluates the stages that live in this process.

    Attributes:
        pipeline: The package's table, in the dtype of the run.
        modules: The emitted stages of this process, by index.
        mesh: This process among the others.
        has_loss: Whether this process holds the last stage, hence the loss and the outputs.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Mapping[int, nn.Module],
        *,
        mesh: Mesh,
        microbatches: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.pipeline = pipeline
        self.modules = dict(modules)
        self.mesh = mesh
        self.microbatches = microbatches
        self.device = device
        self.seed = seed
        self.steps_done = 0
        self.last = len(pipeline.stages) - 1
        self.has_loss = self.last in self.modules
        self.adapters = {s: StageAdapter(pipeline, s, module, device) for s, module in self.modules.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process, copies of tied ones included: what its optimizer updates."""
        for module in self.modules.values():
            yield from module.parameters()

    def step(self, batch: Mapping[str, torch.Tensor], wanted: tuple[str, ...] = ()) -> tuple[float | None, list[Any]]:
        """Forward and backward of one global batch in training mode; gradients are added to `.grad`.

        Args:
            batch: Input name -> tensor of the whole batch.
            wanted: Names of values of the last stage to return.

        Returns:
            The mean loss over the microbatches and, for each microbatch, its wanted values; (None, []) on processes
            without the last stage.
        """
        if self.pipeline.loss is None:
            raise PackageError("this package was made with mode='inference': it has no loss to train on")
        for module in self.modules.values():
            module.train()
        work = self._work(batch, 1.0 / self.microbatches, (self.pipeline.loss, *wanted))
        self._train(work)
        self.steps_done += 1
        if not self.has_loss:
            return None, []
        losses = torch.stack([kept[self.pipeline.loss] for kept in work.kept])
        return float(losses.double().mean()), work.kept

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """The model's result on one global batch in evaluation mode, in its original structure.

        Returns None on processes without the last stage.
        """
        outputs = self.evaluate_outputs(batch)
        return None if outputs is None else decode(self.pipeline.result, outputs)

    @torch.no_grad()
    def evaluate_outputs(self, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None] | None:
        """The tensors of `pipeline.outputs` for one global batch in evaluation mode, microbatches joined.

        What the model gives in training alone is None.
        """
        for module in self.modules.values():
            module.eval()
        work = self._work(batch, 1.0, tuple(o.value for o in self.pipeline.outputs))
        self._forward(work)
        if not self.has_loss:
            return None
        return [
            join([kept[o.value] for kept in work.kept], o.batch_dim) if o.in_evaluation else None
            for o in self.pipeline.outputs
        ]

    def _work(self, batch: Mapping[str, torch.Tensor], loss_scale: float, wanted: tuple[str, ...]) -> Work:
        needed = {name for s in self.modules for name in self.pipeline.stages[s].takes}
        if self.has_loss:
            needed |= set(wanted)
        here = {name: tensor.to(self.device) for name, tensor in batch.items() if name in needed}
        inputs = cut(here, self.pipeline, self.microbatches)
        return Work(inputs, self.seed, self.steps_done, loss_scale, wanted, self.last)

    @abstractmethod
    def place(self, stage: int) -> int:
        """The pipeline place that holds a stage."""

    @abstractmethod
    def _train(self, work: Work) -> None: ...

    @abstractmethod
    def _forward(self, work: Work) -> None: ...


class OneProcess(Engine):
    """Every stage in this process, one microbatch after the other; nothing crosses from place to place.

    With tensor ranks, each of them is such a process.
    """

    def __init__(self, pipeline: Pipeline, modules: Mapping[int, nn.Module], **options: Any) -> None:
        super().__init__(pipeline, modules, **options)
        self.ties = Ties(pipeline, self.modules, self.place, self.mesh)

    def place(self, stage: int) -> int:
        return 0

    def _train(self, work: Work) -> None:
        assert self.pipeline.loss is not None
        for adapter in self.adapters.values():
            adapter.work = work
        earlier = self.ties.take_gradients()
        for number in range(self.microbatches):
            loss = self._through(number)[self.pipeline.loss]
            (loss * work.loss_scale).backward()
        self.ties.sum_gradients(earlier)

    def _forward(self, work: Work) -> None:
        for adapter in self.adapters.values():
            adapter.work = work
        for number in range(self.microbatches):
            self._through(number)

    def _through(self, number: int) -> dict[str, torch.Tensor]:
        known: dict[str, torch.Tensor] = {}
        for index in sorted(self.adapters):
            known = self.adapters[index].run(number, known)
        return known


class Pipelined(Engine):
    """One or two stages in this process, the others in those of its tensor rank in other places.

    Args:
        schedule: A key of `SCHEDULES`.
        modules: As `stages_of_process` says.
    """

    def __init__(self, pipeline: Pipeline, modules: Mapping[int, nn.Module], *, schedule: str, **options: Any) -> None:
        super().__init__(pipeline, modules, **options)
        self.info = SCHEDULES[schedule]
        self.ties = Ties(pipeline, self.modules, self.place, self.mesh)
        if pipeline.loss is not None:
            self.torch_stages = [self._torch_stage(index) for index in sorted(self.modules)]
            self._schedule = _build(schedule, self.info, self.torch_stages, self.microbatches)

    def place(self, stage: int) -> int:
        return process_of_stage(stage, len(self.pipeline.stages), self.info)

    def _torch_stage(self, index: int) -> PipelineStage:
        stages, boundaries = self.pipeline.stages, self.pipeline.boundaries
        received = wire_metadata(boundaries[index - 1], self.pipeline.dtype, self.mesh.ranks) if index else ()
        if index < self.last:
            sent = wire_metadata(boundaries[index], self.pipeline.dtype, self.mesh.ranks)
        else:
            sent = (torch.empty((), dtype=self.pipeline.dtype, device="meta", requires_grad=True),)
        return PipelineStage(
            self.adapters[index],
            index,
            len(stages),
            self.device,
            input_args=received,
            output_args=sent,
            group=self.mesh.pipeline,
            dw_builder=(lambda: lambda: None) if stages[index].whole_backward else None,
        )

    def _train(self, work: Work) -> None:
        for adapter in self.adapters.values():
            adapter.work = work
        earlier = self.ties.take_gradients()
        # The schedule cuts its arguments into microbatches: the adapters get their numbers, and have the inputs.
        numbers = torch.arange(self.microbatches)
        self._schedule.step(microbatch=numbers, target=numbers, losses=[], return_outputs=False)
        self.ties.sum_gradients(earlier)

    def _forward(self, work: Work) -> None:
        """All microbatches through the first stage of each process, then through the second; for every schedule."""
        sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        local: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        for index in sorted(self.adapters):
            adapter = self.adapters[index]
            adapter.work = work
            for number in range(self.microbatches):
                received = local.pop((index, number), None)
                if received is None:
                    received = self._receive(index)
                known = adapter.run(number, received)
                if index + 1 in self.adapters:
                    local[index + 1, number] = {v.name: known[v.name] for v in adapter.sent}
                else:
                    sends += self._send(index, known)
        for request, _ in sends:
            if request is not None:
                request.wait()

    def _receive(self, index: int) -> dict[str, torch.Tensor]:
        received = {}
        for value in self.adapters[index].received:
            shape, dtype = wire_shape(value, self.mesh.ranks), real_dtype(value.dtype)
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(buffer, group=self.mesh.pipeline, group_src=self.place(index - 1))
            received[value.name] = from_wire(buffer, value)
        return received

    def _send(self, index: int, known: Mapping[str, torch.Tensor]) -> list[tuple[dist.Work | None, torch.Tensor]]:
        if index == self.last:
            return []
        wires = [to_wire(known[v.name], v).contiguous() for v in self.adapters[index].sent]
        # A tensor must stay alive until it is sent, so it is kept beside its request.
        target = self.place(index + 1)
        return [(dist.isend(wire, group=self.mesh.pipeline, group_dst=target), wire) for wire in wires]


def stages_of_process(pipeline: Pipeline, schedule: str, process: int, processes: int) -> list[int]:
    """The stages that a process holds, in order: all, where there is one pipeline place.

    Raises:
        PackageError: The package's stages do not fit this schedule on this number of processes.
    """
    if schedule not in SCHEDULES:
        raise PackageError(f"unknown schedule {schedule!r}; choose from {', '.join(SCHEDULES)}")
    info, count, ranks = SCHEDULES[schedule], len(pipeline.stages), pipeline.tensor
    if processes == ranks:
        return list(range(count))
    if count * ranks != processes * info.stages_per_process:
        raise PackageError(_misfit(pipeline, schedule, processes))
    return [s for s in range(count) if process_of_stage(s, count, info) == process // ranks]


def _misfit(pipeline: Pipeline, schedule: str, processes: int) -> str:
    stages, ranks = len(pipeline.stages), pipeline.tensor
    needed = {
        name: stages // info.stages_per_process * ranks
        for name, info in SCHEDULES.items()
        if stages % info.stages_per_process == 0
    }
    if schedule in needed:
        needs = f"this package needs {needed[schedule]} processes ({pipeline.size}) under schedule {schedule}"
        reason = f"{needs}, not {processes} {'process' if processes == 1 else 'processes'}"
    else:
        reason = f"schedule {schedule} puts two stages on each process, which {stages} stages do not fill"
    fitting = ", ".join(f"{count} ({name})" for name, count in needed.items())
    return f"{reason}; what fits: {fitting}, {ranks} (all stages in each)"


def in_dtype(pipeline: Pipeline, dtype: torch.dtype) -> Pipeline:
    """The table for a run in another dtype: inputs and boundary values of the captured dtype change with it."""

    def change(old: torch.dtype) -> torch.dtype:
        return dtype if old == pipeline.dtype else old

    return replace(
        pipeline,
        dtype=dtype,
        inputs=tuple(replace(i, dtype=change(i.dtype)) for i in pipeline.inputs),
        boundaries=tuple(tuple(replace(v, dtype=change(v.dtype)) for v in values) for values in pipeline.boundaries),
    )


def _build(name: str, info: ScheduleInfo, stages: list[PipelineStage], microbatches: int) -> Any:
    """torch's schedule. Losses are scaled already: scaling gradients would divide shared ones twice."""
    schedule = getattr(pipelining, info.torch_name)
    argument = stages[0] if info.stages_per_process == 1 else stages
    try:
        # The last stage returns the loss itself; a schedule needs a tensor of its own.
        return schedule(argument, microbatches, loss_fn=lambda output, _: output[0] * 1.0, scale_grads=False)
    except ValueError as error:
        raise PackageError(f"schedule {name}: {' '.join(str(error).split())}") from error
