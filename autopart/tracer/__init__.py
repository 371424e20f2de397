"""Tracer: nn.Module -> Graph."""

from autopart.tracer.trace import trace

__all__ = ["trace"]
