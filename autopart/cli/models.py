"""Models by their specs, for the commands."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from autopart.cli.output import say
from autopart.errors import UsageError

if TYPE_CHECKING:
    from autopart.api import Partition
    from autopart.model_spec import LoadedModel
    from autopart.plan import Plan

# Models up to this size are built with real weights where their package needs values that only these have.
MOST_REAL_WEIGHTS_BYTES = 4 << 30


def load_model(spec: str, meta: bool = True) -> LoadedModel:
    from autopart.model_spec import load
    from autopart.text import count

    start = time.perf_counter()
    loaded = load(spec, meta=meta)
    parameters = count(sum(p.numel() for p in loaded.model.parameters()))
    say(f"Built {spec}: {parameters} parameters in {time.perf_counter() - start:.1f} s.")
    for note in loaded.notes:
        say(f"Note: {note}")
    return loaded


def with_values(loaded: LoadedModel, plan: Partition) -> LoadedModel | None:
    """The model with real weights, where a package needs values of it that the meta device does not have."""
    unknown = [plan.graph.state[key].name for key, rule in plan.graph.initialization.items() if rule[0] == "unknown"]
    if not unknown:
        return None
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    missing = f"the buffer {unknown[0]!r}{more} has no values on the meta device"
    if sum(p.numel() * p.element_size() for p in loaded.model.parameters()) > MOST_REAL_WEIGHTS_BYTES:
        say(f"Note: {missing}, and the model is too large to be built here with real weights: the package cannot run.")
        say("Build the model with real weights in Python, and pass it to autopart.partition().")
        return None
    say(f"Note: {missing}: the model is built with real weights and planned anew.")
    return load_model(loaded.spec, meta=False)


def original(plan: Plan, spec: str | None) -> LoadedModel:
    """The model that a plan was made for, with real weights, in the plan's dtype."""
    import torch

    from autopart.torch_private import tree_map

    try:
        loaded = load_model(spec or plan.model, meta=False)
    except UsageError as error:
        if spec is not None:
            raise
        hint = "Name it with --model, for instance --model my_model.py:make, or call autopart.verify() in Python."
        raise UsageError(f"the plan's model {plan.model!r} cannot be built: {error.message}", hint) from error
    dtype = getattr(torch, plan.dtype)

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(converted, (loaded.args, dict(loaded.kwargs)))
    return dataclasses.replace(loaded, model=loaded.model.to(dtype), args=args, kwargs=kwargs)


def has_rows(loaded: LoadedModel, plan: Plan) -> bool:
    """Whether the model's own inputs can be the plan's global batch; else random ones of that size are taken."""
    from autopart.torch_private import tree_leaves

    rows = plan.strategy.microbatches * plan.strategy.microbatch_size
    return any(rows in getattr(leaf, "shape", ()) for leaf in tree_leaves((loaded.args, dict(loaded.kwargs))))
