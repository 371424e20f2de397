"""The one tree of errors; each class carries the exit status of the command line.

A message is written for the person at the terminal: what is wrong, where in their model or file, what to change.
"""

from __future__ import annotations


class AutopartError(Exception):
    """Base of every error that autopart raises on purpose.

    Args:
        message: What is wrong, and where.
        hint: What to change, when it is not already in the message.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n{hint}")
        self.message = message
        self.hint = hint


class UsageError(AutopartError):
    """An argument is missing, unknown, or contradicts another."""

    exit_status = 2


class InfeasibleError(AutopartError):
    """It is proven that no plan fits; the message names the smallest change that would."""

    exit_status = 3


class LimitError(AutopartError):
    """The time limit was reached before any plan was found."""

    exit_status = 4


class VerificationError(AutopartError):
    """A package computed something else than the model it was made from."""

    exit_status = 5


class CaptureError(AutopartError):
    """The model cannot be captured or split; the message names the module and the reason."""

    exit_status = 6


class InputFileError(AutopartError):
    """A file given by the user cannot be read as what it should be."""

    exit_status = 7
