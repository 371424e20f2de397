"""JSON files that may come from anywhere: whatever is not exactly what was expected is refused, by its key."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from autopart.errors import InputFileError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""How dataclasses are read: no conversions (a number is not text), no unknown keys."""


def read(path: str | os.PathLike[str]) -> bytes:
    """The contents of a file.

    Raises:
        InputFileError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputFileError(f"{path}: {error.strerror}") from None


def parse(text: str | bytes, where: str, what: str) -> dict[str, Any]:
    """One JSON object, with unique keys and finite numbers.

    Args:
        where: How messages name the text (its file).
        what: What it should be ("a plan").

    Raises:
        InputFileError: It is something else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise InputFileError(f"{where}: key {short(twice)} stands twice in one object")
        return found

    def number(token: str) -> float:
        value = float(token)
        if not math.isfinite(value):
            raise InputFileError(f"{where}: {short(token)} is not a finite number")
        return value

    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        data = json.loads(decoded, object_pairs_hook=unique, parse_constant=number, parse_float=number)
    except UnicodeDecodeError as error:
        raise InputFileError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise InputFileError(f"{where}: nested too deeply to be {what}") from None
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise InputFileError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputFileError(f"{where}: {what} is one JSON object, not {type(data).__name__}")
    return data


def of_schema(data: dict[str, Any], schema: str, where: str, hint: str) -> dict[str, Any]:
    """The object without its `schema`, which must be this one."""
    found = data.get("schema")
    kind, wanted = (str(name).partition("/")[0].removeprefix("autopart-") for name in (found, schema))
    if kind != wanted and str(found).startswith("autopart-"):
        raise InputFileError(f"{where}: key 'schema': this is a {kind}, and a {wanted} is needed")
    if found != schema:
        raise InputFileError(f"{where}: key 'schema' must be {schema!r}, not {short(found)}", hint)
    return {key: value for key, value in data.items() if key != "schema"}


def validated(adapter: TypeAdapter[T], data: Any, where: str) -> T:
    """The data as what `adapter` makes.

    Raises:
        InputFileError: It does not fit; the message names the key.
    """
    try:
        return adapter.validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        parts = map(str, first["loc"])
        key = ".".join(part if len(part) <= 60 else f"{part[:57]}..." for part in parts)
        raise InputFileError(f"{where}: key {key!r}: {first['msg']}") from None


def document(adapter: TypeAdapter[T], text: str | bytes, where: str, what: str, schema: str, hint: str) -> T:
    """A whole file of one schema as what `adapter` makes; see `parse`, `of_schema` and `validated`."""
    return validated(adapter, of_schema(parse(text, where, what), schema, where, hint), where)


def short(value: object) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
