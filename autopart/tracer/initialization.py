"""How to draw the initial value of every parameter and buffer, so that a package can start without the weights.

`Graph.initialization` maps a state key to one of these tuples, all of them JSON:

    ("constant", value)
    ("normal", mean, standard deviation)
    ("uniform", low, high)
    ("data",)              the values themselves are needed, and stand in `StateEntry.tensor`
    ("data", [values])     the same for a model on `meta`: its own values, row by row
    ("unknown",)           a buffer on `meta` whose values only the original model's constructor knows

Real tensors are fitted. For a model on `meta` the modules' own initialisation (`reset_parameters`, transformers'
`_init_weights`, timm's `init_weights`) runs again under a recorder: on `meta` it costs nothing and changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopart.graph import StateEntry
from autopart.torch_private import TorchDispatchMode
from autopart.tracer.state import Identity, identity

Rule = tuple[Any, ...]

# Elements that are looked at to tell distributions apart.
SAMPLE = 100_000
# Fourth standardised moment: 1.8 for a uniform distribution, 3 for a normal one.
KURTOSIS_BETWEEN = 2.4
# Tensors up to this size travel as values in the plan when their model is on meta.
MOST_VALUES = 1 << 20
# Where nothing is known: the usual scale of transformers.
FALLBACK_STD = 0.02


def initialization_rules(model: nn.Module, state: Mapping[str, StateEntry]) -> tuple[dict[str, Rule], list[str]]:
    """A rule for every state entry, and notes on what could not be found out."""
    notes: list[str] = []
    on_meta = {key: e for key, e in state.items() if e.tensor.device.type == "meta"}
    recorded = record(model) if on_meta else {}
    rules: dict[str, Rule] = {}
    guessed = []
    for key, entry in state.items():
        if key not in on_meta:
            rules[key] = fitted(entry)
        elif (found := recorded.get(identity(entry.tensor))) is not None:
            rules[key] = found
        elif entry.kind == "parameter":
            rules[key] = ("constant", 0.0) if entry.tensor.dim() < 2 else ("normal", 0.0, FALLBACK_STD)
            guessed.append(entry.name)
        else:
            rules[key] = ("unknown",)
            notes.append(
                f"the values of the buffer {entry.name!r} are not known on meta: train the package from weights, "
                "or trace a model with real weights"
            )
    if guessed:
        some = ", ".join(repr(n) for n in guessed[:3]) + (", ..." if len(guessed) > 3 else "")
        notes.append(f"the initial distribution of {len(guessed)} parameters on meta is a guess ({some})")
    return rules, notes


def fitted(entry: StateEntry) -> Rule:
    """The rule that a real tensor looks drawn from; a buffer that is not constant is data."""
    tensor = entry.tensor.detach()
    if tensor.numel() == 0:
        return ("constant", 0.0)
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        return ("data",) if tensor.is_complex() else ("constant", first.item())
    if entry.kind != "parameter" or not tensor.is_floating_point():
        return ("data",)
    sample = tensor.flatten()[:: max(1, tensor.numel() // SAMPLE)].double()
    mean, std = float(sample.mean()), float(sample.std(correction=0))
    if not math.isfinite(std) or std == 0.0:
        return ("data",)
    if float(((sample - mean) / std).pow(4).mean()) > KURTOSIS_BETWEEN:
        return ("normal", mean, std)
    half = std * math.sqrt(3.0)
    return ("uniform", mean - half, mean + half)


def record(model: nn.Module) -> dict[Identity, Rule]:
    """Run the modules' own initialisation on `meta`, and read off what it draws into each tensor."""
    recorder = _Recorder()
    marked = [(t, t._is_hf_initialized) for t in model.parameters() if hasattr(t, "_is_hf_initialized")]
    for tensor, _ in marked:
        del tensor._is_hf_initialized  # type: ignore[attr-defined]
    try:
        with torch.no_grad(), recorder:
            for call in _initializers(model):
                try:
                    call()
                except Exception:
                    continue  # an initialiser that needs values; what it would have drawn is guessed
    finally:
        for tensor, mark in marked:
            tensor._is_hf_initialized = mark  # type: ignore[attr-defined]
    return recorder.rules


def _initializers(model: nn.Module) -> list[Callable[[], Any]]:
    """Each module's own, then what their model applies to them; children before parents, who have the last word."""
    modules = dict(model.named_modules())
    calls: list[Callable[[], Any]] = [
        m.reset_parameters for m in reversed(modules.values()) if callable(getattr(m, "reset_parameters", None))
    ]
    for path, module in reversed(modules.items()):
        owner = _owner(path, modules)
        if owner is not None:
            calls.append(functools.partial(owner._init_weights, module))
        elif type(module).__module__.startswith("timm.") and callable(getattr(module, "init_weights", None)):
            calls.append(module.init_weights)  # type: ignore[arg-type]
    return calls


def _owner(path: str, modules: Mapping[str, nn.Module]) -> Any:
    """The nearest enclosing transformers model, which says how its modules are initialised."""
    while True:
        candidate = modules[path]
        if hasattr(candidate, "config") and callable(getattr(candidate, "_init_weights", None)):
            return candidate
        if not path:
            return None
        path = path.rpartition(".")[0]


class _Recorder(TorchDispatchMode):
    """Keeps, for each tensor that is written whole, the rule of the last write."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[Identity, Rule] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta" and name in WRITES:
            mark = identity(args[0])
            given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
            rule = WRITES[name](self.rules.get(mark), given)
            if rule is not None:
                self.rules[mark] = rule
            if name != "copy_":
                return func(*args, **kwargs)
            return args[0]
        return func(*args, **kwargs)


def _affine(rule: Rule | None, factor: float, shift: float) -> Rule | None:
    if rule is None or rule[0] == "data":
        return rule
    if rule[0] == "normal":
        return ("normal", rule[1] * factor + shift, rule[2] * abs(factor))
    return (rule[0], *sorted(v * factor + shift for v in rule[1:]))


def _copied(rule: Rule | None, given: Mapping[str, Any]) -> Rule | None:
    source = given.get("src")
    if not isinstance(source, torch.Tensor) or source.device.type == "meta" or source.numel() > MOST_VALUES:
        return rule
    if source.is_complex():
        return rule
    values = source.detach().expand(given["self"].shape).flatten()
    if values.numel() and bool((values == values[0]).all()):
        return ("constant", values[0].item())
    return ("data", values.tolist())


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 1.0


# What an in-place operator makes of a tensor's rule. `erfinv_` of a uniform draw is how a truncated normal is made.
WRITES: dict[str, Callable[[Rule | None, Mapping[str, Any]], Rule | None]] = {
    "normal_": lambda rule, given: ("normal", float(given.get("mean", 0.0)), float(given.get("std", 1.0))),
    "uniform_": lambda rule, given: ("uniform", float(given.get("from", 0.0)), float(given.get("to", 1.0))),
    "fill_": lambda rule, given: ("constant", _number(given["value"])),
    "zero_": lambda rule, given: ("constant", 0.0),
    "erfinv_": lambda rule, given: ("normal", 0.0, math.sqrt(0.5)),
    "mul_": lambda rule, given: _affine(rule, _number(given["other"]), 0.0),
    "div_": lambda rule, given: _affine(rule, 1.0 / _number(given["other"]), 0.0),
    "add_": lambda rule, given: _affine(rule, 1.0, _number(given["other"])),
    "sub_": lambda rule, given: _affine(rule, 1.0, -_number(given["other"])),
    "copy_": _copied,
}
