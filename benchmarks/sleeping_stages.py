"""A pipeline of stages that sleep: torch's schedules and process groups are real, the computing is known to the second.

A stage sleeps in forward and in each half of its backward, and touches no memory meanwhile: what it returns lies in
buffers made before. Sleeping is immune to the load of a machine; the transfers are not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from autopart.runtime.schedules import SCHEDULES, process_of_stage


@dataclass(frozen=True)
class Sleep:
    """Seconds that a stage sleeps for one microbatch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float


class Buffers:
    """Tensors of one size, given out in turn; each is new to autograd and shares no graph, so nothing is copied.

    They take turns because a message that was just sent is still in the cache. What is in them does not matter.
    """

    def __init__(self, payload: int) -> None:
        tensors = [torch.zeros(payload // 4) for _ in range(4)]
        self._storages = cycle([t.untyped_storage() for t in tensors])
        self._shape = (payload // 4,)

    def next(self) -> torch.Tensor:
        return torch.empty(0).set_(next(self._storages), 0, self._shape)


class OnTheWay(torch.autograd.Function):
    """From a stage's input to its output: sleeps the forward, and the input gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, sleep: Sleep, values: Buffers, gradients: Buffers) -> torch.Tensor:
        ctx.sleep, ctx.gradients = sleep, gradients
        time.sleep(sleep.forward_s)
        return values.next()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        time.sleep(ctx.sleep.backward_input_s)
        return ctx.gradients.next(), None, None, None


class Weight(torch.autograd.Function):
    """From a stage's parameter to its output: sleeps the weight gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sleep: Sleep) -> torch.Tensor:
        ctx.sleep = sleep
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.sleep.backward_weight_s)
        return gradient, None


class Meet(torch.autograd.Function):
    """Both ways meet: the value passes as it is, or, of the last stage, becomes a loss."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, loss: bool) -> torch.Tensor:
        ctx.shape = value.shape
        return value.new_ones(()) if loss else value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient.expand(ctx.shape), gradient.new_ones(1), None


class SleepingStage(nn.Module):
    def __init__(self, sleep: Sleep, payload: int, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.sleep, self.is_last = sleep, is_last
        self.values, self.gradients = Buffers(payload), Buffers(payload)

    def forward(self, *received: torch.Tensor) -> torch.Tensor:
        value = received[0] if received else self.values.next().requires_grad_()
        passed = OnTheWay.apply(value, self.sleep, self.values, self.gradients)
        return Meet.apply(passed, Weight.apply(self.weight, self.sleep), self.is_last)


def run(rank: int, schedule: str, sleeps: list[Sleep], payload: int, microbatches: int, steps: int) -> list[float]:
    """One process of the pipeline; seconds of each step from a common start until this process is done with it."""
    info, count = SCHEDULES[schedule], len(sleeps)
    crossing = torch.empty(payload // 4, device="meta", requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    stages = [
        PipelineStage(
            SleepingStage(sleeps[s], payload, s == count - 1),
            s,
            count,
            torch.device("cpu"),
            input_args=(crossing,) if s else (),
            output_args=(loss if s == count - 1 else crossing,),
        )
        for s in range(count)
        if process_of_stage(s, count, info) == rank
    ]
    argument = stages[0] if info.stages_per_process == 1 else stages
    runner = getattr(pipelining, info.torch_name)(
        argument, microbatches, loss_fn=lambda output, _: output * 1.0, scale_grads=False
    )
    target, seconds = torch.zeros(microbatches), []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        runner.step(target=target, losses=[], return_outputs=False)
        seconds.append(time.perf_counter() - start)
    return seconds


def exchange(rank: int, payload: int, repeats: int, pause_s: float) -> list[tuple[float, float]]:
    """Seconds of a message from the first process to the second, and of one each way at once.

    Args:
        pause_s: Slept before each, as a pipeline computes between its messages.
    """
    sent, received = Buffers(payload), Buffers(payload)
    rounds = []
    for _ in range(repeats):
        seconds = []
        for both in (False, True):
            time.sleep(pause_s)
            dist.barrier()
            start = time.perf_counter()
            works = []
            if both or rank == 0:
                works.append(dist.isend(sent.next(), 1 - rank))
            if both or rank == 1:
                works.append(dist.irecv(received.next(), 1 - rank))
            for work in works:
                work.wait()
            seconds.append(time.perf_counter() - start)
        rounds.append((seconds[0], seconds[1]))
    return rounds
