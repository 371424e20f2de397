"""Run a model without leaving a mark: attributes, buffers and random states are put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Of each module: attribute -> (value, shallow copy of its contents where it is a container).
Attributes = dict[nn.Module, dict[str, tuple[Any, Any]]]


@contextmanager
def unmarked(model: nn.Module, values: bool = False) -> Iterator[None]:
    """Restore the attributes of every module and all random states afterwards; with `values`, what buffers hold too."""
    attributes = {module: _attributes(module) for module in model.modules()}
    held = []
    if values:
        held = [(b, b.detach().clone()) for b in plain_tensors(model) if b.device.type != "meta"]
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
        for module, before in attributes.items():
            _restore(module, before)
        with torch.no_grad():
            for tensor, value in held:
                if tensor.shape != value.shape or not torch.equal(tensor, value):
                    tensor.copy_(value)


def plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Buffers, and tensors kept as ordinary attributes: what forward may change besides parameters."""
    found = {id(b): b for b in model.buffers()}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                found[id(value)] = value
    return list(found.values())


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute with a shallow copy of its contents where it is a container."""
    return {name: (value, _contents(value)) for name, value in vars(module).items()}


def _contents(value: Any) -> Any:
    if type(value) in (list, set) or isinstance(value, dict):
        return value.copy()
    return None


def _restore(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    now = vars(module)
    for name in [n for n in now if n not in before]:
        del now[name]
    for name, (value, contents) in before.items():
        now[name] = value
        if contents is not None and not _same_contents(value, contents):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents)


def _same_contents(value: Any, contents: Any) -> bool:
    """Same elements by identity, so that no element's own comparison runs."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(k in value and value[k] is v for k, v in contents.items())
    if isinstance(value, list):
        return all(a is b for a, b in zip(value, contents, strict=True))
    return {id(v) for v in value} == {id(v) for v in contents}


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    return {module: _attributes(module) for module in modules}


def changed_attributes(before: Attributes) -> list[tuple[nn.Module, str]]:
    """(module, attribute) for every ordinary attribute that differs from what `attributes_of` found earlier."""
    found = []
    for module, old in before.items():
        now = vars(module)
        for name in {**old, **now}:
            if name in REGISTRIES or name in HOOK_TABLES or _is_torchs_own(module, name):
                continue
            value, contents = old.get(name, (None, None))
            if name not in old or name not in now:
                found.append((module, name))
            elif now[name] is not value:
                if not _equal_plain(now[name], value):
                    found.append((module, name))
            elif contents is not None and not _same_contents(value, contents):
                found.append((module, name))
    return found


def _is_torchs_own(module: nn.Module, name: str) -> bool:
    """Attributes by which torch's own modules keep house, such as the list of an LSTM's weights."""
    return type(module).__module__.startswith("torch.") or (
        isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")
    )


def _equal_plain(one: Any, other: Any) -> bool:
    return type(one) is type(other) and type(one) in (bool, int, float, str, type(None)) and one == other


def random_states() -> dict[str, Any]:
    """States of torch's, Python's and numpy's generators."""
    states: dict[str, Any] = {"torch": torch.random.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    torch.random.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


def same_random_state(one: Any, other: Any) -> bool:
    """Equality of one generator's states; numpy's is a tuple that holds an array, all of which counts."""
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(same_random_state(a, b) for a, b in zip(one, other, strict=True))
    return bool((one == other).all()) if hasattr(one, "shape") else bool(one == other)
