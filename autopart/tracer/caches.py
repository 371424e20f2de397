"""Functions that remember results (`functools.lru_cache`) must not remember tensors without values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

CachedFunction = type(functools.lru_cache(lambda: None))


@contextmanager
def caches_emptied(model: nn.Module) -> Iterator[None]:
    """Empty the caches of functions that the model's classes use, before and after a run without values."""
    functions = _cached_functions(model)
    for function in functions:
        function.cache_clear()
    try:
        yield
    finally:
        for function in functions:
            function.cache_clear()


def _cached_functions(model: nn.Module) -> list[Any]:
    """Those among the globals of the files and the attributes of the classes that are not torch's own."""
    classes = {
        c for m in model.modules() for c in type(m).__mro__ if c.__module__.split(".")[0] not in ("torch", "builtins")
    }
    spaces: list[Any] = [vars(c) for c in classes]
    spaces += [vars(sys.modules[f]) for f in {c.__module__ for c in classes} if f in sys.modules]
    return [value for space in spaces for value in list(space.values()) if isinstance(value, CachedFunction)]
