"""Keys of calls: the same in every process, different where calls are; inputs are what operators read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import EXAMPLES, traced
from hypothesis import given
from hypothesis import strategies as st

from autopart.profiler.analytic import Walk, signature_of
from autopart.profiler.isolated import Call, TensorSpec
from autopart.profiler.keys import contiguous_stride, digest, key_of, operator_of
from autopart.profiler.real_inputs import real_inputs

aten = torch.ops.aten
CPU = torch.device("cpu")


def spec(*shape: int, dtype: torch.dtype = torch.float32, **changed: Any) -> TensorSpec:
    plain = TensorSpec(shape, contiguous_stride(shape), dtype, requires_grad=False)
    return replace(plain, **changed)


def call(target: Any, /, *args: Any, grad: bool = True, autocast: Any = (), **kwargs: Any) -> Call:
    return Call(target, (args, kwargs), grad, autocast)


BASE = call(aten.addmm.default, spec(8), spec(4, 6, requires_grad=True), spec(6, 8), beta=1)
CHANGED = {
    "operator": replace(BASE, target=aten.baddbmm.default),
    "shape": call(aten.addmm.default, spec(8), spec(5, 6, requires_grad=True), spec(6, 8), beta=1),
    "strides": call(aten.addmm.default, spec(8), spec(4, 6, requires_grad=True), spec(6, 8, stride=(1, 6)), beta=1),
    "dtype": call(aten.addmm.default, spec(8), spec(4, 6, requires_grad=True), spec(6, 8, dtype=torch.half), beta=1),
    "gradient": call(aten.addmm.default, spec(8), spec(4, 6), spec(6, 8), beta=1),
    "weight": call(aten.addmm.default, spec(8), spec(4, 6, requires_grad=True, weight=True), spec(6, 8), beta=1),
    "a number": call(aten.addmm.default, spec(8), spec(4, 6, requires_grad=True), spec(6, 8), beta=2),
    "the kind of a number": call(aten.addmm.default, spec(8), spec(4, 6, requires_grad=True), spec(6, 8), beta=1.0),
    "another argument": call(aten.addmm.default, spec(8), spec(4, 6, requires_grad=True), spec(6, 8), alpha=1),
    "grad mode": replace(BASE, grad=False),
    "autocast": replace(BASE, autocast=(("cpu", torch.bfloat16),)),
    "its dtype": replace(BASE, autocast=(("cpu", torch.half),)),
}


def test_keys_differ_where_calls_do() -> None:
    keys = {name: key_of(changed) for name, changed in {"base": BASE, **CHANGED}.items()}
    assert len(set(keys.values())) == len(keys), keys


def test_a_key_is_readable() -> None:
    assert key_of(BASE) == "aten.addmm.default(float32[8], float32[4, 6]:g, float32[6, 8], beta=1) grad"
    assert key_of(CHANGED["strides"]).count("{1, 6}") == 1
    assert operator_of(key_of(BASE)) == "aten.addmm"


def test_arguments_by_name_have_no_order() -> None:
    first = call(aten.addmm.default, spec(8), spec(4, 6), spec(6, 8), beta=1, alpha=2)
    second = call(aten.addmm.default, spec(8), spec(4, 6), spec(6, 8), alpha=2, beta=1)
    assert key_of(first) == key_of(second)


def test_strides_that_no_kernel_sees_are_left_out() -> None:
    plain, odd = spec(4, 1, 6), spec(4, 1, 6, stride=(6, 17, 1))
    assert key_of(call(aten.relu.default, plain)) == key_of(call(aten.relu.default, odd))


def test_only_what_is_not_torch_depends_on_ranks() -> None:
    assert key_of(BASE, 1) == key_of(BASE, 2)
    own = call(contiguous_stride, spec(4))
    assert key_of(own, 1) != key_of(own, 2)


def test_keys_are_the_same_in_another_process() -> None:
    """Hashes of strings differ between processes; keys and their digests must not."""
    program = "import test_measured_keys as t; print(*(t.digest(t.key_of(c)) for c in [t.BASE, *t.CHANGED.values()]))"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment()).stdout.split()
    assert found == [digest(key_of(c)) for c in [BASE, *CHANGED.values()]]


def _environment() -> dict[str, str]:
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": f"{here}:{here.parents[1]}", "PYTHONHASHSEED": "7"}


@pytest.mark.parametrize("name", ["gpt2", "resnet", "swin"])
def test_calls_of_one_key_are_calls_that_the_walk_runs_once(name: str) -> None:
    walk = Walk(traced(name)[2], "cpu")
    walk.run()
    by_key: dict[str, set[Any]] = {}
    for made in walk.calls.values():
        by_key.setdefault(key_of(made), set()).add(signature_of(made, 1))
    assert all(len(signatures) == 1 for signatures in by_key.values())
    assert len(by_key) == len({signature_of(made, 1) for made in walk.calls.values()})


# ------------------------------------------------------------------------------------------------------ inputs


def every_call() -> Iterator[tuple[str, Call]]:
    for name in EXAMPLES:
        walk = Walk(traced(name)[2], "cpu")
        walk.run()
        for made in walk.calls.values():
            yield name, made


def test_inputs_are_what_specs_say_for_every_call_of_the_examples() -> None:
    seen = set()
    for name, made in every_call():
        if (key := key_of(made)) in seen:
            continue
        seen.add(key)
        inputs = real_inputs(made, CPU, 0)
        for tensor, wanted in zip(inputs.leaves, made.tensors, strict=True):
            where = f"{name}: {key}"
            assert tuple(tensor.shape) == wanted.shape and tensor.stride() == wanted.stride, where
            assert tensor.dtype == wanted.dtype and tensor.requires_grad == (wanted.requires_grad and made.grad), where
    assert len(seen) > 200


INDEXED = {
    "embedding": (call(aten.embedding.default, spec(5, 8), spec(64, dtype=torch.long)), 1, 5),
    "gather": (call(aten.gather.default, spec(9, 3), 1, spec(9, 64, dtype=torch.long)), 1, 3),
    "scatter": (call(aten.scatter_add.default, spec(9, 4), 1, spec(9, 64, dtype=torch.long), spec(9, 64)), 1, 4),
    "index_select": (call(aten.index_select.default, spec(9, 3), 0, spec(64, dtype=torch.long)), 1, 9),
    "index": (call(aten.index.Tensor, spec(9, 3), [None, spec(64, dtype=torch.long)]), 1, 3),
    "second of two": (
        call(aten.index.Tensor, spec(3, 9), [spec(64, dtype=torch.long), spec(64, dtype=torch.long)]),
        2,
        9,
    ),
    "behind a mask of two dimensions": (
        call(aten.index.Tensor, spec(4, 4, 7), [spec(4, 4, dtype=torch.bool), spec(1, dtype=torch.long)]),
        2,
        7,
    ),
    "classes": (call(aten.cross_entropy_loss.default, spec(64, 6), spec(64, dtype=torch.long)), 1, 6),
    "classes by name": (call(aten.cross_entropy_loss.default, spec(64, 6), target=spec(64, dtype=torch.long)), 1, 6),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_are_in_range_and_use_it(name: str) -> None:
    made, place, limit = INDEXED[name]
    indices = real_inputs(made, CPU, 0).leaves[place]
    assert int(indices.min()) >= 0 and int(indices.max()) < limit
    assert indices.numel() == 1 or len(indices.unique()) == limit


def test_groups_end_in_order_at_the_last_row() -> None:
    made = call(torch.ops.aten._grouped_mm.default, spec(64, 16), spec(4, 16, 8), spec(4, dtype=torch.int32))
    assert real_inputs(made, CPU, 0).leaves[2].tolist() == [16, 32, 48, 64]


def test_bags_begin_in_order_and_are_equal() -> None:
    whole = spec(12, dtype=torch.long), spec(4, dtype=torch.long)
    assert real_inputs(call(aten.embedding_bag.default, spec(9, 3), *whole), CPU, 0).leaves[2].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_what_is_factored_has_a_factor(dtype: torch.dtype) -> None:
    (matrices,) = real_inputs(call(aten.linalg_cholesky.default, spec(8, 40, 40, dtype=dtype)), CPU, 0).leaves
    assert torch.linalg.cholesky_ex(matrices.detach()).info.eq(0).all()


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_any_strides_are_made(shape: list[int], data: st.DataObject) -> None:
    """Of dimensions in any order, with gaps, or without extent of their own."""
    order = data.draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), 1
    for dim in order:
        if data.draw(st.integers(0, 3)):
            stride[dim] = step
            step = step * shape[dim] + data.draw(st.integers(0, 2))
    wanted = spec(*shape, stride=tuple(stride))
    tensor = real_inputs(call(aten.relu.default, wanted), CPU, 0).leaves[0]
    assert tuple(tensor.shape) == wanted.shape and tensor.stride() == wanted.stride and bool(tensor.isfinite().all())


@pytest.mark.parametrize("seed", range(20))
def test_a_mask_is_never_all_false(seed: int) -> None:
    made = call(aten.masked_fill.Scalar, spec(1), spec(1, dtype=torch.bool), 0.0)
    assert bool(real_inputs(made, CPU, seed).leaves[1].any())
