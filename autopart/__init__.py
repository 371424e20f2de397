"""autopart: the automatic model partitioner for PyTorch.

    plan = autopart.partition(model, "8xH100-80G")
    plan.emit("out/")
    $ torchrun --nproc-per-node 8 out/train.py

The names below are loaded on first use, so that `import autopart` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopart.api import Partition, partition
    from autopart.cluster import Cluster
    from autopart.codegen import emit
    from autopart.errors import AutopartError
    from autopart.plan import Plan
    from autopart.profiler.operators import profile
    from autopart.profiler.profile_file import Profile
    from autopart.simulator import Simulation, simulate
    from autopart.solver import solve
    from autopart.tracer import trace
    from autopart.verification import verify

__version__ = "0.1.0"

_HOME = {
    "AutopartError": "autopart.errors",
    "Cluster": "autopart.cluster",
    "Partition": "autopart.api",
    "Plan": "autopart.plan",
    "Profile": "autopart.profiler.profile_file",
    "emit": "autopart.codegen",
    "partition": "autopart.api",
    "profile": "autopart.profiler.operators",
    "Simulation": "autopart.simulator",
    "simulate": "autopart.simulator",
    "solve": "autopart.solver",
    "trace": "autopart.tracer",
    "verify": "autopart.verification",
}

__all__ = [
    "AutopartError",
    "Cluster",
    "Partition",
    "Plan",
    "Profile",
    "Simulation",
    "__version__",
    "emit",
    "partition",
    "profile",
    "simulate",
    "solve",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
