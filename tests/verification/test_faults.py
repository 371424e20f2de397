"""verify() passes a package as emitted, under every schedule, and fails each fault put into a copy of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from launching import in_pool
from mixed_model import MICROBATCHES, Mixed, mixed
from pool import Pool

import autopart
from autopart.runtime.schedules import SCHEDULES
from autopart.verification import verify

STAGES = 4


def emitted(folder: Path, frozen_blocks: int = 0) -> Path:
    model, kwargs = mixed(frozen_blocks)
    options = {"microbatches": MICROBATCHES, "stages": STAGES, "optimizer": "sgd", "granularity": "block"}
    return autopart.partition(model, "4xA100-80G", example_kwargs=kwargs, **options).emit(folder / "package")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emitted(tmp_path_factory.mktemp("emitted"))


@pytest.fixture(scope="module")
def model() -> Mixed:
    return mixed()[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_package_equals_its_model(pool: Pool, package: Path, model: Mixed, schedule: str) -> None:
    report = verify(package, model, schedule=schedule, launch=in_pool(pool))
    assert report.passed, str(report)
    assert report.processes == STAGES // SCHEDULES[schedule].stages_per_process
    assert max(error for error in report.worst_relative_error.values() if error is not None) < 1e-9
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert report.parameters == len(names)
    assert report.compared["gradient"] >= 3 * len(names)
    assert report.compared["weight_after_steps"] >= len(names)
    assert report.compared["buffer"] >= 3 * len(list(model.named_buffers()))
    assert "dropout was set to zero in both" in report.notes


def test_one_process_runs_all_stages(pool: Pool, package: Path, model: Mixed) -> None:
    report = verify(package, model, processes=1, launch=in_pool(pool))
    assert report.passed, str(report)


def test_the_users_batch_is_the_first_one(pool: Pool, package: Path, model: Mixed) -> None:
    report = verify(package, model, kwargs=mixed()[1], launch=in_pool(pool))
    assert report.passed, str(report)
    assert "inputs were random" not in report.notes


def test_the_model_is_left_as_it_was(pool: Pool, package: Path) -> None:
    model, _ = mixed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    verify(package, model, launch=in_pool(pool))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def edit(folder: Path, pattern: str, replacement: str, file: str, count: int = 0) -> None:
    """Replace a pattern in the files of a package; it must be there."""
    changed = 0
    for path in folder.glob(file):
        text, found = re.subn(pattern, replacement, path.read_text(), count=count, flags=re.MULTILINE | re.DOTALL)
        path.write_text(text)
        changed += found
    assert changed, f"{pattern} is nowhere in {file}"


FAULTS = {
    "tie not summed": (r"^TIES = .*?\n\n", "TIES = ()\n\n", "pipeline.py", 1, "1f1b"),
    "loss not scaled": (r"1\.0 / self\.microbatches", "1.0", "runtime/engine.py", 0, "1f1b"),
    "buffer not updated": (r"nn\.BatchNorm1d\(6", "nn.BatchNorm1d(6, momentum=0.0", "*.py", 0, "1f1b"),
    "boundary values swapped": (
        r"(Stage\(Stage2, takes=\()('\w+'|\"\w+\"), ('\w+'|\"\w+\")",
        r"\1\3, \2",
        "pipeline.py",
        0,
        "1f1b",
    ),
    "boundary detached": (r"requires_grad=True", "requires_grad=False", "pipeline.py", 1, "1f1b"),
    "weights not updated": (
        r"yield from module\.parameters\(\)",
        "yield from [p for p in module.parameters() if p.dim() > 1]",
        "runtime/engine.py",
        0,
        "1f1b",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(pool: Pool, package: Path, model: Mixed, tmp_path: Path, fault: str) -> None:
    pattern, replacement, file, count, schedule = FAULTS[fault]
    copy = tmp_path / "package"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    edit(copy, pattern, replacement, file, count)
    report = verify(copy, model, schedule=schedule, launch=in_pool(pool))
    assert not report.passed, f"{fault} passed:\n{report}"


def test_a_frozen_start_needs_the_token(pool: Pool, tmp_path: Path) -> None:
    folder = emitted(tmp_path, frozen_blocks=4)
    model, _ = mixed(frozen_blocks=4)
    report = verify(folder, model, schedule="interleavedzerobubble", launch=in_pool(pool))
    assert report.passed, str(report)
    shutil.rmtree(folder / "runtime" / "__pycache__", ignore_errors=True)
    without = "passed = Gate.apply(*through) if through else ()"
    edit(folder, r"token, \*passed = Gate\.apply\(token, \*through\)", without, "runtime/boundary.py")
    report = verify(folder, model, schedule="interleavedzerobubble", launch=in_pool(pool))
    assert not report.passed
    assert "None" in " ".join(report.failures) or report.worst_relative_error["gradient"] > 0.1
