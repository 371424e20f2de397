"""Every strategy of every entry of the rule table: shard, execute, combine, compare; forward and gradients."""

from __future__ import annotations

import operator
import zlib
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (registers its operators)
from torch import fx
from torch.fx.node import map_aggregate

from autopart.graph import Capture
from autopart.sharding.layouts import Layout, Owned, Routed, local_shape
from autopart.sharding.operation import Operation, Result, Strategy, substitute
from autopart.sharding.program import Program
from autopart.sharding.rules.table import LIBRARY, TABLE, rule_of
from tests.sharding.holding import combine, decompose
from tests.sharding.ranks import ThreadRanks

RANKS = (2, 4)
TARGETS = {
    **TABLE,
    **{getattr(torch.ops, n.split("::")[0]).__getattr__(n.split("::")[1]).default: e for n, e in LIBRARY.items()},
}
CASES = [(target, example, t) for target, entry in TARGETS.items() for example in entry.examples for t in RANKS]


def example_arguments(text: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example's text stands for."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    def labels(classes: int, *shape: int) -> torch.Tensor:
        """Unequal numbers of ignored rows: all of the first quarter, some of the others."""
        found = torch.randint(classes, shape, generator=generator)
        found[: shape[0] // 4] = -100
        found[-1] = -100
        return found

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    def mask(*shape: int) -> torch.Tensor:
        """Booleans with at least one True in each row."""
        found = torch.rand(*shape, generator=generator) < 0.5
        found[..., 0] = True
        return found

    names = {
        "f": floats,
        "z": lambda *shape: torch.zeros(*shape, dtype=torch.float64),
        "o": lambda *shape: torch.ones(*shape, dtype=torch.float64),
        "pos": lambda *shape: (
            torch.rand(*shape, generator=generator, dtype=torch.float64) * 1.5 + 0.5
        ).requires_grad_(),
        "i": integers,
        "labels": labels,
        "b": lambda *shape: torch.rand(*shape, generator=generator) < 0.5,
        "b1": mask,
        "torch": torch,
    }

    def take(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    return eval(f"take({text})", {**names, "take": take})


def one_node(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program_, list[torch.Tensor]]:  # noqa: F821
    """A capture of a single operator, and its tensors."""
    graph = fx.Graph()
    tensors: list[torch.Tensor] = []

    def placeholder(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        tensors.append(arg)
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta = {"val": arg.detach(), "requires_grad": arg.requires_grad}
        return node

    made = [map_aggregate(a, placeholder) for a in args], {k: map_aggregate(v, placeholder) for k, v in kwargs.items()}
    node = graph.call_function(target, tuple(made[0]), made[1])
    with torch.enable_grad():
        value = target(*copies(args), **copies(kwargs))
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    node.meta = {
        "val": [v.detach() for v in values] if isinstance(value, (list, tuple)) else value.detach(),
        "requires_grad": [v.requires_grad for v in values],
        "grad_enabled": True,
        "autocast": (),
    }
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(values):
            got = graph.call_function(operator.getitem, (node, number))
            got.meta = {"val": item.detach(), "requires_grad": item.requires_grad}
    graph.output(())
    return Capture(graph, ()), tensors


def copies(value: Any) -> Any:
    """The same arguments with tensors that may be changed in place."""
    return map_aggregate(value, lambda x: x.clone() if isinstance(x, torch.Tensor) else x)


def own_seed(value: torch.Tensor, seed: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The gradient of a result: of one that is owned, right where this rank has values and anything elsewhere."""
    if layout.owned is None:
        return seed
    others = [d for d in range(value.dim()) if d != layout.owned.dim]
    mine = (value.detach() != 0).sum(others, keepdim=True) > 0
    return torch.where(mine, seed, torch.full_like(seed, 3.0))


def any_rows(layout: Layout) -> bool:
    """Whether how many rows a rank has depends on data."""
    return layout.routed is not None and layout.routed.role == "sent"


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors among arguments, in order."""
    found: list[torch.Tensor] = []
    map_aggregate(value, lambda x: found.append(x) if isinstance(x, torch.Tensor) else None)
    return found


def check_strategy(
    target: Any,
    strategy: Strategy,
    args: Any,
    kwargs: Any,
    tensors: list[torch.Tensor],
    t: int,
    mutated: frozenset[int],
) -> None:
    generator = torch.Generator().manual_seed(11)
    given = copies(args), copies(kwargs)
    value = target(*given[0], **given[1])
    whole = [v for v in (value if isinstance(value, (list, tuple)) else [value])]
    seeds = [torch.randn(v.shape, generator=generator, dtype=v.dtype) if v.requires_grad else None for v in whole]
    tracked = [x for x in tensors if x.requires_grad]
    reached = [(v, s) for v, s in zip(whole, seeds, strict=True) if s is not None]
    wanted = None
    if reached and tracked:
        wanted = torch.autograd.grad([v for v, _ in reached], tracked, [s for _, s in reached], allow_unused=True)
    held = [
        decompose(x.detach(), layout.forward, t, generator) for x, layout in zip(tensors, strategy.inputs, strict=True)
    ]
    held_seeds = [
        None if s is None else decompose(s, "R" if layout.owned else layout.gradient, t, generator)
        for s, layout in zip(seeds, strategy.outputs, strict=True)
    ]
    ranks = ThreadRanks(t)

    def program(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
        mine = [h[rank].requires_grad_(x.requires_grad) for h, x in zip(held, tensors, strict=True)]
        results: list[Any] = []
        first = [copies(x) for x in mine]
        for call in strategy.calls:

            def look(item: Any, fed: list[torch.Tensor] = first if call is strategy.calls[0] else mine) -> Any:
                return results[item.number] if isinstance(item, Result) else fed[item.number]

            results.append(call.target(*substitute(call.args, look), **substitute(call.kwargs or {}, look)))
        local = list(results[-1]) if isinstance(results[-1], (list, tuple)) else [results[-1]]
        pairs = [
            (v, own_seed(v, s[rank], layout))
            for v, s, layout in zip(local, held_seeds, strategy.outputs, strict=True)
            if s is not None
        ]
        found: Any = [None] * len(tracked)
        if pairs and tracked:
            leaves = [m for m in mine if m.requires_grad]
            found = torch.autograd.grad([v for v, _ in pairs], leaves, [s for _, s in pairs], allow_unused=True)
        return [v.detach() for v in local], list(found), [first[number].detach() for number in sorted(mutated)]

    outcomes = ranks.run(program)
    for number, (expected, layout) in enumerate(zip(whole, strategy.outputs, strict=True)):
        shards = [outcome[0][number] for outcome in outcomes]
        for shard in shards:
            assert tuple(shard.shape) == local_shape(expected.shape, layout, t) or any_rows(layout), "local shape"
        if target is not torch.ops.aten.empty_like.default:  # whose contents are anything
            close(combine(shards, layout.forward), expected.detach())
    for place, number in enumerate(sorted(mutated)):  # running statistics, and what is changed in place
        changed = [outcome[2][place] for outcome in outcomes]
        close(combine(changed, strategy.inputs[number].forward), tensors_in(given)[number].detach())
    if wanted is None:
        return
    layouts = [layout for x, layout in zip(tensors, strategy.inputs, strict=True) if x.requires_grad]
    for number, (expected, layout) in enumerate(zip(wanted, layouts, strict=True)):
        found = [outcome[1][number] for outcome in outcomes]
        if expected is None or all(f is None for f in found):
            assert all(f is None or not f.any() for f in found) and (expected is None or not expected.any())
            continue
        shape = local_shape(expected.shape, layout, t)
        filled = [torch.zeros(shape, dtype=torch.float64) if f is None else f for f in found]
        assert all(tuple(f.shape) == shape or any_rows(layout) for f in filled), "shape of a local gradient"
        close(combine(filled, layout.gradient, gradient=True), expected)


def accepted(strategy: Strategy, op: Operation) -> bool:
    """As in Program: what is changed in place is the result, in one layout."""
    return 0 not in op.mutated or strategy.inputs[0] == strategy.outputs[0]


@pytest.mark.parametrize(("target", "example", "t"), CASES, ids=lambda value: str(value))
def test_every_strategy_computes_what_the_operator_computes(target: Any, example: str, t: int) -> None:
    args, kwargs = example_arguments(example, zlib.crc32(example.encode()))
    capture, tensors = one_node(target, args, kwargs)
    program = Program(capture, t)
    ((node, found),) = program.strategies.items()
    strategies = list(found)
    op, rule = program.operations[node], rule_of(target)
    for number, value in enumerate(op.inputs):
        for dim in range(value.dim()):
            if value.shape[dim] % t == 0:
                for role in ("sorted", "sent"):
                    rows = rule.from_routed(op, number, Routed(role, dim, "somebody", (value.shape[dim],)))
                    strategies += [s for s in rows if s.name == "rows" and accepted(s, op)]
            if value.is_floating_point() and op.tracked_inputs[number]:
                owned = rule.from_owned(op, number, Owned(dim, "somebody"))
                strategies += [s for s in owned if accepted(s, op)]
    for strategy in strategies:
        try:
            check_strategy(target, strategy, args, kwargs, tensors, t, op.mutated)
        except Exception as error:
            raise AssertionError(f"{node.format_node()}\n{strategy}: {error}") from error


def test_every_rule_offers_more_than_replication() -> None:
    """A rule that never splits passes every numerical test."""
    for target, entry in TARGETS.items():
        offered = []
        for example in entry.examples:
            args, kwargs = example_arguments(example, 1)
            capture, _ = one_node(target, args, kwargs)
            ((_, strategies),) = Program(capture, 2).strategies.items()
            offered += [s for s in strategies if any(layout.split for layout in (*s.inputs, *s.outputs))]
        assert offered, f"{target} is never split"
