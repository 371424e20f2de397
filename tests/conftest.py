"""Fixtures shared by the tests of all rooms."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for jobs with process groups; started when first used, kept for the session."""
    started = Pool()
    yield started
    started.close()
