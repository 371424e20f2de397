"""Tracer: nn.Module -> Graph."""

from autopart.tracer.batch import Batch, find_batch
from autopart.tracer.trace import trace

__all__ = ["Batch", "find_batch", "trace"]
