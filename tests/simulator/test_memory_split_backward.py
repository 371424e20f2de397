"""Where a schedule splits the backward, actions hold what is predicted, and each rule of the prediction matters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_jobs import package_actions
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import autopart
from autopart.api import Partition
from autopart.runtime.schedules import SCHEDULES
from autopart.simulator import memory_split_backward, memory_trace
from autopart.simulator.memory import ProcessMemory, plan_memory
from autopart.simulator.memory_split_backward import SplitBackward
from autopart.simulator.memory_trace import Handles

MICROBATCHES = 4
STAGES = 4
TOLERANCE = 0.005


class Transformer(nn.Module):
    """A narrow language model.

    Its head is not its embedding: gloo's own thread may be the last that lets the sum of a tied gradient go, and
    torch's profiler sees nothing of that thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(4))
        self.head = nn.Linear(128, 1000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Block(nn.Module):
    """A residual block of convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(x + y)


class Images(nn.Module):
    """A narrow residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.layers = nn.ModuleList(Block(24) for _ in range(4))
        self.head = nn.Linear(24, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3))).square().mean()


class Branched(nn.Module):
    """A layer whose weight is computed from parameters, and which adds a table's rows to a wide value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(256, 256) / 16), nn.Parameter(torch.ones(256, 1))
        self.table = nn.Embedding(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, F.normalize(self.weight, dim=1) * self.gain))
        return x + torch.sigmoid(y + self.table(torch.arange(x.shape[1])))


class Branches(nn.Module):
    """Layers with branches of parameters beside the path, and a value that is handed on from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.layers = nn.ModuleList(Branched() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return (x * first).mean()


class Frozen(nn.Module):
    """Layers of which the first ones are not trained: later stages alone have gradients, and give none back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))
        self.layers[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Half(nn.Module):
    """Wide layers under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x.float().square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (Transformer, lambda: torch.randint(1000, (4 * MICROBATCHES, 64))),
    "images": (Images, lambda: torch.randn(2 * MICROBATCHES, 3, 40, 40)),
    "branches": (Branches, lambda: torch.randn(MICROBATCHES, 512, 64)),
    "frozen": (Frozen, lambda: torch.randn(512 * MICROBATCHES, 256)),
    "half": (Half, lambda: torch.randn(512 * MICROBATCHES, 512)),
}


@cache
def planned(case: str, schedule: str) -> Partition:
    make, inputs = CASES[case]
    return autopart.partition(
        make(),
        ["CPU"] * (STAGES // SCHEDULES[schedule].stages_per_process),
        example_inputs=(inputs(),),
        microbatches=MICROBATCHES,
        stages=STAGES,
        tensor=1,
        schedule=schedule,
        recompute="none",
        granularity="block",
        time_limit_s=1.0,
    )


def predicted(plan: Partition) -> tuple[ProcessMemory, ...]:
    return plan_memory(plan.graph, plan.costs, plan.assignment, plan.strategy, (), "adamw")


Measured = list[dict[str, tuple[int, int]]]
SEEN: dict[tuple[str, str], Measured] = {}


@pytest.fixture
def measured(pool: Pool, tmp_path: Path) -> Callable[[str, str], Measured]:
    """What each process really held; each case is run once."""

    def run(case: str, schedule: str) -> Measured:
        if (case, schedule) not in SEEN:
            plan = planned(case, schedule)
            plan.emit(tmp_path / "package")
            folder = str(tmp_path / "package")
            SEEN[case, schedule] = pool.run(2, package_actions, folder, schedule, MICROBATCHES)
        return SEEN[case, schedule]

    return run


def farthest(plan: Partition, really: Measured) -> float:
    """The largest difference, in the peak of a process: of an I or a W, of the update, of what is held after an action.

    The first stage has no I and no W: its backward is whole.
    """
    worst = 0.0
    for process, seen in zip(predicted(plan), really, strict=True):
        whole = max(peak for peak, _ in seen.values())
        for entry in process.trace:
            name = "update" if entry.action is None else "{}{}{}".format(*entry.action)
            peak, after = seen[name]
            differences = [entry.after_bytes - after]
            if entry.action is None or (entry.action.kind in ("I", "W") and entry.action.stage):
                differences.append(entry.peak_bytes - peak)
            worst = max(worst, *(abs(difference) / whole for difference in differences))
    return worst


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbv"])
@pytest.mark.parametrize("case", CASES)
def test_actions_hold_what_is_predicted(case: str, schedule: str, measured: Any) -> None:
    assert farthest(planned(case, schedule), measured(case, schedule)) < TOLERANCE


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("case", CASES)
def test_each_process_takes_what_is_predicted(case: str, schedule: str, measured: Any) -> None:
    really = [max(peak for peak, _ in seen.values()) for seen in measured(case, schedule)]
    assert [process.peak_bytes for process in predicted(planned(case, schedule))] == [
        pytest.approx(peak, rel=TOLERANCE) for peak in really
    ]


def nothing_waits(self: SplitBackward) -> dict[str, int]:
    return {}


def everything_waits(self: SplitBackward) -> dict[str, int]:
    return dict.fromkeys(self._calls, len(self._groups) - 1)


def by_last_parameters(self: SplitBackward) -> Any:
    return ORDER(self)[::-1]


def no_hooks(self: Any, tensors: Any) -> Any:
    return {tensor: self._waiting[tensor] for tensor in tensors if tensor in self._waiting}


def own_buffers(strategy: Any, stages: Any, number: int, order: Any) -> int:
    return strategy.microbatches * (stages[number].received + stages[number].received_gradients)


def gone_with_the_step(self: Handles, stage: int, part: Any) -> int:
    split = self._stages[stage].split
    self._kept += split.returned if part == "I" and split is not None else 0
    return AFTER(self, stage, part)


ORDER, AFTER = SplitBackward._groups_in_order, Handles.after


@pytest.mark.parametrize(
    ("case", "schedule", "owner", "rule", "broken"),
    [
        ("transformer", "zbv", SplitBackward, "_last_groups", nothing_waits),
        ("transformer", "zbv", SplitBackward, "_last_groups", everything_waits),
        ("branches", "interleavedzerobubble", SplitBackward, "_groups_in_order", by_last_parameters),
        ("images", "zbv", memory_split_backward._PathFlow, "kept", no_hooks),
        ("branches", "zbv", memory_trace, "_buffers", own_buffers),
        ("branches", "interleavedzerobubble", Handles, "after", gone_with_the_step),
    ],
)
def test_each_rule_matters(
    case: str, schedule: str, owner: Any, rule: str, broken: Any, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, rule, broken)
    assert farthest(planned(case, schedule), measured(case, schedule)) > TOLERANCE
