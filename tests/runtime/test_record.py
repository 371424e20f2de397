"""train.py --record: what it writes adds up, and it changes nothing; compare-run sets it beside the plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import split_jobs
import torch
from pool import JobError, Pool
from recorded import STEPS, killed_at_the_end, make_plan, stage_bytes, write_planned
from split_package import MICROBATCHES
from torch import nn
from written_package import train_here

import autopart
from autopart.api import Partition
from autopart.cli import main
from autopart.plan import Plan
from autopart.records import Record
from autopart.verification.worker import imported


@dataclass
class Case:
    """A package, and how it runs."""

    stages: int
    tensor: int
    schedule: str
    processes: int

    @property
    def places(self) -> int:
        """Of the pipeline."""
        return self.processes // self.tensor


CASES = {
    "two stages": Case(2, 1, "1f1b", 2),
    "interleaved": Case(4, 1, "interleaved1f1b", 2),
    "zero bubble": Case(4, 1, "zbv", 2),
    "tensor ranks": Case(2, 2, "1f1b", 4),
    "all stages in each process": Case(2, 2, "1f1b", 2),
}


@dataclass
class Run:
    """A recorded run, and the same without a record."""

    case: Case
    package: Path
    file: Path
    saved: Path
    plain: Path
    printed: str

    @property
    def record(self) -> Record:
        return Record.load(self.file)


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("record")
    package = write_planned(folder / "package", case.stages, case.tensor, case.schedule)
    made = Run(case, package, folder / "new" / "record.json", folder / "saved", folder / "plain", "")
    common = ["--steps", str(STEPS), "--schedule", case.schedule]
    for save, more in ((made.plain, []), (made.saved, ["--record", str(made.file)])):
        arguments = [*common, "--save", str(save), *more]
        made.printed = pool.run(case.processes, split_jobs.command, str(package), arguments)[0]
    return made


def test_every_stage_and_microbatch_of_every_process_is_there(run: Run) -> None:
    record = run.record
    assert f"{STEPS - 2} steps measured after a warm-up" in run.printed
    assert len(record.step_s) == STEPS - 2 and min(record.step_s) > 0
    assert record.microbatches == MICROBATCHES and record.optimizer == "adamw" and record.dtype == "float64"
    assert record.schedule == (run.case.schedule if run.case.places > 1 else None)
    assert len(record.processes) == run.case.processes
    held = sorted((stage.stage, process.rank) for process in record.processes for stage in process.stages)
    assert held == [(s, t) for s in range(run.case.stages) for t in range(run.case.tensor)]
    for process in record.processes:
        for stage in process.stages:
            for rows in (stage.forward_s, stage.backward_s):
                assert [len(row) for row in rows] == [MICROBATCHES] * (STEPS - 2)
                assert all(seconds > 0 for row in rows for seconds in row)
            split = run.case.schedule == "zbv"
            assert [len(row) for row in stage.weights_s] == [MICROBATCHES if split else 0] * (STEPS - 2)


def test_computing_waiting_and_the_optimizer_make_up_the_step(run: Run) -> None:
    for process in run.record.processes:
        for step, whole in enumerate(run.record.step_s):
            pieces = [s for stage in process.stages for s in (stage.forward_s, stage.backward_s, stage.weights_s)]
            computing = sum(sum(steps[step]) for steps in pieces)
            assert process.optimizer_s[step] > 0
            assert computing + process.optimizer_s[step] + process.wait_s[step] == pytest.approx(whole, abs=1e-6)


def test_the_peak_holds_at_least_weights_and_optimizer_state_and_more_in_the_step(run: Run) -> None:
    for process in run.record.processes:
        state = 3 * sum(stage_bytes(run.package, stage.stage) for stage in process.stages)
        assert process.peak_bytes > process.resident_bytes >= state


def test_operators_are_counted_in_their_stage_and_direction(run: Run) -> None:
    """The one layer norm stands in the last stage; split, its backward runs once for each of the two parts."""
    parts = 2 if run.case.schedule == "zbv" else 1
    for process in run.record.processes:
        for stage in process.stages:
            here = MICROBATCHES if stage.stage == run.case.stages - 1 else None
            counts = {d: {name: o.count for name, o in found.items()} for d, found in stage.operators.items()}
            assert counts["forward"].get("native_layer_norm") == here
            assert counts["backward"].get("native_layer_norm_backward") == (here and here * parts)
            assert "native_layer_norm" not in counts["backward"]
            assert "linear" not in counts["forward"] and "_foreach_add_" not in counts["backward"]


def test_operators_run_one_after_the_other_within_their_stage(run: Run) -> None:
    for process in run.record.processes:
        for stage in process.stages:
            for direction, found in stage.operators.items():
                assert 0 < sum(o.seconds for o in found.values()) <= stage.profiled_s[direction] + 1e-6


def test_a_record_changes_nothing_in_the_training(run: Run) -> None:
    for name in ("model.safetensors", "log.jsonl"):
        assert (run.saved / name).read_bytes() == (run.plain / name).read_bytes()


def test_compare_run_shows_every_figure_of_the_plan_beside_the_measured(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, file = str(run.package / "plan.json"), str(run.file)
    assert main(["compare-run", plan, file]) == 0
    text = capsys.readouterr().out
    assert main(["compare-run", str(run.package), file, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    figures = {(f["where"], f["what"]): f for f in data["figures"]}
    for number, stage in enumerate(make_plan(run.case.stages, run.case.tensor, run.case.schedule).per_stage):
        assert figures[f"stage {number}", "forward"]["predicted"] == stage.forward_s
        assert figures[f"stage {number}", "backward"]["predicted"] == stage.backward_s
        assert f"stage {number}  " in text
    assert all(f["measured"] >= 0 and (f["ratio"] is None or f["ratio"] >= 0) for f in figures.values())
    whole_pipeline = run.case.places > 1
    assert ("run", "step") in figures or not whole_pipeline
    assert (len(data["notes"]) == 0) == whole_pipeline
    assert [f["what"] for f in data["figures"]].count("memory") == (run.case.places if whole_pipeline else 0)
    assert "native_layer_norm_backward" in {o["name"] for o in data["operators"]}


class Wide(nn.Module):
    """Matrix products large enough that nothing else in it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """The train.py of a package, and what it recorded."""
    folder = tmp_path_factory.mktemp("wide")
    script = plan_wide().emit(folder / "package") / "train.py"
    done = train_here(script, "--steps", "3", "--record", str(folder / "record.json"))
    assert done.status == 0, done.stderr
    return script, Record.load(folder / "record.json")


def plan_wide(**options: Any) -> Partition:
    inputs = torch.zeros(1024, 1024)
    return autopart.partition(
        Wide(), "2xCPU", example_inputs=inputs, stages=2, microbatches=2, schedule="1f1b", **options
    )


def test_a_plan_made_with_a_record_predicts_what_was_measured(wide: tuple[Path, Record]) -> None:
    """In the sum: cuts may move, and what is corrected holds on the whole of a device."""
    _, record = wide
    predicted = sum(stage.forward_s + stage.backward_s for stage in plan_wide(profile=record).per_stage)
    stages = [stage for process in record.processes for stage in process.stages]
    measured = sum(stage.forward.median + stage.backward.median for stage in stages)
    assert predicted == pytest.approx(measured, rel=0.01)


def test_the_operators_of_large_stages_make_up_nearly_all_of_their_time(wide: tuple[Path, Record]) -> None:
    script, record = wide
    assert record.plan == Plan.load(script.parent / "plan.json") and record.places == 1
    for number in range(2):
        for _, stage in record.of_stage(number):
            for direction, found in stage.operators.items():
                assert sum(o.seconds for o in found.values()) > 0.5 * stage.profiled_s[direction]
                products = sum(o.count for name, o in found.items() if name in ("mm", "addmm"))
                linears = sum(path.endswith("weight") and s == number for path, s in places(script).items())
                # Backward has one for the weight and one for the input, which the first layer of all does not need.
                expected = linears if direction == "forward" else 2 * linears - (number == 0)
                assert products == 2 * expected


def places(script: Path) -> dict[str, int]:
    """Original name -> stage of a package."""
    with imported(str(script.parent)) as module:
        return {name: stage for name, (stage, _) in module.PIPELINE.names.items()}


def test_what_cannot_be_recorded_is_refused_before_anything_runs(tmp_path: Path) -> None:
    package = write_planned(tmp_path / "package", 2, 1, "1f1b")
    script, file = package / "train.py", tmp_path / "record.json"
    file.write_text("kept")
    link = tmp_path / "link.json"
    link.symlink_to("nowhere.json")
    for arguments, status, message in (
        (("--steps", "2", "--record", str(tmp_path / "new.json")), 2, "at least --steps 3, not 2"),
        (("--record", str(file)), 2, "there already"),
        (("--record", str(link)), 2, "there already"),
        (("--record", str(file / "new.json")), 7, "--record"),
        (("--record", str(tmp_path / ("x" * 252 + ".js"))), 7, "too long"),  # room for it, none for its temporary name
        (("--record", "/proc/self/new.json"), 7, "--record"),
    ):
        done = train_here(script, *arguments)
        assert done.status == status, done.stderr
        assert message in done.stderr and "Traceback" not in done.stderr and "step 0" not in done.stdout
    (package / "plan.json").unlink()
    done = train_here(script, "--record", str(tmp_path / "new.json"))
    assert done.status == 7 and "plan.json" in done.stderr
    assert file.read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "package", "record.json"]


def test_a_process_that_dies_leaves_no_file(pool: Pool, tmp_path: Path) -> None:
    package = write_planned(tmp_path / "package", 2, 1, "1f1b")
    file = tmp_path / "out" / "record.json"
    with pytest.raises(JobError):
        pool.run(2, killed_at_the_end, str(package), ["--steps", "3", "--record", str(file)])
    assert list(file.parent.iterdir()) == []
