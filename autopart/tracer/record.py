"""What opaque modules give back, recorded in one run outside the trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopart.runtime.structure import decode
from autopart.tracer.blame import reason_of
from autopart.tracer.call import Call
from autopart.tracer.errors import ModelFailsError, Uncapturable
from autopart.tracer.kept_parameters import kept_parameters
from autopart.tracer.opaque import Arguments, OpaqueModule
from autopart.tracer.snapshot import unmarked

WITHOUT_VALUES = "cannot be recorded without values"


def record_opaque_calls(model: nn.Module, call: Call, opaque: Mapping[str, OpaqueModule]) -> None:
    """Run the model once in its present mode, and note every call of an opaque module.

    Gradients are on, as they are in training. The model, its buffers and all random states are left as they were.

    Raises:
        Uncapturable: The run fails; on `meta` that is so where forward reads values.
    """
    for module in opaque.values():
        module.calls = []
    if not opaque:
        return
    versions: dict[str, list[list[int]]] = {path: [] for path in opaque}
    handles = []
    for path, kept in opaque.items():

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            versions[path].append([t._version for t in Arguments.of(args, kwargs).tensors])

        def after(_: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            opaque[path].record(args, kwargs, result, versions[path].pop())

        handles.append(kept.module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(kept.module.register_forward_hook(after, with_kwargs=True))
    # Hooks made here go back out with the attributes that `unmarked` restores; the handles are removed before that.
    try:
        with unmarked(model, values=True), kept_parameters(model), torch.enable_grad():
            args, kwargs, *_ = decode(call.structure, [t.detach().clone() for t in call.tensors])
            model(*args, **kwargs)
    except Uncapturable:
        raise
    except Exception as error:
        if all(p.device.type != "meta" for p in model.parameters()):
            mode = "training" if model.training else "evaluation"
            raise ModelFailsError(
                f"{type(model).__name__} fails on one microbatch in {mode} mode: {reason_of(error)}",
                "Check that the model runs on the example; if it does, use fewer microbatches or more rows.",
            ) from None
        raise Uncapturable("", f"what {', '.join(opaque)} gives back {WITHOUT_VALUES}: {reason_of(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
