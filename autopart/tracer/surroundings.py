"""The state of torch in which a model is captured, whatever surrounds the call: gradients on, no autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from autopart.tracer.stamps import DEVICE_TYPES


@contextmanager
def neutral_surroundings() -> Iterator[None]:
    """Gradients are on, inference mode and autocast off; also a decorator.

    A capture stamps the contexts in force on each node, so those of the caller would become part of the package.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in DEVICE_TYPES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
