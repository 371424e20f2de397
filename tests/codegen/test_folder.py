"""emit() writes whole packages or nothing, and overwrites nothing that is not its own."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import make_plan, random_cuts
from torch import nn

from autopart.codegen import emit
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.tracer import trace


@pytest.fixture(scope="module")
def planned() -> tuple[Graph, Plan]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = trace(model, (torch.randn(4, 8),), check=False)
    return graph, make_plan(graph, random_cuts(graph, 2, 0), 2)


def test_own_packages_are_overwritten(planned: tuple[Graph, Plan], tmp_path: Path) -> None:
    emit(*planned, tmp_path / "out")
    (tmp_path / "out" / "__pycache__").mkdir()
    (tmp_path / "out" / "__pycache__" / "stage_0.pyc").write_bytes(b"")
    emit(*planned, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def _foreign(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    (folder / "thesis.txt").write_text("ten years")


def _changed(folder: Path) -> None:
    (folder / "stage_0.py").write_text((folder / "stage_0.py").read_text() + "# mine\n")


def _added(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize("change", [_foreign, _changed, _added])
def test_what_people_wrote_is_not_overwritten(
    change: Callable[[Path], None], planned: tuple[Graph, Plan], tmp_path: Path
) -> None:
    emit(*planned, tmp_path / "out")
    change(tmp_path / "out")
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    with pytest.raises(UsageError):
        emit(*planned, tmp_path / "out")
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_files_are_readable_by_all(planned: tuple[Graph, Plan], tmp_path: Path) -> None:
    emit(*planned, tmp_path / "out")
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert modes == {0o644}


def test_a_plan_for_another_graph_is_refused(planned: tuple[Graph, Plan], tmp_path: Path) -> None:
    _, plan = planned
    other = trace(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()), (torch.randn(4, 8),), check=False
    )
    with pytest.raises(UsageError, match="made for another graph"):
        emit(other, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(planned: tuple[Graph, Plan], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "out", Path("/proc/nowhere/out"), tmp_path / "a" / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot write the package to") as caught:
            emit(*planned, place)
        assert str(place) in caught.value.message and caught.value.exit_status == 2
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fails", ["write_text", "rename", "chmod"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "again"])
def test_a_full_disk_leaves_what_was_there(
    fails: str, before: bool, planned: tuple[Graph, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "out"
    if before:
        emit(*planned, target)
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    original = getattr(Path, fails)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        whole = path.parent == tmp_path / "new" and path != target  # only the new folder's own rename, not those around
        if fails != "rename" or whole:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, fails, refuse)
    with pytest.raises(UsageError, match="No space left on device") as caught:
        emit(*planned, target)
    assert str(target) in caught.value.message
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files
    assert [p.name for p in tmp_path.rglob("*") if p.name.startswith(".")] == []
    assert target.exists() == before and (tmp_path / "new").exists() == before
