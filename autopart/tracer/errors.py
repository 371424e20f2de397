"""Failures inside the tracer: what an attempt to capture tells the next one, and what is the model's own."""

from __future__ import annotations

from autopart.errors import UsageError


class ModelFailsError(UsageError):
    """The model itself fails when it is run on the example."""


class Uncapturable(Exception):
    """The captured graph holds something that cannot be kept.

    Attributes:
        path: Module path at which it was made; None when no module is known.
        reason: For the person who reads the plan.
        line: The user's source line ("file:line: code"), where the graph remembers it.
    """

    def __init__(self, path: str | None, reason: str, line: str | None = None) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason
        self.line = line
