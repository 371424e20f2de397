"""Model specs: how a model is named on the command line, "hf:gpt2?n_layer=2", and how it is built from its name.

    hf:MODEL_TYPE, hf:CLASS, hf:DIRECTORY, hf:ORGANISATION/NAME     transformers
    timm:NAME, torchvision:NAME                                     the builders of those libraries
    zoo:NAME                                                        a file of `models/`, or an entry of the zoo
    FILE.py:FUNCTION, package.module:FUNCTION                       returns a model, or (model, args[, kwargs])

Each may end in `?key=value&key=value`. `batch`, `seq`, `image`, `labels` and `class` are about the inputs and the head
(docs/cli.md); any other key goes to the config, the builder or the function.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopart.errors import AutopartError, CaptureError, InputFileError, UsageError
from autopart.inputs import find_inputs

MODELS_FOLDER = Path(__file__).resolve().parent.parent / "models"
PREFIXES = ("hf", "timm", "torchvision", "zoo")
INPUT_KEYS = ("batch", "seq", "image", "labels")


@dataclass(frozen=True)
class LoadedModel:
    """A model with one global batch of inputs.

    Attributes:
        spec: As the user wrote it.
        args, kwargs: Of the model's call.
        notes: What the user should know of how it was built.
    """

    spec: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A spec taken apart: what kind of name, the name, and its options."""

    text: str
    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Builder:
    """What a spec leads to: `build(**options)`, and which of the spec's options are for the inputs instead."""

    build: Callable[[], Any]
    input_options: Mapping[str, Any] = field(default_factory=dict)


def load(spec: str, *, meta: bool = True, seed: int = 0) -> LoadedModel:
    """Build the model that a spec names, with inputs for it.

    Args:
        meta: Build without memory for the weights, on `torch.device("meta")`. A model that cannot be built there is
            built with real weights, which a note says. False: real weights, drawn with `seed`.
        seed: Of the random weights and inputs.

    Raises:
        UsageError: The spec names nothing that is known, or an option is wrong.
        InputFileError: Its file or directory is missing or is not what it should be.
        CaptureError: Building the model raised an exception.
    """
    parsed = parse(spec)
    builder = _KINDS[parsed.kind](parsed)
    notes: tuple[str, ...] = ()
    built = _attempt(parsed, builder, "meta") if meta else None
    if isinstance(built, BaseException):
        notes = (f"built with real weights, for on the meta device it fails: {_one_line(built)}",)
        built = None
    if built is None:
        built = _attempt(parsed, builder, "cpu", seed)
    if isinstance(built, AutopartError):
        raise built
    if isinstance(built, BaseException):
        raise _build_error(parsed, built) from built
    model, args, kwargs = _unpack(parsed, built, builder.input_options)
    return LoadedModel(spec, model, args, kwargs, notes)


def parse(text: str) -> Spec:
    """Take a spec apart.

    Raises:
        UsageError: It has none of the forms of the module's docstring.
    """
    body, options = _split_options(text)
    head, colon, name = body.partition(":")
    if colon and head in PREFIXES and name:
        return Spec(text, head, name, options)
    place, colon, _ = body.rpartition(":")
    if colon and place.endswith(".py"):
        return Spec(text, "file", body, options)
    if colon and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", place):
        return Spec(text, "module", body, options)
    hint = "A model is hf:NAME, timm:NAME, torchvision:NAME, zoo:NAME, FILE.py:FUNCTION or package.module:FUNCTION."
    if not colon:
        hint = _name_without_prefix(body) + hint
    raise UsageError(f"{text!r} is no model", hint)


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    found = re.fullmatch(r"(.*?)\?([\w.]+=[^&]*(?:&[\w.]+=[^&]*)*)", text, re.DOTALL)
    if found is None:
        if "?" in text and text.partition(":")[0] in PREFIXES:
            raise UsageError(f"the options of {text!r} cannot be read", "Write them ?key=value&key=value.")
        return text, {}
    options: dict[str, Any] = {}
    for part in found[2].split("&"):
        key, value = part.split("=", 1)
        if key in options:
            raise UsageError(f"{text!r} gives {key!r} twice")
        options[key] = _value(value)
    return found[1], options


def _value(text: str) -> Any:
    """A number, truth value, None or JSON as such; anything else is text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _name_without_prefix(name: str) -> str:
    from autopart.zoo import entries

    for entry in entries():
        if name.lower() in (entry.name, entry.spec.partition(":")[2].partition("?")[0]):
            return f"Did you mean {entry.spec.partition('?')[0]}? "
    return ""


# ------------------------------------------------------------------------------------------------- building


def _attempt(spec: Spec, builder: _Builder, device: str, seed: int = 0) -> Any:
    """What the builder returns on this device, or the exception that it raised (a user's file may even exit)."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            return builder.build()
    except (Exception, SystemExit) as error:
        return error


def _build_error(spec: Spec, error: BaseException) -> AutopartError:
    text = f"building {spec.text!r} failed: {_one_line(error)}"
    if spec.options and isinstance(error, (TypeError, ValueError)):
        return UsageError(text, f"Look at its options: {', '.join(spec.options)}.")
    where = _last_line_of_user(error) if spec.kind in ("file", "module", "zoo") else None
    return CaptureError(text, where)


def _one_line(error: BaseException) -> str:
    message = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _last_line_of_user(error: BaseException) -> str | None:
    """Where in the user's file the exception came from: the deepest frame outside of any library."""
    trace, found = error.__traceback__, None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if (
            "site-packages" not in file
            and not file.startswith("<")
            and Path(file).resolve().parent != Path(__file__).resolve().parent
        ):
            found = f"at {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _unpack(
    spec: Spec, built: Any, input_options: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from what a function returned."""
    parts = tuple(built) if isinstance(built, (tuple, list)) else (built,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 3:
        kind = "nothing" if built is None else f"a {type(built).__name__}"
        raise UsageError(f"{spec.text!r} gave {kind}", "It must return a torch.nn.Module, or (model, args, kwargs).")
    model = parts[0]
    if len(parts) == 1:
        return model, *find_inputs(model, **input_options)
    args = parts[1] if isinstance(parts[1], (tuple, list)) else (parts[1],)
    kwargs = parts[2] if len(parts) == 3 and parts[2] is not None else {}
    if not isinstance(kwargs, Mapping):
        raise UsageError(f"{spec.text!r} gave keyword arguments that are a {type(kwargs).__name__}, not a dict")
    return model, tuple(args), dict(kwargs)


def _take_input_options(spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The spec's options apart: those about inputs, and the others."""
    inputs = {key: value for key, value in spec.options.items() if key in INPUT_KEYS}
    for key in ("batch", "seq", "image"):
        if key in inputs and (not isinstance(inputs[key], int) or inputs[key] < 1):
            raise UsageError(f"{key} in {spec.text!r} must be a positive number, not {inputs[key]!r}")
    if "labels" in inputs:
        inputs["labels"] = bool(inputs["labels"])
    return inputs, {key: value for key, value in spec.options.items() if key not in INPUT_KEYS}


# ------------------------------------------------------------------------------------------- timm, torchvision


def _timm(spec: Spec) -> _Builder:
    timm = _library("timm")
    if not timm.is_model(spec.name.partition(".")[0]):
        raise _unknown_name(spec, timm.list_models(), "timm.list_models() gives all names.")
    inputs, options = _take_input_options(spec)
    if isinstance(options.get("img_size"), int):
        inputs.setdefault("image", options["img_size"])
    return _Builder(lambda: timm.create_model(spec.name, pretrained=False, **options), inputs)


def _torchvision(spec: Spec) -> _Builder:
    models = _library("torchvision.models")
    if spec.name not in models.list_models():
        raise _unknown_name(spec, models.list_models(), "torchvision.models.list_models() gives all names.")
    inputs, options = _take_input_options(spec)
    # Some builders fetch the weights of their backbone unless told not to.
    if "weights_backbone" in inspect.signature(models.get_model_builder(spec.name)).parameters:
        options.setdefault("weights_backbone", None)
    return _Builder(lambda: models.get_model(spec.name, weights=None, **options), inputs)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name.partition('.')[0]} is not installed: {_one_line(error)}", 'pip install "autopart[zoo]"'
        ) from error


def _unknown_name(spec: Spec, known: Iterable[str], otherwise: str) -> UsageError:
    close = difflib.get_close_matches(spec.name, list(known), 3)
    hint = f"Did you mean {' or '.join(f'{spec.kind}:{name}' for name in close)}?" if close else otherwise
    return UsageError(f"{spec.kind} has no model {spec.name!r}", hint)


# ------------------------------------------------------------------------------------------------------- ours


def own_models() -> tuple[str, ...]:
    """Names of the models in the clone's `models/`; none where autopart was installed without it."""
    return tuple(sorted(path.stem for path in MODELS_FOLDER.glob("*.py")))


def _zoo(spec: Spec) -> _Builder:
    from autopart.zoo import entries

    if spec.name in own_models():
        module = _import_file(MODELS_FOLDER / f"{spec.name}.py")
        return _Builder(lambda: module.make(**spec.options))
    listed = {entry.name: entry.spec for entry in entries()}
    if spec.name not in listed:
        raise _unknown_name(spec, {*listed, *own_models()}, "`autopart zoo list` gives all names.")
    library = parse(listed[spec.name])
    if library.kind == "zoo":
        raise UsageError(f"{spec.text!r} is in a clone's models/ folder, which is not at {MODELS_FOLDER}")
    return _KINDS[library.kind](Spec(spec.text, library.kind, library.name, {**library.options, **spec.options}))


def _function(spec: Spec) -> _Builder:
    place, _, name = spec.name.rpartition(":")
    module = _import_file(Path(place)) if spec.kind == "file" else _import_module(spec, place)
    function = getattr(module, name, None)
    if not callable(function):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, callables, 1)
        raise UsageError(
            f"{place} has no function {name!r}",
            f"Did you mean {close[0]}?" if close else f"It has: {', '.join(callables)}.",
        )
    if isinstance(function, type) and not issubclass(function, nn.Module):
        raise UsageError(f"{name!r} in {place} is a class, but not a torch.nn.Module")
    return _Builder(lambda: function(**spec.options))


def _import_file(path: Path) -> ModuleType:
    """Run a Python file as the module of its own name, as `python FILE` would find what stands beside it."""
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, 1)
        hint = f"Did you mean {path.parent / close[0]}?" if close else None
        raise InputFileError(f"there is no file {str(path)!r}", hint)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.resolve()):
        return loaded
    if not name.isidentifier() or loaded is not None or name in sys.stdlib_module_names:
        name = f"model_from_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}"
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise InputFileError(
            f"{str(path)!r} cannot be imported{place}: {_one_line(error)}", _last_line_of_user(error)
        ) from error
    return module


def _import_module(spec: Spec, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            close = difflib.get_close_matches(name, PREFIXES, 1)
            hint = f"Did you mean {close[0]}:...?" if close else "Is it in this folder or installed?"
            raise UsageError(f"{spec.text!r}: there is no module {error.name!r}", hint) from error
        raise InputFileError(f"module {name!r} cannot be imported: {_one_line(error)}") from error
    except Exception as error:
        raise InputFileError(
            f"module {name!r} cannot be imported: {_one_line(error)}", _last_line_of_user(error)
        ) from error


def _transformers(spec: Spec) -> _Builder:
    _library("transformers")
    from autopart.hf_models import builder

    inputs, options = _take_input_options(spec)
    return _Builder(builder(spec.name, options), inputs)


_KINDS: Mapping[str, Callable[[Spec], _Builder]] = {
    "hf": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
    "zoo": _zoo,
    "file": _function,
    "module": _function,
}
