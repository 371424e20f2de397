"""What will keep a plan from being written as a package, told before the time for the plan is spent."""

from __future__ import annotations

from autopart.codegen.opaque import OpaqueCalls
from autopart.errors import CaptureError
from autopart.graph import Graph


def obstacle(graph: Graph) -> str | None:
    """A sentence about code that is kept whole and cannot be written into a package, if there is such code."""
    try:
        OpaqueCalls(graph)
    except CaptureError as error:
        return f"no package can be written of this plan: {error.message}" + (f" ({error.hint})" if error.hint else "")
    return None
