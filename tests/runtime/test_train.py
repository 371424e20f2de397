"""train.py of a package: what a person types, what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from written_package import train, train_here, write


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def alone(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run in one process has saved."""
    folder = tmp_path_factory.mktemp("alone") / "saved"
    done = train_here(script, "--steps", "3", "--save", str(folder))
    assert done.status == 0, done.stderr
    assert "random inputs" in done.stdout and "random weights" in done.stdout
    assert "step 2  loss" in done.stdout
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("processes", "schedule"), [(4, "1f1b"), (2, "zbv")])
def test_processes_and_schedule_do_not_change_the_training(
    script: Path, alone: Path, tmp_path: Path, processes: int, schedule: str
) -> None:
    """Random weights, random inputs and dropout included."""
    arguments = ("--steps", "3", "--schedule", schedule, "--save", str(tmp_path / "saved"))
    done = train(script, *arguments, processes=processes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1  loss") == 1
    assert losses(tmp_path / "saved") == pytest.approx(losses(alone), rel=1e-6)
    one, several = load_file(alone / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert one.keys() == several.keys()
    for name in one:
        torch.testing.assert_close(several[name], one[name], rtol=1e-5, atol=1e-7)


def test_saved_weights_have_all_original_names_and_plain_permissions(alone: Path) -> None:
    saved = load_file(alone / "model.safetensors")
    assert list(saved) and {"embedding.weight", "decoder.weight", "norm.bias"} <= saved.keys()
    assert saved["embedding.weight"].equal(saved["decoder.weight"])
    mask = os.umask(0)
    os.umask(mask)
    assert (alone / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert sorted(p.name for p in alone.iterdir()) == ["log.jsonl", "model.safetensors"]


def test_saved_weights_are_what_a_further_run_starts_from(script: Path, alone: Path, tmp_path: Path) -> None:
    arguments = (
        "--lr",
        "0",
        "--optimizer",
        "sgd",
        "--weights",
        str(alone / "model.safetensors"),
        "--save",
        str(tmp_path / "s"),
    )
    assert train_here(script, *arguments).status == 0
    before, after = load_file(alone / "model.safetensors"), load_file(tmp_path / "s" / "model.safetensors")
    assert all(after[name].equal(before[name]) for name in before)


def test_a_result_is_never_overwritten(script: Path, alone: Path) -> None:
    before = (alone / "model.safetensors").read_bytes()
    done = train_here(script, "--save", str(alone))
    assert done.status == 2 and "choose another folder" in done.stderr and "Traceback" not in done.stderr
    assert (alone / "model.safetensors").read_bytes() == before


def test_batches_of_a_file_are_trained_on(script: Path, tmp_path: Path) -> None:
    ids, labels = torch.arange(32).reshape(8, 4), torch.arange(32).flip(0).reshape(8, 4)
    torch.save([{"args": (ids,), "kwargs": {}, "target": labels}] * 2, tmp_path / "batches.pt")
    done = train_here(script, "--batches", str(tmp_path / "batches.pt"))
    assert done.status == 0, done.stderr
    assert "random inputs" not in done.stdout
    assert done.stdout.count("loss") == 2


BATCHES = {
    "rows": ([{"args": (torch.zeros(10, 4).long(),), "target": torch.zeros(8, 4).long()}], "--microbatches 5"),
    "dtype": ([{"args": (torch.zeros(8, 4),), "target": torch.zeros(8, 4).long()}], "args[0] is torch.float32"),
    "shape": ([{"args": (torch.zeros(8, 5).long(),), "target": torch.zeros(8, 4).long()}], "args[0] has shape [8, 5]"),
    "missing": ([{"args": (torch.zeros(8, 4).long(),)}], "target is missing"),
    "constant": (
        [{"args": (torch.zeros(8, 4).long(),), "kwargs": {"scale": 3.0}, "target": torch.zeros(8, 4).long()}],
        "kwargs['scale'] is 3.0, this package was made with 2.0",
    ),
    "unknown constant": (
        [{"args": (torch.zeros(8, 4).long(),), "kwargs": {"cache": True}, "target": torch.zeros(8, 4).long()}],
        "kwargs['cache'] is True, this package was made with None",
    ),
    "unknown tensor": (
        [{"args": (torch.zeros(8, 4).long(),), "kwargs": {"m": torch.ones(1)}, "target": torch.zeros(8, 4).long()}],
        "kwargs['m'] is a tensor that this package does not take",
    ),
    "no list": ({"args": ()}, "expected a list"),
}


@pytest.mark.parametrize("fault", BATCHES)
def test_wrong_batches_are_named(script: Path, tmp_path: Path, fault: str) -> None:
    batches, message = BATCHES[fault]
    torch.save(batches, tmp_path / "batches.pt")
    done = train_here(script, "--batches", str(tmp_path / "batches.pt"))
    assert done.status == 7
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_batches_file_cannot_run_code(script: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save([Bomb()], tmp_path / "batches.pt")
    done = train_here(script, "--batches", str(tmp_path / "batches.pt"))
    assert done.status == 7 and "Traceback" not in done.stderr
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("linear1.bias"), "linear1.bias is missing"),
        (lambda state: state.update(extra=torch.zeros(1)), "extra is not in Written"),
        (lambda state: state.update({"norm.bias": torch.zeros(3)}), "norm.bias has shape [3], the model has [16]"),
        (lambda state: state.update({"norm.bias": torch.zeros(16).long()}), "norm.bias is torch.int64"),
    ],
)
def test_wrong_weights_are_named(script: Path, alone: Path, tmp_path: Path, change: object, message: str) -> None:
    state = load_file(alone / "model.safetensors")
    change(state)  # type: ignore[operator]
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    for file in ("w.safetensors", "w.pt"):
        done = train_here(script, "--weights", str(tmp_path / file))
        assert done.status == 7
        assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["embedding.weight", "decoder.weight"])
def test_either_name_of_a_tied_weight_is_enough(script: Path, alone: Path, tmp_path: Path, name: str) -> None:
    state = load_file(alone / "model.safetensors")
    del state[name]
    save_file(state, tmp_path / "w.safetensors")
    done = train_here(script, "--weights", str(tmp_path / "w.safetensors"), "--steps", "1")
    assert done.status == 0, done.stderr


def test_too_few_processes_name_what_fits(script: Path) -> None:
    done = train(script, "--steps", "1", processes=3)
    assert done.returncode != 0
    assert done.stderr.count("autopart:") == 1
    assert "4 (1f1b)" in done.stderr and "2 (zbv)" in done.stderr


def test_a_schedule_says_which_microbatches_it_needs(script: Path) -> None:
    done = train(script, "--steps", "1", "--microbatches", "2", processes=4)
    assert done.returncode != 0
    assert "schedule 1f1b" in done.stderr and "microbatches" in done.stderr
