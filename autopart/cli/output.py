"""Where words go: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from autopart.errors import UsageError


def write(path: Path, text: str) -> None:
    """Write a file that the user named."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}") from error


def check_new(path: Path | None) -> None:
    """Refuse, before any work is done, a file that `autopart.new_file.write_new` could not write."""
    if path is None:
        return
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long, say
        raise UsageError(f"cannot write '{path}': {error.strerror}") from error
    else:
        raise UsageError(f"there is a file '{path}' already", "Name another file, or remove that one first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write '{path}': '{path.parent}' is no folder that can be written to")


def show(text: str) -> None:
    """The result."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever reads it has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str) -> None:
    """One line of progress."""
    from autopart.text import printable

    print(printable(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def working() -> Iterator[None]:
    """While models are built and run, what they print goes to stderr: stdout is for the result alone."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not debugging():
            warnings.simplefilter("ignore")
        yield


def debugging() -> bool:
    """Whether AUTOPART_DEBUG asks for tracebacks and warnings."""
    return os.environ.get("AUTOPART_DEBUG", "") not in ("", "0")
