"""The zoo: models on which the claims of the README are measured, as a list that comes with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files

import yaml

from autopart.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: Short, unique.
        spec: At the size that is really used (see `model_spec`).
        small: The same kind of model, small enough to run and compare on one machine.
        core: Whether it is one of those that every claim of the README is measured on.
    """

    name: str
    spec: str
    small: str
    core: bool = False


@cache
def entries() -> tuple[Entry, ...]:
    """The whole list, in the order of `zoo.yaml`."""
    text = files("autopart").joinpath("zoo.yaml").read_text(encoding="utf-8")
    return tuple(Entry(**row) for row in yaml.safe_load(text))


def selected(pattern: str | None) -> tuple[Entry, ...]:
    """Entries whose name matches: a part of the name, or a pattern with `*` and `?`; "core" for the core ones.

    Raises:
        UsageError: None does.
    """
    if pattern is None:
        return entries()
    if pattern == "core":
        return tuple(entry for entry in entries() if entry.core)
    wild = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    found = tuple(entry for entry in entries() if fnmatch(entry.name.lower(), wild.lower()))
    if not found:
        raise UsageError(f"no model of the zoo matches {pattern!r}", f"It has: {', '.join(e.name for e in entries())}.")
    return found


@dataclass(frozen=True)
class Row:
    """What is known of one model after planning it.

    Attributes:
        error: Why there is no plan; None where there is one.
        exit_status: What `autopart partition` would end with.
        memory_bytes: Predicted peak of each device.
    """

    name: str
    spec: str
    error: str | None = None
    exit_status: int = 0
    nodes: int | None = None
    parameters: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    stages: int | None = None
    tensor: int | None = None
    devices_used: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    step_time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    status: str | None = None
    balance: float | None = None
    granularity: str | None = None
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    memory_bytes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
