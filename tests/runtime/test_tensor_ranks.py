"""Stages on several tensor ranks compute, load and save exactly what the whole model does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import split_jobs
import torch
from pool import JobError, Pool
from safetensors.torch import load_file, save_file
from split_package import MICROBATCHES, Written, batch, whole_model, write
from written_package import train, train_here

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def packages(folder: Path) -> dict[tuple[int, int], Path]:
    """(stages, tensor degree) -> package."""
    return {(s, t): write(folder / f"{s}x{t}", s, t) for s in (2, 4) for t in (1, 2, 4)}


@pytest.fixture(scope="module")
def weights(folder: Path) -> Path:
    path = folder / "model.safetensors"
    state = whole_model().state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, path)
    return path


@pytest.fixture(scope="module")
def eager() -> dict[str, Any]:
    """Losses, gradients, buffers and outputs of the whole model, microbatch by microbatch."""
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), split_jobs.LEARNING_RATE)
    steps = []
    for number in range(STEPS):
        optimizer.zero_grad()
        results = [model(*rows) for rows in microbatches(number)]
        loss = torch.stack([r["loss"] for r in results]).mean()
        loss.backward()
        tensors = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
        tensors |= {n: b.clone() for n, b in model.named_buffers()}
        steps.append({"loss": loss.item(), "tensors": tensors, "logits": [r["logits"].detach() for r in results]})
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return {"steps": steps, "evaluated": torch.cat([model(*rows)["logits"] for rows in microbatches(0)])}


def microbatches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    whole = batch(number)
    return list(zip(whole["ids"].chunk(MICROBATCHES), whole["labels"].chunk(MICROBATCHES), strict=True))


def own(whole: torch.Tensor, dim: int, parts: tuple[int, ...], rank: int, ranks: int) -> torch.Tensor:
    """The elements of one rank, found index by index; zeros where a part is padded."""
    indices, first = [], 0
    for part in parts:
        padded = [*range(first, first + part), *[-1] * (-part % ranks)]
        indices += padded[len(padded) // ranks * rank : len(padded) // ranks * (rank + 1)]
        first += part
    found = [whole.select(dim, i) if i >= 0 else torch.zeros_like(whole.select(dim, 0)) for i in indices]
    return torch.stack(found, dim)


CUT: dict[str, tuple[int, tuple[int, ...]]] = {
    "table.weight": (0, (33,)),
    "up.weight": (0, (12,)),
    "up.bias": (0, (12,)),
    "channels.weight": (0, (12,)),
    "channels.bias": (0, (12,)),
    "channels.running_mean": (0, (12,)),
    "channels.running_var": (0, (12,)),
    "down.weight": (1, (12,)),
    "fused.weight": (0, (5, 3)),
    "one.weight": (1, (5,)),
    "other.weight": (1, (3,)),
}


@pytest.mark.parametrize(
    ("stages", "tensor", "schedule", "processes"),
    [
        (2, 2, "1f1b", 2),
        (2, 4, "1f1b", 4),
        (2, 2, "1f1b", 4),
        (2, 2, "gpipe", 4),
        (4, 2, "interleaved1f1b", 4),
        (4, 2, "loopedbfs", 4),
        (4, 2, "interleavedzerobubble", 4),
        (4, 2, "zbv", 4),
        (4, 2, "dualpipev", 4),
        (4, 2, "1f1b", 8),
    ],
)
def test_training_equals_the_whole_model(
    pool: Pool,
    packages: dict[tuple[int, int], Path],
    weights: Path,
    eager: dict[str, Any],
    stages: int,
    tensor: int,
    schedule: str,
    processes: int,
) -> None:
    folder, batches = str(packages[stages, tensor]), [batch(n) for n in range(STEPS)]
    results = pool.run(processes, split_jobs.train, folder, schedule, str(weights), batches)
    assert [r["rank"] for r in results] == [*range(tensor)] * (processes // tensor)
    seen: dict[str, int] = {}
    for result in results:
        rank = result["rank"]
        for step, expected in zip(result["steps"], eager["steps"], strict=True):
            for (_, name), found in step["tensors"].items():
                whole = expected["tensors"][name]
                close(found, own(whole, *CUT[name], rank, tensor) if name in CUT else whole)
                seen[name] = seen.get(name, 0) + 1
            if step["loss"] is not None:
                assert step["loss"] == pytest.approx(expected["loss"], rel=1e-11)
                for found, whole in zip(step["logits"], expected["logits"], strict=True):
                    close(found, own(whole, 2, (33,), rank, tensor))
        if result["evaluated"] is not None:
            close(result["evaluated"], eager["evaluated"])
    state = {name for name in whole_model().state_dict() if name != "head.weight"}
    assert seen == {name: STEPS * tensor * (2 if name == "table.weight" else 1) for name in state}
    assert sum(r["evaluated"] is not None for r in results) == tensor


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("stages", "tensor", "processes"), [(2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 2, 4)])
def test_what_is_loaded_and_saved_untrained_is_the_same_file(
    pool: Pool,
    packages: dict[tuple[int, int], Path],
    weights: Path,
    tmp_path: Path,
    stages: int,
    tensor: int,
    processes: int,
) -> None:
    torch.save(load_file(weights), tmp_path / "w.pt")
    for source in (weights, tmp_path / "w.pt"):
        saved = tmp_path / source.suffix
        arguments = ["--weights", str(source), "--steps", "0", "--save", str(saved)]
        printed = pool.run(processes, split_jobs.command, str(packages[stages, tensor]), arguments)
        assert "wrote" in printed[0] and not any(printed[1:])
        assert_same_state(load_file(saved / "model.safetensors"), load_file(weights))


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name


def test_the_initial_model_does_not_depend_on_the_number_of_ranks(
    pool: Pool, packages: dict[tuple[int, int], Path], tmp_path: Path
) -> None:
    for tensor, processes in ((1, 2), (2, 2), (2, 4), (4, 4)):
        arguments = ["--steps", "0", "--save", str(tmp_path / f"{tensor} {processes}")]
        pool.run(processes, split_jobs.command, str(packages[2, tensor]), arguments)
    first, *others = (load_file(path / "model.safetensors") for path in sorted(tmp_path.iterdir()))
    assert Written().state_dict().keys() == first.keys()
    for other in others:
        assert_same_state(other, first)


def test_the_loss_is_told_once_and_does_not_depend_on_the_number_of_ranks(
    pool: Pool, packages: dict[tuple[int, int], Path]
) -> None:
    told = []
    for stages, tensor, processes in ((2, 1, 2), (2, 2, 4), (4, 2, 4), (2, 4, 4)):
        printed = pool.run(processes, split_jobs.command, str(packages[stages, tensor]), ["--optimizer", "sgd"])
        assert not any(printed[1:])
        told.append(re.findall(r"loss (\S+)", printed[0]))
        shape = f"{stages} stages x {tensor} tensor ranks on {processes} processes"
        assert tensor == 1 or shape in printed[0]
    assert len(told[0]) == 3 and all(losses == told[0] for losses in told)


def test_a_weight_of_another_size_is_refused_with_whole_shapes(
    pool: Pool, packages: dict[tuple[int, int], Path], weights: Path, tmp_path: Path
) -> None:
    state = load_file(weights)
    state["up.bias"] = state["up.bias"][:6].clone()
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(JobError, match=r"up.bias has shape \[6\], the model has \[12\]"):
        pool.run(2, split_jobs.command, str(packages[2, 2]), ["--weights", str(tmp_path / "w.safetensors")])


def test_one_process_is_told_how_many_are_needed(packages: dict[tuple[int, int], Path]) -> None:
    done = train_here(packages[2, 2] / "train.py")
    assert done.status == 2
    assert (
        "this package needs 4 processes (2 stages x 2 tensor ranks) under schedule 1f1b, not 1 process" in done.stderr
    )
    assert "2 (all stages in each)" in done.stderr


def test_three_processes_are_told_what_fits(pool: Pool, packages: dict[tuple[int, int], Path]) -> None:
    with pytest.raises(JobError) as caught:
        pool.run(3, split_jobs.command, str(packages[4, 2]), [])
    assert "this package needs 4 processes (4 stages x 2 tensor ranks) under schedule zbv, not 3" in str(caught.value)
    assert "8 (1f1b)" in str(caught.value)


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("raise ValueError('cold coffee')", r"failed in step 0: ValueError: cold coffee"),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", r"died \(process id \d+\)"),
        ("import signal; os.kill(os.getpid(), signal.SIGSTOP)", None),
    ],
)
def test_a_process_that_fails_is_named_with_stage_and_tensor_rank(
    tmp_path: Path, trouble: str, told: str | None
) -> None:
    script = write(tmp_path / "failing", 2, 2) / "train.py"
    table = script.with_name("pipeline.py")
    before = "        first, second = self.pieces\n"
    assert before in table.read_text()
    inserted = f"        import os\n        if os.environ['RANK'] == '3':\n            {trouble}\n"
    table.write_text(table.read_text().replace(before, inserted + before))
    done = train(script, "--steps", "2", "--timeout-s", "30", processes=4)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("autopart:")]
    assert len(lines) == 1
    if told is None:
        assert "gave up in step 0 after 30 s waiting for stage" in lines[0]
    else:
        assert re.fullmatch(rf"autopart: process 3 \(stage 1, tensor rank 1\) {told}", lines[0])
