"""A package that was damaged is never reported as equal: the message names the file and what is wrong with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autopart
from autopart.errors import InputFileError
from autopart.verification import check


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"stages": 2, "microbatches": 2, "time_limit_s": 5}
    plan = autopart.partition(_model(), "2xCPU", example_inputs=(torch.randn(4, 4),), **options)
    return plan.emit(tmp_path_factory.mktemp("emitted") / "package")


def _append(file: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text((folder / file).read_text() + text) and None


def _write(file: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(text) and None


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "syntax error": (_append("stage_0.py", "syntax error here\n"), "stage_0.py, line ", "SyntaxError"),
    "missing stage": (_remove("stage_1.py"), "stage_1.py", "missing"),
    "missing runtime": (_remove("runtime"), "runtime", "missing"),
    "missing file of the runtime": (_remove("runtime/batches.py"), "runtime/batches", "missing"),
    "no table": (_write("pipeline.py", "x = 1\n"), "pipeline.py", "does not define PIPELINE"),
    "another table": (_append("pipeline.py", "\nPIPELINE = 3\n"), "pipeline.py", "int"),
    "exits": (_append("pipeline.py", "\nraise SystemExit(0)\n"), "pipeline.py, line ", "SystemExit"),
    "raises": (_append("stage_1.py", "\nmissing_name\n"), "stage_1.py, line ", "NameError"),
    "not text": (lambda f: (f / "stage_0.py").write_bytes(b"\xff\xfe\0") and None, "stage_0.py", ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_damaged_file_is_named(damage: str, package: Path, tmp_path: Path) -> None:
    do, file, reason = DAMAGE[damage]
    copy = tmp_path / "copy"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    do(copy)
    with pytest.raises(InputFileError) as caught:
        check.verify(copy, _model(), processes=1)
    assert str(copy / file) in caught.value.message and reason in caught.value.message
    assert caught.value.exit_status == 7


@pytest.mark.parametrize("statement", ["raise SystemExit(0)", "import os; os._exit(0)"])
def test_a_stage_that_exits_is_not_a_success(statement: str, package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "stage_1.py").read_text()
    start = text.index("    def forward(")
    body = text.index("\n", start) + 1
    (copy / "stage_1.py").write_text(f"{text[:body]}        {statement}\n{text[body:]}")
    report = check.verify(copy, _model(), processes=1)
    assert not report.passed and "the package failed" in report.failures[0]
