"""The zoo's list is sound: every entry can be built, and its small variant runs forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopart.errors import UsageError
from autopart.model_spec import load, own_models
from autopart.zoo import Entry, entries, selected

# Minutes of work for nothing that others here do not show as well.
SLOW = {"nasnet-large", "vgg16", "deeplab-v3"}


def test_names_are_unique_and_the_core_is_there() -> None:
    names = [entry.name for entry in entries()]
    assert len(set(names)) == len(names) >= 30
    core = ["gpt2", "bert-base", "t5-small", "albert-base", "resnet50", "densenet121", "vit-b16", "swin-t", "unet"]
    assert sorted(entry.name for entry in entries() if entry.core) == sorted(core)


def test_every_model_of_ours_is_listed() -> None:
    assert {f"zoo:{name}" for name in own_models()} == {
        entry.spec.partition("?")[0] for entry in entries() if entry.spec.startswith("zoo:")
    }


def test_a_pattern_selects_and_a_wrong_one_says_what_there_is() -> None:
    assert [entry.name for entry in selected("bart")] == ["bart-large"]
    assert {entry.name for entry in selected("*-base")} == {"bert-base", "albert-base", "roberta-base"}
    assert len(selected("core")) == 9
    with pytest.raises(UsageError, match="gpt2"):
        selected("nothing-like-that")


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_full_size_is_built_without_memory_for_its_weights(entry: Entry) -> None:
    loaded = load(entry.spec)
    on_meta = all(p.device.type == "meta" for p in loaded.model.parameters())
    assert on_meta or "real weights" in loaded.notes[0]


@pytest.mark.parametrize("entry", [e for e in entries() if e.name not in SLOW], ids=lambda entry: entry.name)
def test_the_small_variant_trains(entry: Entry) -> None:
    loaded = load(entry.small, meta=False)
    result = loaded.model.train()(*loaded.args, **loaded.kwargs)
    loss = sum((value + 1).square().mean() for value in _floats(result))
    assert isinstance(loss, torch.Tensor) and loss.isfinite()
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in loaded.model.parameters())


def _floats(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _floats(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _floats(child)
