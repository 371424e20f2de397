"""What a plan does in time, as a table and as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from autopart.errors import UsageError
from autopart.plan import Plan
from autopart.simulator.events import Timeline
from autopart.simulator.memory import memory_of_plan
from autopart.simulator.step import Step, step_of_plan
from autopart.simulator.tracks import Track, memory_tracks


@dataclass(frozen=True)
class Simulation:
    """One simulated step of a plan.

    Attributes:
        plan: What was simulated.
        step: What the simulation was told of it.
        timeline: What every process does, and every message.
        memory: For each process, (seconds, bytes held from then on); empty where the plan does not tell.
    """

    plan: Plan
    step: Step
    timeline: Timeline
    memory: tuple[Track, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.step_s

    @property
    def bubble(self) -> float:
        """The share of all processes' time in which they compute nothing."""
        processes = range(self.timeline.processes)
        return sum(map(self.timeline.bubble, processes)) / len(processes)

    def stages_of(self, process: int) -> list[int]:
        """The stages that a process holds."""
        return [s for s in range(len(self.step.stages)) if self.step.process(s) == process]

    def devices_of(self, process: int) -> tuple[int, ...]:
        """The devices that a process stands for: one, or the tensor ranks of its stages."""
        return self.plan.per_stage[self.stages_of(process)[0]].devices

    def peak_memory_bytes(self, process: int) -> int:
        """The most a process holds: of the simulated memory if there is one, else what the plan says."""
        if self.memory:
            return max(held for _, held in self.memory[process])
        return max(self.plan.per_stage[s].peak_memory_bytes for s in self.stages_of(process))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each process: seconds, bytes, and shares of the step."""
        return [
            {
                "devices": list(self.devices_of(process)),
                "stages": self.stages_of(process),
                "busy_s": self.timeline.busy_s(process),
                "wait_s": self.timeline.wait_s(process),
                "messages_s": self.timeline.transfer_s(process),
                "bubble": self.timeline.bubble(process),
                "peak_memory_bytes": self.peak_memory_bytes(process),
            }
            for process in range(self.timeline.processes)
        ]

    def to_json(self) -> str:
        """The table, and the step time beside the plan's formula."""
        return json.dumps(
            {"step_s": self.step_s, "plan_step_s": self.plan.step_time_s, "bubble": self.bubble, "rows": self.rows()},
            indent=1,
        )

    def __str__(self) -> str:
        strategy = self.plan.strategy
        table = [
            [
                ",".join(map(str, row["devices"])),
                ",".join(map(str, row["stages"])),
                *(_milliseconds(row[key]) for key in ("busy_s", "wait_s", "messages_s")),
                f"{100 * row['bubble']:.1f} %",
                f"{row['peak_memory_bytes'] / 2**30:.2f}",
            ]
            for row in self.rows()
        ]
        headers = ["devices", "stages", "busy\nms", "wait\nms", "messages\nms", "bubble", "memory\nGiB"]
        align = ("left", "left", "right", "right", "right", "right", "right")
        plan_s = self.plan.step_time_s
        ratio = f"{plan_s / self.step_s:.3f} of the simulated one" if self.step_s else "the same"
        return "\n".join(
            [
                f"{strategy.schedule}, {strategy.microbatches} microbatches in {strategy.stages} stages",
                "",
                tabulate(table, headers, tablefmt="simple", colalign=align, disable_numparse=True),
                "",
                f"step time       {_milliseconds(self.step_s)} ms simulated",
                f"by the formula  {_milliseconds(plan_s)} ms, {ratio}",
                f"bubble          {100 * self.bubble:.1f} % of all devices' time",
            ]
        )


def _milliseconds(time_s: float) -> str:
    value = time_s * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"


def simulate(plan: Plan) -> Simulation:
    """Replay one step of a plan, event by event, under the program that its schedule runs.

    Args:
        plan: Its seconds and bytes are taken as they stand.

    Raises:
        UsageError: The plan's schedule cannot run its stages and microbatches.
    """
    step = step_of_plan(plan)
    try:
        timeline = step.replay()
    except ValueError as error:
        asked = f"{step.microbatches} microbatches in {len(step.stages)} stages"
        raise UsageError(f"schedule {step.schedule} cannot run {asked}: {error}") from error
    return Simulation(plan, step, timeline, memory_tracks(timeline, memory_of_plan(plan)))
