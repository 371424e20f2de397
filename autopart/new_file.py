"""New files: written whole or not left behind, and never in place of another."""

from __future__ import annotations

from pathlib import Path

from autopart.errors import UsageError


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        UsageError: There is a file of this name, or none can be written.
    """
    try:
        file = path.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except BaseException:  # a full disk, an interruption: half of a file could be taken for all of it
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        hint = "Name another file, or remove that one first."
        raise UsageError(f"there is a file '{path}' already", hint) from None
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror}") from None
