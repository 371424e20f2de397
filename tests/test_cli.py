"""The command line: results on stdout alone; whatever is wrong, an error with its exit status and no traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autopart import api
from autopart.cli import main, models

GPT = "zoo:gpt?vocabulary=64&context=16&width=32&heads=2&layers=4&batch=8&seq=8"
PARTITION = ["partition", GPT, "--gpus", "2xCPU", "--stages", "2", "--time-limit", "5"]

USER_FILE = """
import torch
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x

def branches():
    return Branches(), (torch.ones(8, 4),), {}

def model_alone():
    return nn.Linear(4, 4)

def two_nodes():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(8, 4),), {}

def speaks():
    print("hello from the model's own file")
    return two_nodes()

def exits():
    raise SystemExit(0)

class Reordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("order", torch.randperm(4), persistent=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))[:, self.order])

def reordered():
    return Reordered(), (torch.zeros(8, 4),), {}
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "models [bold].py"
    path.write_text(USER_FILE)
    return str(path)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "out"
    assert main([*PARTITION, "--out", str(folder)]) == 0
    return folder


def test_a_plan_is_printed_with_its_proof_its_stages_and_what_hand_splits_cost(capsys: pytest.CaptureFixture) -> None:
    assert main(PARTITION) == 0
    captured = capsys.readouterr()
    for words in ("2 stages", "lower bound", "gap", "balance", "uniform layers", "GiB", GPT):
        assert words in captured.out
    assert "Planning for 2xCPU" in captured.err and "Planning" not in captured.out


def test_json_is_one_document_with_the_names_of_the_contract(capsys: pytest.CaptureFixture, user_file: str) -> None:
    assert main(["partition", f"{user_file}:speaks", "--gpus", "1xCPU", "--json"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert "hello" in captured.err
    names = (
        "schema model mode strategy status step_time_s lower_bound_s gap stopped_by seconds per_stage balance baselines"
    )
    assert set(names.split()) | {"notes"} <= plan.keys()
    assert {"stages", "tensor", "replicas", "zero", "schedule", "microbatches", "microbatch_size"} <= plan[
        "strategy"
    ].keys()
    assert plan["model"] == f"{user_file}:speaks"


def test_underscores_and_hyphens_are_the_same_option(capsys: pytest.CaptureFixture) -> None:
    plans = []
    for option in ("--global_batch", "--global-batch"):
        assert main([*PARTITION, option, "4", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["strategy"] == plans[1]["strategy"]
    strategy = plans[0]["strategy"]
    assert strategy["microbatches"] * strategy["microbatch_size"] == 4


WRONG: dict[str, tuple[list[str], int, str]] = {
    "no such command": (["partitio"], 2, "partition"),
    "no such option": ([*PARTITION, "--gpu", "4"], 2, "--gpus"),
    "no gpus": (["partition", GPT], 2, "--gpus"),
    "wrong gpu spec": (["partition", GPT, "--gpus", "8x"], 2, "8x"),
    "no gpus at all": (["partition", GPT, "--gpus", "0"], 2, "at least 1"),
    "unknown device": (["partition", GPT, "--gpus", "8xH100-81G"], 2, "H100-80G"),
    "no cluster file": (["partition", GPT, "--gpus", "nowhere.yaml"], 7, "nowhere.yaml"),
    "unknown model": (["partition", "hf:gtp2", "--gpus", "2"], 2, "gpt2"),
    "no model file": (["partition", "nowhere.py:make", "--gpus", "2"], 7, "nowhere.py"),
    "missing example input": (["partition", "USER:model_alone", "--gpus", "2"], 2, "example_inputs"),
    "ends the process": (["partition", "USER:exits", "--gpus", "2"], 6, "SystemExit"),
    "cannot be traced": (["partition", "USER:branches", "--gpus", "2xCPU"], 6, "x.sum() > 0"),
    "more stages than nodes": (["partition", "USER:two_nodes", "--gpus", "8xCPU", "--stages", "8"], 6, "8 stages"),
    "microbatches do not divide": ([*PARTITION, "--microbatches", "3"], 2, "3"),
    "wrong number of stages": (["partition", GPT, "--gpus", "2", "--stages", "some"], 2, "--stages"),
    "unknown schedule": ([*PARTITION, "--schedule", "2f2b"], 2, "1f1b"),
    "unknown optimizer": ([*PARTITION, "--optimizer", "lion"], 2, "adamw"),
    "unknown dtype": ([*PARTITION, "--dtype", "float31"], 2, "float31"),
    "unknown mode": ([*PARTITION, "--mode", "sleeping"], 2, "inference"),
    "unknown granularity": ([*PARTITION, "--granularity", "layer"], 2, "block"),
    "no such zoo model": (["zoo", "run", "--gpus", "2", "--only", "nothing"], 2, "bert-base"),
    "no package": (["verify", "nowhere"], 7, "nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_a_clear_error_with_its_exit_status(
    case: str, capsys: pytest.CaptureFixture, user_file: str
) -> None:
    arguments, status, words = WRONG[case]
    assert main([a.replace("USER", user_file) for a in arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err and "error: " in captured.err
    assert "Traceback" not in captured.err and "fault of autopart" not in captured.err


def test_a_failure_under_json_is_one_document_too(capsys: pytest.CaptureFixture) -> None:
    assert main(["partition", GPT, "--gpus", "8xH100-81G", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "usage" and "H100-81G" in error["message"] and "V100" in error["hint"]


def test_what_does_not_fit_says_so(capsys: pytest.CaptureFixture) -> None:
    arguments = ["partition", "zoo:gpt?width=4096&heads=32&layers=8&batch=8", "--gpus", "2xT4", "--json"]
    assert main(arguments) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == "infeasible"
    assert "GiB" in captured.err


def test_a_package_is_verified_and_one_that_was_changed_fails(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["verify", str(package), "--processes", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True and report["processes"] == 1 and report["refused"] is None
    assert set(report["worst_relative_error"]) == {"output", "loss", "gradient", "buffer", "weight_after_steps"}
    changed = tmp_path / "changed"
    shutil.copytree(package, changed)
    written = [path for path in changed.glob("*.py") if "nn.GELU()" in path.read_text()]
    for path in written:
        path.write_text(path.read_text().replace("nn.GELU()", "nn.SiLU()"))
    assert written
    assert main(["verify", str(changed), "--processes", "1"]) == 5
    assert "NOT equal" in capsys.readouterr().out
    assert main(["verify", str(package), "--processes", "1", "--model", "zoo:gpt?layers=1&width=32&heads=2"]) == 2
    assert "another model" in capsys.readouterr().err


def test_buffers_that_only_real_models_have_reach_the_package(
    user_file: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["partition", f"{user_file}:reordered", "--gpus", "2xCPU", "--stages", "2", "--time-limit", "5"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "'order'" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out"), "--processes", "1"]) == 0, capsys.readouterr()
    monkeypatch.setattr(models, "MOST_REAL_WEIGHTS_BYTES", 0)
    capsys.readouterr()
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "'order'" in said and "cannot run" in said and "autopart.partition()" in said


def test_a_verification_that_is_ended_leaves_no_process(package: Path) -> None:
    arguments = [sys.executable, "-m", "autopart.cli", "verify", str(package)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 120
        while len(children) < 3 and time.monotonic() < deadline:  # the launcher and its two
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert len(children) >= 3 and process.returncode == 143, error
    assert not [child for child in children if child.is_running()]


def test_a_corrupt_plan_is_a_bad_file(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = (package / "plan.json").read_text()
    for corrupt in ("{", "[]", text[: len(text) // 2], text.replace('"microbatches"', '"microbitches"')):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        for file in package.iterdir():
            if file.is_file():
                (broken / file.name).write_bytes(file.read_bytes())
        (broken / "plan.json").write_text(corrupt)
        assert main(["verify", str(broken)]) == 7
        assert "plan.json" in capsys.readouterr().err


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main([*PARTITION, "--out", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    assert str(tmp_path) in capsys.readouterr().err


def test_a_fault_of_ours_says_so_and_shows_a_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("in the solver")

    monkeypatch.setattr(api, "partition", broken)
    assert main(PARTITION) == 1
    error = capsys.readouterr().err
    assert "fault of autopart" in error and "ZeroDivisionError" in error and "Traceback" not in error
    monkeypatch.setenv("AUTOPART_DEBUG", "1")
    assert main(PARTITION) == 1
    assert "Traceback" in capsys.readouterr().err


def test_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture) -> None:
    assert main(["partition", "hf:\x1b[31mred[bold]", "--gpus", "2"]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error and "[31mred[bold]" in error


def test_the_zoo_gives_a_row_for_each_model_and_a_reason_for_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from autopart import zoo

    listed = (
        zoo.Entry("small-gpt", GPT, GPT),
        zoo.Entry("missing", "hf:gtp2", "hf:gtp2"),
        zoo.Entry("small-moe", "zoo:moe?vocabulary=64&context=16&width=32&heads=2&layers=2&batch=4&seq=8", GPT),
    )
    monkeypatch.setattr(zoo, "entries", lambda: listed)
    file = tmp_path / "rows.json"
    assert main(["zoo", "run", "--gpus", "2xCPU", "--time-limit", "5", "--json", str(file)]) == 2
    out = capsys.readouterr().out
    assert re.search(r"^small-gpt +\d+", out, re.M) and re.search(r"^small-moe +\d+", out, re.M)
    assert re.search(r"^missing +2 +.*gtp2", out, re.M)
    rows = {row["name"]: row for row in json.loads(file.read_text())["models"]}
    assert rows["small-gpt"]["step_time_s"] >= rows["small-gpt"]["lower_bound_s"] > 0
    assert len(rows["small-gpt"]["memory_bytes"]) == rows["small-gpt"]["stages"]
    assert rows["missing"]["exit_status"] == 2 and "gtp2" in rows["missing"]["error"]


def test_the_zoo_and_the_devices_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert main(["zoo", "list", "--only", "core"]) == 0
    assert "hf:gpt2" in capsys.readouterr().out
    assert main(["devices", "--json"]) == 0
    devices = {device["name"]: device for device in json.loads(capsys.readouterr().out)["devices"]}
    assert devices["A100-80G"]["flops_per_s"]["bfloat16"] == 312e12
    assert main(["devices"]) == 0
    assert "A100-80G" in capsys.readouterr().out


def test_no_arguments_is_the_help(capsys: pytest.CaptureFixture) -> None:
    for arguments in ([], ["zoo"], ["partition"]):
        assert main(arguments) == 2
        assert "Usage: autopart" in capsys.readouterr().out
    assert main(["partition", "--help"]) == 0
    assert "--time-limit" in capsys.readouterr().out


def test_help_answers_without_loading_torch() -> None:
    show = "print(sorted({'torch', 'ortools'} & set(sys.modules)))"
    code = f"import sys; from autopart.cli import main; main(['--help']); {show}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_its_status(number: signal.Signals, status: int, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    model = tmp_path / "slow.py"
    model.write_text(f"import time, pathlib\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n")
    arguments = [sys.executable, "-m", "autopart.cli", "partition", f"{model}:make", "--gpus", "2"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == status
    assert "Traceback" not in error


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m autopart.cli zoo list | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""
