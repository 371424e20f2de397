"""Captures a model in both modes: export under the patches, lower, and keep whole what cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from autopart.errors import AutopartError, CaptureError
from autopart.graph import OpaqueCall
from autopart.tracer import opaque as opaque_calls
from autopart.tracer.blame import module_at_fault, parent, reason_of, source_line
from autopart.tracer.caches import caches_emptied
from autopart.tracer.call import Call, FlatCall, Recording
from autopart.tracer.errors import Uncapturable
from autopart.tracer.lower import Lowering, module_of
from autopart.tracer.modes import Modes
from autopart.tracer.opaque import OpaqueModule, Pending
from autopart.tracer.patches import Watch
from autopart.tracer.quiet import quiet
from autopart.tracer.record import WITHOUT_VALUES, record_opaque_calls
from autopart.tracer.sideeffects import PythonState
from autopart.tracer.snapshot import unmarked
from autopart.tracer.state import StateTable

# A model that needs more modules kept whole than this is not worth splitting.
MOST_OPAQUE = 16
HOOK_REASON = "it has backward hooks"


class Capturer:
    """Captures one model in both modes; what was learnt in the first (opaque modules) holds in the second."""

    def __init__(
        self,
        modes: Modes,
        call: Call,
        state: StateTable,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        training: bool,
        notes: list[str],
    ) -> None:
        self.modes = modes
        self.model = modes.model
        self.call = call
        self.state = state
        self.loss_fn = loss_fn
        self.training = training
        self.notes = notes
        self.deny_export = False
        self.suspects: PythonState | None = None
        self.kept_in_evaluation = modes.kept_paths() if training else []
        self.opaque: dict[str, OpaqueModule] = {}
        self.calls: dict[str, OpaqueCall] = {}
        for path in modules_with_backward_hooks(modes.model):
            self.keep_whole(path, HOOK_REASON)

    def keep_whole(self, path: str, reason: str) -> None:
        """Make a submodule opaque.

        Raises:
            CaptureError: It is the whole model, its modes cannot be kept, or too much has been kept whole already.
        """
        name = type(self.model).__name__
        if path == "":
            raise CaptureError(f"{name} cannot be captured: {reason}", _hint(reason))
        if len(self.opaque) >= MOST_OPAQUE:
            raise CaptureError(
                f"{name} cannot be captured: more than {MOST_OPAQUE} submodules would have to be kept whole"
            )
        frozen = [p for p in self.kept_in_evaluation if p == path or p.startswith(f"{path}.")]
        if frozen:
            raise CaptureError(
                f"{path} of {name} has to be kept whole ({reason}), and {frozen[0]} in it is in evaluation mode, in "
                "which a module that is kept whole cannot stay",
                "Call model.train() before partitioning; let what shall stay in evaluation mode override train().",
            )
        for inner in [p for p in self.opaque if p.startswith(f"{path}.")]:
            del self.opaque[inner]
        self.opaque[path] = OpaqueModule(self.model.get_submodule(path), path, reason)

    def sentences(self) -> list[str]:
        """What was kept whole, and why, for the person who reads the plan."""
        total = sum(p.numel() for p in self.model.parameters()) or 1
        found = []
        for path, kept in self.opaque.items():
            share = sum(p.numel() for p in kept.module.parameters()) / total
            size = f", {share:.0%} of the parameters" if share >= 0.005 else ""
            found.append(f"{path} ({type(kept.module).__name__}{size}) is kept whole: {kept.reason}")
            if "layerdrop" in kept.reason or getattr(getattr(self.model, "config", None), "layerdrop", False):
                found.append("set layerdrop=0 in the model's configuration, so that its layers can be split")
        for call in self.calls.values():
            if call.kind == "function":
                found.append(f"{call.subject.__qualname__} in {call.path or 'the model'} is kept whole: {call.reason}")
            elif call.kind == "hook":
                found.append(f"a gradient hook in {call.path or 'the model'} is kept as it is")
        return list(dict.fromkeys(found))

    def capture(self, train_mode: bool) -> tuple[fx.Graph, Recording]:
        """The graph of one mode.

        Raises:
            CaptureError: The model cannot be captured in this mode.
        """
        self.modes.set(train_mode)
        while True:
            error = None
            for deny in (True,) if self.deny_export else (False, True):
                try:
                    graph, record = self._attempt(train_mode, deny)
                except AutopartError:
                    raise
                except Exception as failure:
                    error = error or failure
                else:
                    if deny and not self.deny_export:
                        self.deny_export = True
                        self.notes.append("captured as if not exported: the model takes another road when it is")
                    return graph, record
            assert error is not None
            self._blame(error)

    def _blame(self, error: Exception) -> None:
        path = module_at_fault(self.model, error)
        line = source_line(self.model, error)
        reason = reason_of(error) + (f" ({line})" if line else "")
        while path is not None and any(path == o or path.startswith(f"{o}.") for o in self.opaque):
            path = parent(path) if path else None
        self.keep_whole(path or "", reason)

    def _attempt(self, train_mode: bool, deny_export: bool) -> tuple[fx.Graph, Recording]:
        record = Recording()
        record_opaque_calls(self.model, self.call, self.opaque)
        python_state = PythonState(self.model) if self.suspects is None else self.suspects
        watch = Watch(self.model, self.opaque, python_state, deny_export)
        flat = FlatCall(
            self.model,
            self.call.structure,
            record,
            training=self.training,
            loss_fn=self.loss_fn,
            around=watch.around_forward,
        )
        flat.training = train_mode
        opaque_calls.PENDING.clear()
        with unmarked(self.model, values=True), caches_emptied(self.model), watch.around_export(), quiet():
            try:
                program = torch.export.export(flat, tuple(t.detach() for t in self.call.tensors), strict=False)
            except Exception:
                if record.error is not None:
                    raise record.error from None
                raise
        if python_state.changes:
            if python_state.locating:
                raise Uncapturable("", f"forward changes {', '.join(python_state.changes)}")
            python_state.locating = True
            self.suspects = python_state
            return self._attempt(train_mode, deny_export)
        rewrite = _Rewriting(self.calls)
        lowering = Lowering(program, self.state, self.call.names, record.reassigned, rewrite)
        graph = lowering.run()
        record.copied_inputs = lowering.copied_inputs
        self.calls |= rewrite.calls
        return graph, record


def modules_with_backward_hooks(model: nn.Module) -> list[str]:
    """Paths of the modules whose backward hooks export would drop."""
    return [path for path, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]


class _Rewriting:
    """Turns placeholder operators into `call_module` nodes; the same call in both modes has one key."""

    def __init__(self, known: Mapping[str, OpaqueCall]) -> None:
        self.known = known
        self.calls: dict[str, OpaqueCall] = {}

    def __call__(self, graph: fx.Graph, node: fx.Node, value: Callable[[Any], Any]) -> fx.Node:
        pending: Pending = opaque_calls.PENDING[node.args[1]]  # type: ignore[index]
        path = pending.path or module_of(node) or ""
        key = self._key(pending, path)
        self.calls[key] = OpaqueCall(
            key, pending.kind, pending.call, pending.subject, path, pending.reason, pending.structure
        )
        inputs = value(node.args[0])
        new = graph.create_node("call_module", key, ([inputs] if isinstance(inputs, fx.Node) else list(inputs),))
        new.meta["mutates"] = pending.mutates if pending.kind != "hook" else (0,)
        new.meta["opaque_requires_grad"] = [o.requires_grad for o in pending.outputs]
        return new

    def _key(self, pending: Pending, path: str) -> str:
        for key, call in self.known.items():
            same = (call.kind, call.path, call.structure) == (pending.kind, path, pending.structure)
            if same and call.subject is pending.subject and key not in self.calls:
                return key
        return f"opaque_{len({**self.known, **self.calls})}"


def _hint(reason: str) -> str:
    if reason.startswith(HOOK_REASON):
        return "Register the backward hooks on submodules, or remove them from the model itself."
    if WITHOUT_VALUES in reason:
        return "Trace the model with real weights: on meta, what such a module gives back is not known."
    return (
        "Move what cannot be captured (control flow that depends on data, Python state that changes in forward) into a "
        "submodule of its own: a submodule can be kept whole."
    )
