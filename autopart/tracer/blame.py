"""Which submodule is at fault when a capture fails."""

from __future__ import annotations

import traceback
from types import TracebackType

from torch import nn

from autopart.tracer.errors import Uncapturable


def module_at_fault(model: nn.Module, error: BaseException) -> str | None:
    """Path of the innermost module whose method was running; None when the failure names no module of the model."""
    if isinstance(error, Uncapturable) and error.path is not None:
        return error.path
    # Export wraps modules in proxies that share their `__dict__`, so identity of the dictionary is what tells.
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    for cause in causes(error):
        for frame in reversed(list(_frames(cause.__traceback__))):
            owner = frame.f_locals.get("self")
            try:
                path = paths.get(id(vars(owner)))
            except TypeError:
                continue
            if path is not None:
                return path
    return None


def causes(error: BaseException) -> list[BaseException]:
    """The chain of an exception, deepest cause first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain[::-1]


def _frames(trace: TracebackType | None):  # type: ignore[no-untyped-def]
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def source_line(model: nn.Module, error: BaseException) -> str | None:
    """`file:line: code` of the deepest line of the user's own code (outside torch) that was running."""
    if isinstance(error, Uncapturable) and error.line is not None:
        return error.line
    for cause in causes(error):
        lines = [f for f in traceback.extract_tb(cause.__traceback__) if not _is_library(f.filename)]
        if lines:
            return f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}"
    return None


def _is_library(filename: str) -> bool:
    parts = filename.replace("\\", "/").split("/")
    return "torch" in parts or "autopart" in parts or filename.startswith("<")


def reason_of(error: BaseException) -> str:
    """The first line of what went wrong, without the addresses and lists that follow."""
    if isinstance(error, Uncapturable):
        return error.reason
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    return f"{type(error).__name__}: {first}"


def parent(path: str) -> str:
    return path.rpartition(".")[0]
