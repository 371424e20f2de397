"""Keys: one line of text for each distinct call, by which its measurement is stored and found again.

    aten.addmm.default(float32[768]:gw, float32[128, 768]:g, float32[768, 768]{1, 768}:gw, beta=1) grad

The text names the operator, then each argument: a tensor by its dtype, shape, strides where they are not those of a
contiguous tensor, `g` where it requires grad and `w` where it is a weight; anything else as Python writes it. Behind
the arguments stand grad mode, autocast, and the number of ranks for what runs differently among them. It depends on
nothing but the call: not on the process, on the machine, or on the device, which belongs to whoever stores the text.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from autopart.profiler.isolated import Call, TensorSpec


def key_of(call: Call, ranks: int = 1) -> str:
    """The key of a call; two calls have one key where they run the same kernels on the same shapes.

    Args:
        ranks: How many hold the model together: part of the key of functions that are not operators of torch.
    """
    args, kwargs = call.arguments
    arguments = [*map(_text, args), *(f"{name}={_text(kwargs[name])}" for name in sorted(kwargs))]
    parts = [f"{_name(call.target)}({', '.join(arguments)})"]
    if call.grad:
        parts.append("grad")
    parts += [f"autocast({device}, {_text(dtype)})" for device, dtype in call.autocast]
    if not hasattr(call.target, "_schema"):
        parts.append(f"ranks={ranks}")
    return " ".join(parts)


def digest(key: str) -> str:
    """A name for a file that holds what belongs to `key`."""
    return hashlib.sha256(key.encode()).hexdigest()


def operator_of(key: str) -> str:
    """The operator that a key begins with, "aten.addmm" say, without its overload."""
    name = key.partition("(")[0]
    return name.rpartition(".")[0] if name.count(".") > 1 else name


def _name(target: Any) -> str:
    if hasattr(target, "_schema"):
        return str(target)
    return f"{target.__module__}:{target.__qualname__}"


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return _tensor(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(name)}: {_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({value.start}, {value.stop}, {value.step})"
    return repr(value)


def _tensor(spec: TensorSpec) -> str:
    text = f"{_text(spec.dtype)}{list(spec.shape)}"
    if (stride := _told_stride(spec)) is not None:
        text += "{" + ", ".join(map(str, stride)) + "}"
    flags = "g" * spec.requires_grad + "w" * spec.weight
    return f"{text}:{flags}" if flags else text


def _told_stride(spec: TensorSpec) -> tuple[int, ...] | None:
    """The strides, or None where they are those of a contiguous tensor; that of a dimension of one is never used."""
    if len(spec.stride) != len(spec.shape):
        return spec.stride
    plain = contiguous_stride(spec.shape)
    sizes = zip(spec.shape, spec.stride, plain, strict=True)
    used = tuple(own if size == 1 else given for size, given, own in sizes)
    return None if used == plain or 0 in spec.shape else used


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
