"""One capture: the flat call is exported under the patches, then lowered to the conventions of `autopart.graph`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from autopart.errors import AutopartError, CaptureError
from autopart.graph import OpaqueCall
from autopart.tracer.call import Call, FlatCall, Recording
from autopart.tracer.errors import Uncapturable
from autopart.tracer.lower import Lowering
from autopart.tracer.stamps import stamped_nodes
from autopart.tracer.state import StateTable


class Capturer:
    """Captures one model in both modes; what was learnt in the first (opaque modules) holds in the second."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        state: StateTable,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        training: bool,
        notes: list[str],
    ) -> None:
        self.model = model
        self.call = call
        self.state = state
        self.loss_fn = loss_fn
        self.training = training
        self.notes = notes
        self.opaque_calls: dict[str, OpaqueCall] = {}

    def capture(self, train_mode: bool) -> tuple[fx.Graph, Recording]:
        """The graph of one mode.

        Raises:
            CaptureError: The model cannot be captured in this mode.
        """
        self.model.train(train_mode)
        record = Recording()
        flat = FlatCall(self.model, self.call.structure, record, training=self.training, loss_fn=self.loss_fn)
        flat.training = train_mode
        try:
            with stamped_nodes([]):
                program = torch.export.export(flat, tuple(t.detach() for t in self.call.tensors), strict=False)
            graph = Lowering(program, self.state, self.call.names, record.reassigned, self._rewrite).run()
        except Exception as error:
            if record.error is not None:
                raise record.error from None
            if isinstance(error, AutopartError):
                raise
            reason = error.reason if isinstance(error, Uncapturable) else str(error).split("\n")[0]
            raise CaptureError(f"{type(self.model).__name__} cannot be captured: {reason}") from error
        return graph, record

    def _rewrite(self, graph: fx.Graph, node: fx.Node, value: Callable[[Any], Any]) -> fx.Node | None:
        raise Uncapturable(None, f"unexpected {node.target}")
