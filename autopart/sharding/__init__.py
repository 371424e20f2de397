"""Tensor splits: layouts of every value on t ranks, one rule for each operator family, and the rewritten local graph.

How to use it:

    program = Program.of(graph, t)           # the whole problem: explore once for each tensor degree
    program.strategies[node]                 # call node -> legal strategies; [0] is fully replicated
    program.layouts[node]                    # placeholder or get_attr node -> layouts it may be held in
    for edge in program.edges(): ...         # every place where a value is read: source, user, number

A choice is one strategy for each call node and one layout for each state entry. Over an edge, the value goes from the
layout its producer gives (`strategy.outputs[i]`, or the held layout) to the one its reader takes
(`strategy.inputs[edge.number]`, for the output node `R`), at the price `conversions(a, b, value, t, link,
program.differentiable(edge))`. Readers that take a value in one layout share one conversion. Over an edge with
`program.fixed(edge)` both layouts must be equal, and nothing becomes owned that is not (`convertible(a, b)`). `getitem`
nodes have no strategy: they are results of their producer (`producer_of`). Result n of the model is read in
`program.result(n, layout)`.

    choice = Choice(state={"t0": S(0, 64)}, strategies={node.name: strategy, ...})
    local = rewrite(graph, choice, t)        # a LocalGraph: a Graph with local shapes and explicit collectives
    collectives_of(local)                    # what it sends, both ways
    describe(graph, choice, t)               # what is split how, in words
    state, strategies = written(graph, choice)         # as text, for a plan ...
    choice = chosen(graph, t, state, strategies)       # ... and back
"""

from autopart.sharding.alike import alike
from autopart.sharding.choice import Choice, choose, following, random_choice, replicated_choice
from autopart.sharding.conversions import Conversion, Price, conversion, conversions
from autopart.sharding.describe import Sent, collectives_of, describe, sent_to_experts, word
from autopart.sharding.layouts import (
    R_STAR,
    Layout,
    Owned,
    P,
    R,
    Routed,
    S,
    Split,
    convertible,
    local_shape,
    renamed,
    shards,
)
from autopart.sharding.operation import Operation, Strategy
from autopart.sharding.program import Edge, Program, is_getitem, layout_of, producer_of, results_of
from autopart.sharding.rewrite import LocalGraph, rewrite
from autopart.sharding.written import chosen, written

__all__ = [
    "R_STAR",
    "Choice",
    "Conversion",
    "Edge",
    "Layout",
    "LocalGraph",
    "Operation",
    "Owned",
    "P",
    "Price",
    "Program",
    "R",
    "Routed",
    "S",
    "Sent",
    "Split",
    "Strategy",
    "alike",
    "choose",
    "chosen",
    "collectives_of",
    "conversion",
    "conversions",
    "convertible",
    "describe",
    "following",
    "is_getitem",
    "layout_of",
    "local_shape",
    "producer_of",
    "random_choice",
    "renamed",
    "replicated_choice",
    "results_of",
    "rewrite",
    "sent_to_experts",
    "shards",
    "word",
    "written",
]
