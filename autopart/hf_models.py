"""transformers models from their configs: which class a model type means, and how options change its config."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopart.errors import InputFileError, UsageError

# A model type alone means the first of these heads that it has. Encoder-decoders come first, for some of them are
# listed as masked or causal language models too; then masked before causal, for encoders are listed as both.
_TASKS = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_TEXT_TO_TEXT",
)


def builder(name: str, options: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that builds the model, with random weights.

    Args:
        name: A model type ("gpt2"), a class ("GPT2LMHeadModel"), a directory with a config.json, or
            "organisation/name" of a model on the hub.
        options: `class`: the class to build; every other key replaces an entry of the config, and a dotted one
            ("text_config.vocab_size") an entry of a part of it.

    Raises:
        UsageError: The name or an option is unknown, or a value has the wrong type.
        InputFileError: The directory or hub model has no readable config.
    """
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    config_class, entries, implied = _config(name)
    changes = {key: value for key, value in options.items() if key != "class"}
    usual = config_class.from_dict(entries)
    for key, value in changes.items():
        _put(entries, usual, key.split("."), value)
    # Made anew rather than changed, for some entries follow others (T5 has as many decoder layers as encoder layers).
    config = config_class.from_dict(entries)
    class_name = options.get("class") or implied or _class_of(config.model_type)
    cls = getattr(transformers, class_name, None)
    if cls is None or not hasattr(cls, "config_class"):
        raise UsageError(f"transformers has no model class {class_name!r}", _close(class_name, _model_classes()))
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        raise UsageError(
            f"{class_name} is built from a {cls.config_class.__name__}, not from a {config_class.__name__}"
        )
    _prepare_for_training(config)
    return lambda: cls(config)


def _config(name: str) -> tuple[Any, dict[str, Any], str | None]:
    """The config class that a name means, the entries that differ from its defaults, and the model class if named."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name in CONFIG_MAPPING_NAMES:
        return type(transformers.AutoConfig.for_model(name)), {}, None
    if Path(name).is_dir() or "/" in name or "\\" in name:
        return _stored_config(name)
    cls = getattr(transformers, name, None) if name.isidentifier() else None
    if cls is not None and getattr(cls, "config_class", None) is not None:
        return cls.config_class, {}, name
    hint = _close(name, [*CONFIG_MAPPING_NAMES, *_model_classes()])
    raise UsageError(f"transformers has no model type or class {name!r}, and there is no such directory", hint)


def _stored_config(name: str) -> tuple[Any, dict[str, Any], str | None]:
    import transformers

    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise InputFileError(f"the directory {name!r} has no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        hint = "Without a network, use a model type (hf:gpt2) or a local directory with its config.json."
        raise InputFileError(f"the config of {name!r} cannot be read: {reason}", hint) from error
    return type(config), config.to_dict(), (config.architectures or [None])[0]


def _put(entries: dict[str, Any], usual: Any, path: list[str], value: Any) -> None:
    """Replace one entry, checking its name and type against a config that has the usual ones."""
    name, rest = path[0], path[1:]
    if not hasattr(usual, name):
        known = [*usual.to_dict(), *getattr(usual, "attribute_map", {}), "batch", "seq", "image", "labels", "class"]
        close = difflib.get_close_matches(name, known, 3)
        hint = f"Did you mean {' or '.join(close)}?" if close else None
        raise UsageError(f"{type(usual).__name__} has no entry {name!r}", hint)
    old = getattr(usual, name)
    if rest:
        if not hasattr(old, "to_dict"):
            raise UsageError(f"{name!r} of {type(usual).__name__} has no parts")
        _put(entries.setdefault(name, {}), old, rest, value)
        return
    if isinstance(old, bool) and value in (0, 1):
        value = bool(value)
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # A size may be one number or one for each dimension, and None may become anything.
    fits = (
        old is None or value is None or isinstance(value, type(old)) or {type(old), type(value)} <= {int, list, tuple}
    )
    if not fits:
        raise UsageError(f"{name} of {type(usual).__name__} is a {type(old).__name__}, which {value!r} is not")
    entries[name] = value


def _class_of(model_type: str) -> str:
    from transformers.models.auto import modeling_auto

    for task in (*_TASKS, None):
        names = getattr(modeling_auto, "MODEL_MAPPING_NAMES" if task is None else f"MODEL_FOR_{task}_MAPPING_NAMES")
        if model_type in names:
            found = names[model_type]
            return found if isinstance(found, str) else found[0]
    raise UsageError(f"no class is known for the model type {model_type!r}", "Name one with ?class=CLASS.")


def _model_classes() -> list[str]:
    import transformers

    return [name for name in dir(transformers) if "For" in name or name.endswith("Model")]


def _close(name: str, known: list[str]) -> str:
    lower = {other.lower(): other for other in known}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, 3)]
    return f"Did you mean {' or '.join(close)}?" if close else "`autopart zoo list` shows some that work."


def _prepare_for_training(config: Any) -> None:
    text = config.get_text_config()
    if getattr(text, "use_cache", None):
        text.use_cache = False  # the cache of keys and values serves generation, not a whole pass
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
