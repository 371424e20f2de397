"""Which operators of the evaluation capture are those of the training capture.

Names do not say: operators that only one capture has shift the numbers in them. Within one module call, operators with
the same target are matched in order.
"""

from __future__ import annotations

import difflib
from collections import defaultdict

from torch import fx

from autopart.graph import Capture


def twins(training: Capture, evaluation: Capture) -> dict[fx.Node, fx.Node]:
    """Call node of the evaluation capture -> its counterpart in the training capture, where there is one."""
    found: dict[fx.Node, fx.Node] = {}
    others = _by_call(training)
    for call, nodes in _by_call(evaluation).items():
        first, second = others.get(call, []), nodes
        targets = [str(n.target) for n in first], [str(n.target) for n in second]
        if targets[0] == targets[1]:
            found.update(zip(second, first, strict=True))
            continue
        for i, j, size in difflib.SequenceMatcher(None, *targets, autojunk=False).get_matching_blocks():
            found.update(zip(second[j : j + size], first[i : i + size], strict=True))
    return found


def _by_call(capture: Capture) -> dict[str, list[fx.Node]]:
    """Innermost module call -> its operators, in order."""
    calls: dict[str, list[fx.Node]] = defaultdict(list)
    for node in capture.calls:
        calls[next(reversed(node.meta.get("nn_module_stack") or {}), "")].append(node)
    return calls
