"""verify() of a package on several tensor ranks: all that they hold is compared, and a fault in any of it is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import in_pool
from pool import Pool
from split_package import MICROBATCHES, Written, whole_model, write

from autopart.errors import UsageError
from autopart.verification import verify

STEPS = 2


@pytest.fixture(scope="module")
def model() -> Written:
    return whole_model()


@pytest.mark.parametrize(
    ("stages", "tensor", "schedule", "processes"), [(2, 2, "1f1b", 4), (4, 2, "zbv", 4), (2, 4, "1f1b", 4)]
)
def test_a_package_equals_its_model(
    pool: Pool, model: Written, tmp_path: Path, stages: int, tensor: int, schedule: str, processes: int
) -> None:
    folder = write(tmp_path / "package", stages, tensor)
    report = verify(folder, model, schedule=schedule, processes=processes, steps=STEPS, launch=in_pool(pool))
    assert report.passed, str(report)
    assert report.processes == processes and report.tensor == tensor
    assert max(error for error in report.worst_relative_error.values() if error is not None) < 1e-9
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert report.parameters == len(names)
    # The table is in two stages; four weights are whole, each on every rank.
    gradients = len(names) - 4 + 4 * tensor
    assert report.compared["gradient"] == STEPS * gradients and report.compared["weight_after_steps"] == gradients
    assert report.compared["buffer"] == STEPS * (2 + tensor)
    assert report.compared["loss"] == STEPS * MICROBATCHES * tensor
    assert report.compared["output"] == STEPS * MICROBATCHES * (1 + tensor) + 2 * tensor
    assert report.notes == ("inputs were random",)


FAULTS = {
    "a partial sum is not reduced": ("all_reduce(self.down(hidden))", "self.down(hidden)"),
    "a gradient is not reduced": ("copy_to(y)", "y"),
    "shards in another order": ("Shard(0, (HIDDEN,))", "Shard(0, (HIDDEN // 2, HIDDEN // 2))"),
    "padding is not zero": ("torch.tanh(one)", "torch.cos(one)"),
    "ties are not summed": ("ties=(Tie", "ties=() and (Tie"),
    "logits are not whole": (", shard=Shard(2, (WORDS,))", ""),
    "one rank computes otherwise": (
        "self.whole(self.norm(y))",
        "self.whole(self.norm(y)) * (1 + 1e-6 * __import__('runtime.collectives').collectives.group().rank)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(pool: Pool, model: Written, tmp_path: Path, fault: str) -> None:
    folder = write(tmp_path / "package", 2, 2)
    table = folder / "pipeline.py"
    right, wrong = FAULTS[fault]
    assert right in table.read_text()
    table.write_text(table.read_text().replace(right, wrong))
    report = verify(folder, model, steps=STEPS, launch=in_pool(pool))
    assert not report.passed, f"{fault} passed:\n{report}"
    assert (fault == "padding is not zero") == any("is not zero where it is padded" in f for f in report.failures)


@pytest.mark.parametrize("processes", [1, 3])
def test_processes_that_do_not_make_whole_places_are_refused(model: Written, tmp_path: Path, processes: int) -> None:
    folder = write(tmp_path / "package", 2, 2)
    with pytest.raises(UsageError, match="split over 2 tensor ranks, and each needs a process of its own"):
        verify(folder, model, processes=processes)
