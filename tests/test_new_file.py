"""New files: never in place of another, and never half of one."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopart.cli.output import check_new
from autopart.errors import UsageError
from autopart.new_file import write_new
from autopart.plain_yaml import write_new_yaml


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may be larger than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "é.json"
    write_new(path, "first")
    with pytest.raises(UsageError, match="already"):
        write_new(path, "second")
    assert path.read_text() == "first"


@pytest.mark.usefixtures("small_disk")
def test_half_of_a_file_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_new(tmp_path / "a.json", "x" * 100_000)
    with pytest.raises(UsageError, match="cannot write"):
        write_new_yaml(tmp_path / "a.yaml", {str(number): number for number in range(10_000)}, "a comment")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_file_can_have_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("x" * 300, "file/a.json", "none/a.json"):
        with pytest.raises(UsageError, match="cannot write"):
            check_new(tmp_path / name)
    check_new(tmp_path / "a.json")
