"""The rows of a batch are found, asked for, or refused; never guessed between two answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopart.errors import UsageError
from autopart.tracer import find_batch, trace


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, extra: Any = None, scale: float = 1.0) -> Any:
        h = self.l(x) * scale
        return h if extra is None else h + extra


class SequenceFirst(nn.Module):
    """x is (time, batch, width), lengths (batch,), mask (time, time)."""

    def __init__(self) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(12, 3)
        self.out = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pad = torch.arange(x.shape[0], device=x.device)[None, :] >= lengths[:, None]
        return self.out(self.att(x, x, x, attn_mask=mask, key_padding_mask=pad, need_weights=False)[0])


def sequence_first(device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device(device):
        model = SequenceFirst()
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return model, (torch.randn(5, 6, 12), torch.tensor([5, 4, 3, 5, 2, 1]), mask)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_of_a_sequence_first_model_are_found(device: str) -> None:
    model, args = sequence_first(device)
    graph = trace(model, args, microbatches=3)
    assert [i.batch_dim for i in graph.inputs] == [1, 0, None]
    assert [i.shape for i in graph.inputs] == [(5, 2, 12), (2,), (5, 5)]
    assert graph.outputs[0].batch_dim == 1 and graph.outputs[0].shape == (5, 2, 4)
    assert graph.microbatch_size == 2


def test_sequence_first_is_found_when_time_and_batch_have_one_length() -> None:
    model = SequenceFirst()
    args = (torch.randn(5, 5, 12), torch.tensor([5, 4, 3, 5, 2]), torch.ones(5, 5, dtype=torch.bool).triu(1))
    assert list(find_batch(model, args).dims.values()) == [1, 0, None]


def test_a_table_beside_the_batch_is_not_cut() -> None:
    batch = find_batch(Rows(), (torch.randn(4, 6), torch.randn(6)))
    assert batch.rows == 4 and list(batch.dims.values()) == [0, None]


def test_a_table_with_as_many_rows_as_the_batch_is_not_cut() -> None:
    class Table(nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x @ table

    batch = find_batch(Table(), (torch.randn(4, 4), torch.randn(4, 5)))
    assert list(batch.dims.values()) == [0, None]


def test_rows_that_mix_are_not_taken_for_a_batch() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.l(x) + x.cumsum(0)

    assert list(find_batch(Mixing(), (torch.randn(5, 7, 3),)).dims.values()) == [1]


def test_two_possible_answers_are_refused_with_how_to_say_it() -> None:
    class Either(nn.Module):
        def forward(self, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + table.sum()

    with pytest.raises(UsageError, match="batch_dims") as error:
        find_batch(Either(), (torch.randn(3), torch.randn(5, 7)))
    assert "x: 0" in str(error.value) and "x: 1" in str(error.value)
    given = find_batch(Either(), (torch.randn(3), torch.randn(5, 7)), batch_dims={"x": 1, "table": None})
    assert given.rows == 7 and list(given.dims.values()) == [None, 1]


def test_inputs_may_be_named_by_path_or_by_name() -> None:
    for name in ("x", "args[0]"):
        assert find_batch(Rows(), (torch.randn(4, 6),), batch_dims={name: 0}).rows == 4
    with pytest.raises(UsageError, match="the inputs are x"):
        find_batch(Rows(), (torch.randn(4, 6),), batch_dims={"y": 0})
    with pytest.raises(UsageError, match="dimension 3"):
        find_batch(Rows(), (torch.randn(4, 6),), batch_dims={"x": 3})


@pytest.mark.parametrize(
    ("rows", "global_batch", "microbatches", "size"), [(8, None, 4, 2), (8, 4, 2, 2), (3, 8, 2, 4)]
)
def test_rows_are_cut_or_repeated_to_the_microbatch(rows: int, global_batch: Any, microbatches: int, size: int) -> None:
    graph = trace(Rows(), (torch.randn(rows, 6),), microbatches=microbatches, global_batch=global_batch)
    assert graph.microbatch_size == size and graph.inputs[0].shape == (size, 6)


def test_a_batch_that_microbatches_do_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match="6 rows cannot be cut into 4") as error:
        trace(Rows(), (torch.randn(6, 6),), microbatches=4)
    assert "Use 2 or 3 microbatches" in str(error.value)


def test_numbers_and_none_are_not_cut() -> None:
    graph = trace(Rows(), (torch.randn(4, 6), None), {"scale": 0.5}, microbatches=2)
    assert [i.name for i in graph.inputs] == ["x"]


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((torch.randn(4, 6),), {"wrong": 1}, "unexpected keyword argument 'wrong'"),
        ((torch.randn(4, 7),), {}, "fails on the example inputs"),
        ((nn.Linear(2, 2),), {}, r"args\[0\] is a Linear"),
        ((torch.randn(4, 6),), {"extra": object()}, r"kwargs\['extra'\] is a object"),
    ],
)
def test_wrong_example_inputs_are_named(args: Any, kwargs: Any, words: str) -> None:
    for device in ("cpu", "meta"):
        model = Rows().to(device)
        call = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
        with pytest.raises(UsageError, match=words):
            trace(model, call, kwargs)


def test_inputs_without_values_that_are_given_back_are_no_values_to_compare() -> None:
    class Passes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x * 2

    graph = trace(Passes(), (torch.empty(4, 8, device="meta"),))
    assert [i.batch_dim for i in graph.inputs] == [0]
    assert [o.batch_dim for o in graph.outputs] == [0, 0, None]


def test_a_model_that_fails_in_another_dtype_is_told_about_the_dtype() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).half()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).half())

    with pytest.raises(UsageError, match=r"torch\.float64, as dtype asks") as error:
        trace(Halves(), (torch.ones(4, 4),), dtype=torch.float64, microbatches=2)
    assert error.value.exit_status == 2 and "fewer microbatches" not in str(error.value)


def test_outputs_that_are_drawn_at_random_have_rows_too() -> None:
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean = self.a(x)
            return mean + torch.randn_like(mean), mean * (torch.rand(len(x), 1) < 0.8)

    model = Sampled()
    state = torch.random.get_rng_state()
    batch = find_batch(model, (torch.ones(8, 4).cumsum(1),))
    assert batch.dims == {"args[0]": 0} and batch.outputs == (0, 0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_offsets_into_another_input_are_not_cut() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(10, 4)

        def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.bags(x, offsets)

    args = (torch.arange(12) % 10, torch.tensor([0, 3, 6, 9]))
    with pytest.raises(UsageError, match="no input has a batch dimension"):
        trace(Bags(), args, microbatches=2)
