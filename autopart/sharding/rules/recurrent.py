"""Recurrent layers: the batch may be cut; their gates need the whole hidden state of each step."""

from __future__ import annotations

from autopart.sharding.operation import Operation
from autopart.sharding.rules.labels import LabelRule, Labels, Names


def recurrent(op: Operation) -> Names:
    """`lstm`, `gru`, `rnn_tanh`, `rnn_relu` on [rows, steps, width] or [steps, rows, width]."""
    a = op.arguments
    states = a["hx"] if isinstance(a["hx"], (list, tuple)) else [a["hx"]]
    state_numbers = {item.number for item in states}
    rows: str | None = "rows" if op.inputs[0].dim() == 3 and not (a["train"] and a["dropout"]) else None
    sequence: Labels = (rows, None, None) if a["batch_first"] else (None, rows, None)
    if op.inputs[0].dim() == 2:
        sequence = (None, None)
    state: Labels = tuple(rows if i == 1 else None for i in range(op.outputs[-1].dim()))
    inputs: list[Labels] = []
    for number, value in enumerate(op.inputs):
        if number == 0:
            inputs.append(sequence)
        else:
            inputs.append(state if number in state_numbers else (None,) * value.dim())
    return Names(tuple(inputs), (sequence, *(state for _ in op.outputs[1:])))


RECURRENT = LabelRule(recurrent)
