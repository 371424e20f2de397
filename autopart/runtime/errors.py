"""The one error of an emitted package: a message for the person at the terminal, and an exit status."""

from __future__ import annotations

USAGE = 2
VERIFICATION = 5
INPUT_FILE = 7


class PackageError(Exception):
    """Something that the person who runs the package can change.

    Attributes:
        exit_status: 2 for an argument, 7 for a file.
    """

    def __init__(self, message: str, exit_status: int = USAGE) -> None:
        super().__init__(message)
        self.exit_status = exit_status
