"""Measuring: every operator of real models runs, parts are what they should be, and plans use what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import EXAMPLES, traced
from test_measured_keys import call, spec
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopart
from autopart.cluster import Cluster
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.profiler import known_of, measure, operators, profile_rows
from autopart.profiler import profile as costs_of
from autopart.profiler.clocks import CpuClock, Run
from autopart.profiler.keys import key_of
from autopart.profiler.measure import Meter, known, spread
from autopart.profiler.measurement import Measurement
from autopart.profiler.operators import profile
from autopart.profiler.profile_file import Entry, Profile
from autopart.tracer import trace

aten = torch.ops.aten
CPU = Cluster.parse("CPU")


class CountingClock:
    """A clock on which a run takes as many seconds as kernels of these operators, and every run is really made."""

    weights: dict[str, float] = {"aten::mm": 1.0, "aten::addmm": 1.0, "aten::relu": 0.25, "aten::relu_": 0.25}  # noqa: RUF012

    def samples(self, runs: Sequence[Run], overhead_s: float) -> list[float]:
        return [self._one(run) for run in runs]

    def _one(self, run: Run) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            run()
        return sum(self.weights.get(event.name, 0.0) for event in seen.events())


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Meter:
    monkeypatch.setattr(measure, "clock_for", lambda device: CountingClock())
    monkeypatch.setattr(measure, "MOST_COPIES", 2)
    return Meter(torch.device("cpu"), budget_s=0.0)


# ------------------------------------------------------------------------------------------------- one call


@pytest.mark.parametrize(
    ("weight", "activation", "parts"),
    [
        (True, True, (1.0, 1.0, 1.0)),
        (True, False, (1.0, 0.0, 1.0)),
        (False, True, (1.0, 1.0, 0.0)),
        (False, False, (1.0, 0.0, 0.0)),
    ],
)
def test_gradients_of_inputs_and_of_weights_are_apart(
    counting: Meter, weight: bool, activation: bool, parts: tuple[float, ...]
) -> None:
    """A product makes one product for each gradient that is asked for."""
    left = spec(4, 6, requires_grad=activation)
    right = spec(6, 8, requires_grad=weight, weight=True)
    found = counting.measure(call(aten.mm.default, left, right))
    assert (found.forward_s, found.backward_input_s, found.backward_weight_s) == parts


def test_without_gradients_nothing_runs_backward(counting: Meter) -> None:
    found = counting.measure(call(aten.mm.default, spec(4, 6, requires_grad=True), spec(6, 8), grad=False))
    assert (found.forward_s, found.backward_input_s, found.backward_weight_s) == (1.0, 0.0, 0.0)


def test_autocast_is_entered() -> None:
    """In half precision under autocast, so a table of the dtypes that ran tells."""
    seen: list[torch.dtype] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.mm(x, x).dtype)
        return x

    Meter(torch.device("cpu"), 0.0).measure(call(note, spec(4, 4), autocast=(("cpu", torch.bfloat16),)))
    assert set(seen) == {torch.bfloat16}


def test_operators_that_write_get_fresh_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`x *= 2` on one tensor over and over would overflow; on fresh ones it never moves from twice the first."""
    seen: list[torch.Tensor] = []

    class Clock(CpuClock):
        def samples(self, runs: Sequence[Run], overhead_s: float) -> list[float]:
            results = [run() for run in runs]
            seen.extend(result.detach() for result in results if isinstance(result, torch.Tensor))
            return [1.0] * len(runs)

    monkeypatch.setattr(measure, "clock_for", lambda device: Clock())
    monkeypatch.setattr(measure, "MOST_COPIES", 1)
    target = aten.mul_.Scalar
    for tracked in (False, True):
        seen.clear()
        Meter(torch.device("cpu"), 0.0).measure(call(target, spec(8, requires_grad=tracked), 2.0))
        assert len(seen) >= measure.FEWEST
        assert all(torch.equal(one, seen[0]) for one in seen)


def test_a_call_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    Meter(torch.device("cpu"), 0.0).measure(call(aten.dropout.default, spec(64, requires_grad=True), 0.5, True))
    assert torch.equal(torch.get_rng_state(), before)


def test_repeats_end_when_the_median_is_known() -> None:
    assert known([1.0] * 5) and spread([1.0] * 5) == 0.0
    assert not known([1.0, 2.0, 3.0, 4.0, 5.0])
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.0)
    assert known([1.0, 1.1] * 200) and not known([1.0, 1.1] * 20)


# ------------------------------------------------------------------------------------------------ real models


def moe() -> Graph:
    """Experts of transformers, whose grouped product takes ends of groups."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
    )
    tokens = torch.randint(64, (2, 8))
    model = transformers.MixtralForCausalLM(config).train()
    return trace(model, (), {"input_ids": tokens, "labels": tokens, "use_cache": False}, check=False)


def lstm() -> Graph:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layers, self.head = (
                nn.Embedding(20, 8),
                nn.LSTM(8, 8, 2, batch_first=True),
                nn.Linear(8, 4),
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.layers(self.words(tokens))
            return self.head(hidden)

    return trace(Recurrent(), (torch.randint(20, (4, 6)),), check=False)


@pytest.mark.parametrize("name", [*EXAMPLES, "moe", "lstm"])
def test_every_operator_of_a_model_can_be_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, without an error; and all of them are found when the graph is priced."""
    monkeypatch.setattr(measure, "MOST_COPIES", 1)
    graph = {"moe": moe, "lstm": lstm}[name]() if name not in EXAMPLES else traced(name)[2]
    found = profile(graph, "cpu", cache=False, budget_s=0.0)
    assert not found.notes
    assert all(entry.time.repeats >= measure.FEWEST for entry in found.entries.values())
    assert sum(entry.count for entry in found.entries.values()) >= len(graph.primary.calls)
    costs = costs_of(graph, CPU, known=known_of(found, CPU))
    assert costs.source == "measured"
    assert not any("were not measured" in note for note in costs.notes)


# ------------------------------------------------------------------------------------------- plans from profiles


def perceptron() -> Graph:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU())
    return trace(model, (torch.randn(6, 8),), check=False)


def made_up(graph: Graph, device: str = "CPU") -> Profile:
    """A profile in which the n-th call takes n, 100 n and 10,000 n seconds."""
    plain = profile(graph, device, how="analytic")
    entries = {
        key: replace(entry, time=Measurement(float(n), 1e2 * n, 1e4 * n, 0.0, 5))
        for n, (key, entry) in enumerate(sorted(plain.entries.items()), start=1)
    }
    return replace(plain, source="measured", entries=entries)


def test_a_plan_takes_measured_seconds_exactly_where_there_are_any() -> None:
    graph = perceptron()
    whole, plain = made_up(graph), costs_of(graph, CPU)
    walk = operators.Walk(graph, "cpu")
    walk.run()
    dropped = next(key for key in whole.entries if "relu" in key)
    known_entries = {key: entry for key, entry in whole.entries.items() if key != dropped}
    costs = costs_of(graph, CPU, known=known_of(replace(whole, entries=known_entries), CPU))
    checked = 0
    for name, made in walk.calls.items():
        time, entry = costs.times["CPU"][name], whole.entries[key_of(made)]
        if key_of(made) == dropped:
            # What is left out is corrected as the other relu's kernel is.
            other = next(n for n, made in walk.calls.items() if "relu" in key_of(made) and key_of(made) != dropped)
            ratio = costs.times["CPU"][other].forward_s / plain.times["CPU"][other].forward_s
            assert time.forward_s == pytest.approx(ratio * plain.times["CPU"][name].forward_s)
        else:
            assert time.forward_s == entry.time.forward_s
            checked += 1
        sums = [key_of(operators.addition_call(one)) for one in walk.weight_sums.get(name, ())]
        added = sum(whole.entries[key].time.seconds for key in sums)
        if key_of(made) != dropped:
            assert time.backward_weight_s == pytest.approx(entry.time.backward_weight_s + added)
    assert checked >= 2
    assert costs.source == "measured"
    assert any("were not measured" in note for note in costs.notes)
    assert costs.memory == plain.memory and costs.saved == plain.saved


def test_costs_that_are_mostly_unmeasured_are_corrected_formulas() -> None:
    measured = made_up(perceptron())
    wider = trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), (torch.randn(3, 8),), check=False)
    costs = costs_of(wider, CPU, known=known_of(measured, CPU))
    assert costs.source == "corrected"
    (note,) = (note for note in costs.notes if "were not measured" in note)
    assert "100.0% of the predicted time" in note and "formulas, corrected by the profile" in note


def test_a_profile_of_another_device_is_refused() -> None:
    with pytest.raises(UsageError, match="the profile is of H100-80G, and the plan is for CPU"):
        known_of(made_up(perceptron(), "H100-80G"), CPU)


def test_of_two_devices_the_measured_one_is_measured() -> None:
    graph = perceptron()
    both = Cluster.parse(["H100-80G", "A100-80G"])
    plain, costs = costs_of(graph, both), costs_of(graph, both, known=known_of(made_up(graph, "H100-80G"), both))
    assert costs.times["A100-80G"] == plain.times["A100-80G"]
    assert costs.times["H100-80G"] != plain.times["H100-80G"]
    assert any("A100-80G was not measured" in note for note in costs.notes)


def test_for_more_rows_measured_seconds_grow_as_the_formula_does() -> None:
    graph = perceptron()
    measured = known_of(made_up(graph), CPU)
    (plain,), (found,) = ([*profile_rows(graph, CPU, [4.0], known=k)] for k in (None, measured))
    once, once_measured = costs_of(graph, CPU), costs_of(graph, CPU, known=measured)
    name = next(node.name for node in graph.primary.calls if "relu" in node.name)
    ratios = [
        grown.times["CPU"][name].forward_s / single.times["CPU"][name].forward_s
        for grown, single in ((plain, once), (found, once_measured))
    ]
    assert ratios[0] == pytest.approx(ratios[1])


def test_an_operator_that_fails_keeps_its_formula_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = perceptron()
    true = Meter.measure

    def failing(self: Meter, made: Any, ranks: int = 1) -> Measurement:
        if made.target is aten.relu.default:
            raise RuntimeError("no kernel image")
        return true(self, made, ranks)

    monkeypatch.setattr(Meter, "measure", failing)
    found = profile(graph, "cpu", cache=False, budget_s=0.0)
    assert all("no kernel image" in note for note in found.notes) and found.notes
    assert not any("relu" in key for key in found.entries)


# ---------------------------------------------------------------------------------------------------- devices


def test_a_gpu_that_is_not_here_is_priced_and_never_measured() -> None:
    graph = perceptron()
    assert autopart.profile(graph, "A100-80G").source == "analytic"
    with pytest.raises(UsageError, match="cannot be measured here"):
        profile(graph, "B200", how="measured")
    with pytest.raises(UsageError, match="Unknown device"):
        profile(graph, "B2000")
    with pytest.raises(UsageError, match="how must be"):
        profile(graph, "cpu", how="guessed")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="no GPU") as error:
        profile(perceptron(), "cuda")
    assert error.value.hint is not None and "H100-80G" in error.value.hint


def test_formula_and_plan_agree() -> None:
    """A profile by formula that is given to a plan changes nothing."""
    graph = perceptron()
    by_formula = profile(graph, "cpu", how="analytic")
    plain, again = costs_of(graph, CPU), costs_of(graph, CPU, known=known_of(by_formula, CPU))
    for name, time in plain.times["CPU"].items():
        assert again.times["CPU"][name].forward_s == pytest.approx(time.forward_s)
        assert again.times["CPU"][name].backward_s == pytest.approx(time.backward_s)
    assert again.source == "analytic"


def test_what_is_computed_again_runs_forward_twice_and_backward_once() -> None:
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = block, nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.block, x, use_reentrant=False))

    graph = trace(Checkpointed(), (torch.randn(6, 8),), check=False)
    found = profile(graph, "cpu", how="analytic")
    times = costs_of(graph, CPU).times["CPU"].values()
    whole = sum(time.forward_s + time.backward_s for time in times)
    assert sum(entry.seconds for entry in found.entries.values()) == pytest.approx(whole)
    (gelu,) = (entry for key, entry in found.entries.items() if "gelu" in key and key.endswith(" grad"))
    (alone,) = (entry for key, entry in found.entries.items() if "gelu" in key and not key.endswith(" grad"))
    assert (gelu.count, alone.count) == (1, 1) and gelu.time.backward_input_s > 0
    assert alone.time.backward_input_s == alone.time.backward_weight_s == 0


def test_the_table_has_a_row_for_each_kind_of_operator() -> None:
    found = made_up(perceptron())
    lines = str(found).splitlines()
    row = next(line.split() for line in lines if line.startswith("aten.relu "))
    entries: list[Entry] = [entry for key, entry in found.entries.items() if key.startswith("aten.relu.")]
    assert row[1:3] == [str(sum(entry.count for entry in entries)), str(len(entries))]
    assert float(row[3]) == pytest.approx(1e3 * sum(e.count * e.time.forward_s for e in entries), rel=1e-3)


def test_adding_gradients_up_is_work_of_backward() -> None:
    graph = perceptron()
    walk = operators.Walk(graph, "cpu")
    walk.run()
    sums = [key_of(operators.addition_call(one)) for found in walk.weight_sums.values() for one in found]
    found = profile(graph, "cpu", cache=False, budget_s=0.0)
    assert sums
    for key in sums:
        time = found.entries[key].time
        assert time.forward_s == time.backward_input_s == 0.0 and time.backward_weight_s == time.seconds > 0
    row = next(line.split() for line in str(found).splitlines() if line.startswith("aten.add_ "))
    assert int(row[1]) == len(sums) and float(row[3]) == 0.0 and float(row[4]) > 0
    assert f"and {len(sums)} that add up gradients" in str(found)
    assert "one microbatch of" in str(found).splitlines()[0]


def test_what_was_measured_says_how_far_it_is_known() -> None:
    found = Meter(torch.device("cpu"), 0.0).measure(call(aten.relu.default, spec(64, requires_grad=True)))
    assert found.error is not None and found.error >= found.spread / max(found.repeats, measure.MOST) ** 0.5
    assert found.known == (found.error <= 0.01)
