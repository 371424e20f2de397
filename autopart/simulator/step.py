"""What a simulation is told of a step: seconds of each stage, bytes of each boundary, the wires between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from autopart.cluster import Cluster
from autopart.plan import Plan, StagePlan
from autopart.runtime.schedules import processes_of_stages
from autopart.simulator.actions import Action, Message, Post, Program, Wait, programs
from autopart.simulator.events import Timeline, replay
from autopart.simulator.network import Network, Wire


@dataclass(frozen=True)
class StageWork:
    """One stage: seconds of one microbatch, bytes of one microbatch, and what comes once a step.

    Attributes:
        sent_bytes: Of each tensor that goes to the next stage; `returned_bytes` of each gradient that comes back.
        sync_s: Summing gradients of parameters that other stages hold too.
        update_s: The optimizer.
        whole_backward: Where a schedule splits the backward, this stage does all of it with the input gradient.
    """

    forward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    sent_bytes: tuple[float, ...] = ()
    returned_bytes: tuple[float, ...] = ()
    sync_s: float = 0.0
    update_s: float = 0.0
    whole_backward: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a pipeline.

    Attributes:
        schedule: A key of `autopart.runtime.schedules.SCHEDULES`.
        wires: Between the processes of stages b and b + 1, for each boundary b.
        by_host: Whether the processes' own threads copy messages (gloo), or their devices do (NCCL).
        training: Otherwise forwards alone.
    """

    schedule: str
    microbatches: int
    stages: tuple[StageWork, ...]
    wires: tuple[Wire, ...] = ()
    by_host: bool = False
    training: bool = True

    @property
    def processes(self) -> int:
        return 1 + max(map(self.process, range(len(self.stages))))

    def process(self, stage: int) -> int:
        """The process that holds a stage."""
        return processes_of_stages(self.schedule, len(self.stages))[stage]

    def programs(self) -> tuple[Program, ...]:
        """What every process does, in order."""
        if self.training:
            return programs(self.schedule, len(self.stages), self.microbatches)
        return tuple(self._forwards(process) for process in range(self.processes))

    def seconds(self, action: Action) -> float:
        """How long an action takes.

        torch leaves the input gradient of the first stage out, and does all of its backward with the weight gradient.
        """
        work = self.stages[action.stage]
        whole = work.backward_input_s + work.backward_weight_s
        if action.kind in ("I", "W") and (work.whole_backward or action.stage == 0):
            return whole if (action.kind == "I") == work.whole_backward else 0.0
        return {"F": work.forward_s, "B": whole, "I": work.backward_input_s, "W": work.backward_weight_s}[action.kind]

    def sizes(self, message: Message) -> tuple[float, ...]:
        """Bytes of each tensor of a message."""
        if message.source < message.target:
            return self.stages[message.source].sent_bytes
        return self.stages[message.target].returned_bytes

    def replay(self) -> Timeline:
        """Simulate the step."""
        between: dict[tuple[int, int], Wire] = {}
        for boundary, wire in enumerate(self.wires):
            ends = self.process(boundary), self.process(boundary + 1)
            between[ends] = between[ends[::-1]] = wire
        return replay(
            self.programs(),
            self.seconds,
            self.sizes,
            Network(lambda source, target: between[source, target], self.by_host),
            sync_s=self._by_process([work.sync_s for work in self.stages]),
            update_s=self._by_process([work.update_s for work in self.stages]),
        )

    def _by_process(self, seconds: list[float]) -> list[float]:
        return [sum(s for i, s in enumerate(seconds) if self.process(i) == p) for p in range(self.processes)]

    def _forwards(self, process: int) -> Program:
        """All microbatches through the first stage of a process, then through its second: see `Pipelined._forward`."""
        program: list[Action | Post | Wait] = []
        batch, sends = 0, []
        for stage in (s for s in range(len(self.stages)) if self.process(s) == process):
            for number in range(self.microbatches):
                if stage and self.process(stage - 1) != process:
                    batch += 1
                    program += [Post(batch, (), (Message(stage - 1, stage, number),)), Wait(batch)]
                program.append(Action(stage, "F", number))
                if stage + 1 < len(self.stages) and self.process(stage + 1) != process:
                    batch += 1
                    program.append(Post(batch, (Message(stage, stage + 1, number),), ()))
                    sends.append(Wait(batch))
        return (*program, *sends)


def step_of_plan(plan: Plan) -> Step:
    """What a plan says of its step; each process stands for the tensor ranks of its stages."""
    cluster = Cluster.from_data(plan.cluster)
    devices = [stage.devices[0] for stage in plan.per_stage]
    links = [cluster.link(here, there) for here, there in pairwise(devices)]
    return Step(
        schedule=plan.strategy.schedule,
        microbatches=plan.strategy.microbatches,
        stages=tuple(_work(stage) for stage in plan.per_stage),
        wires=tuple(Wire(link.latency_s, link.bandwidth_bytes_per_s) for link in links),
        by_host=any(cluster.devices[device].kind == "cpu" for device in devices),
        training=plan.mode == "training",
    )


def _work(stage: StagePlan) -> StageWork:
    return StageWork(
        forward_s=stage.forward_s,
        backward_input_s=stage.backward_s - stage.backward_weight_s,
        backward_weight_s=stage.backward_weight_s,
        sent_bytes=stage.sent_bytes,
        returned_bytes=stage.returned_bytes,
        sync_s=stage.sync_s,
        update_s=stage.update_s,
        # A package runs the backward of such stages whole (see docs/solver.md, "What is computed again").
        whole_backward=bool(stage.recomputed) or (stage.memory is not None and stage.memory.whole_backward),
    )
