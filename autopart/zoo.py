"""The zoo: models on which the claims of the README are measured, as a list that comes with the package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml


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
