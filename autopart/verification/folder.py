"""Reading a package in this process, when people may have changed its files."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from autopart.errors import InputFileError
from autopart.verification.worker import imported

# What a verification uses of a package's own runtime, beside the table.
USED = ("runtime.interface", "runtime.batches", "runtime.schedules", "runtime.train")


@contextmanager
def opened(folder: Path) -> Iterator[Any]:
    """The `PIPELINE` of a package; its modules can be imported by name while the block runs.

    Raises:
        InputFileError: A file of the package is missing or does not run; the message names it and says why.
    """
    with ExitStack() as stack:
        try:
            module = stack.enter_context(imported(str(folder)))
            runtime = {name: importlib.import_module(name) for name in USED}
        except (Exception, SystemExit) as error:
            raise _damaged(_blame(folder, error)) from error
        pipeline = getattr(module, "PIPELINE", None)
        if not isinstance(pipeline, runtime["runtime.interface"].Pipeline):
            what = "does not define PIPELINE" if pipeline is None else f"has a {type(pipeline).__name__} for PIPELINE"
            raise _damaged(f"{folder / 'pipeline.py'} {what}")
        yield pipeline


def _damaged(message: str) -> InputFileError:
    return InputFileError(
        message, "Undo what was changed in the package, or write it anew: autopart partition ... --out."
    )


def _blame(folder: Path, error: BaseException) -> str:
    """Which file of the package is at fault, where, and why."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        path = folder.joinpath(*error.name.split("."))
        root = error.name.partition(".")[0]
        if root in ("pipeline", "blocks", "constants", "opaque", "runtime", "user_code") or root.startswith("stage_"):
            return f"{path.with_suffix('.py') if root == error.name != 'runtime' else path} is missing from the package"
    if isinstance(error, SyntaxError):
        file = error.filename or next(map(str, filter(_is_no_source, sorted(folder.rglob("*.py")))), str(folder))
        line = f", line {error.lineno}" if error.filename else ""
        return f"{file}{line}: SyntaxError: {error.msg}"
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    inside = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    if not inside:
        return f"the package in {folder} cannot be read: {reason}"
    return f"{inside[-1].filename}, line {inside[-1].lineno}: {reason}"


def _is_no_source(path: Path) -> bool:
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError):
        return True
    return False
