"""Faults of tensor splits, each an edit of one line, and the tests that should notice it soonest."""

from __future__ import annotations

from dataclasses import dataclass

Tests = tuple[str, str]
"""(file, what the names of the tests hold, as `pytest -k` takes it)"""


@dataclass(frozen=True)
class Fault:
    """An edit of the source.

    Attributes:
        file: Where, from the root of the repository.
        line: What is replaced, where it stands first.
        tests: Which should fail.
    """

    name: str
    file: str
    line: str
    instead: str
    tests: Tests


_RUNTIME, _SHARDING = "autopart/runtime/", "autopart/sharding/"
_RULES = f"{_SHARDING}rules/"
_COLLECTIVES, _OPERATORS = f"{_RUNTIME}collectives.py", f"{_RUNTIME}split_operators.py"
_CONVERSIONS = ("tests/sharding/test_conversions.py", "")
_PROCESSES = ("tests/sharding/test_processes.py", "")
_HAZARDS = ("tests/sharding/test_split_hazards.py", "InPlaceThroughViews-2")
_TIED = ("tests/sharding/test_split_hazards.py", "Tied-2")
_DROPOUT = ("tests/sharding/test_split_hazards.py", "dropped")
_LOADED = ("tests/runtime/test_tensor_ranks.py", "same_file and 2-2-2")
_DRAWN = ("tests/runtime/test_tensor_ranks.py", "initial_model")
_TRAINED = ("tests/runtime/test_tensor_ranks.py", "training_equals and 2-2-1f1b-4")
_DRAWING = ("tests/verification/test_tensor_models.py", "with_dropout")
_CLASSIC = ("tests/codegen/test_split_packages.py", "classic and gpt2-1")
_CONSTANTS = ("tests/codegen/test_split_packages.py", "constants_are_cut")
_VERIFIED = ("tests/verification/test_tensor_faults.py", "equals_its_model and 2-2-1f1b-4")
_EVALUATED = ("tests/sharding/test_evaluation.py", "computes and dropped-2")
_ALIKE = ("tests/sharding/test_evaluation.py", "same_conversions and dropped-2")
_SENT = ("tests/sharding/test_dispatch.py", "loops and random-2")
_SENT_EVENLY = ("tests/sharding/test_dispatch.py", "even_routing and 2")
_SENT_WHERE = ("tests/sharding/test_dispatch.py", "not_sent or sorted_by or stay")
_TOGETHER = ("tests/sharding/test_held.py", "stay_together or conversions_stay")


def _rules(words: str) -> Tests:
    return "tests/sharding/test_rules.py", words


CHANGES_OF_LAYOUT = [
    Fault(
        "copy_to without its all-reduce",
        _COLLECTIVES,
        "_convert(x, _same, _sum)",
        "_convert(x, _same, _same)",
        _CONVERSIONS,
    ),
    Fault(
        "all_reduce ignores partial gradients",
        _COLLECTIVES,
        "_sum if partial_gradient else _same",
        "_same",
        _CONVERSIONS,
    ),
    Fault(
        "all_gather ignores partial gradients",
        _COLLECTIVES,
        "(_sum_own if partial_gradient else _own)(dim, parts)",
        "_own(dim, parts)",
        _CONVERSIONS,
    ),
    Fault(
        "split gives gradients of the own shard alone",
        _COLLECTIVES,
        "(_between_zeros if partial_gradient else _gather)(dim, parts)",
        "_between_zeros(dim, parts)",
        _CONVERSIONS,
    ),
    Fault(
        "share divides the gradient too",
        _COLLECTIVES,
        "_divide if partial_gradient else _same",
        "_divide",
        _CONVERSIONS,
    ),
    Fault(
        "share_gradient does not divide",
        _COLLECTIVES,
        "_convert(x, _same, _divide)",
        "_convert(x, _same, _same)",
        _CONVERSIONS,
    ),
    Fault(
        "reduce_scatter without a gradient",
        _COLLECTIVES,
        "_convert(x, _sum_own(dim, parts), _gather(dim, parts))",
        "_convert(x, _sum_own(dim, parts), _between_zeros(dim, parts))",
        _CONVERSIONS,
    ),
    Fault(
        "processes reduce-scatter in another order",
        _COLLECTIVES,
        "torch.cat([p.reshape(-1) for p in pieces])",
        "torch.cat([p.reshape(-1) for p in pieces[::-1]])",
        _PROCESSES,
    ),
    Fault(
        "parts in the wrong order",
        f"{_RUNTIME}shards.py",
        "pieces.append(piece)",
        "pieces.insert(0, piece)",
        _CONVERSIONS,
    ),
    Fault(
        "padding is not zero",
        f"{_RUNTIME}shards.py",
        "piece.new_zeros(shape)",
        "piece.new_ones(shape)",
        _rules("linear"),
    ),
    Fault(
        "padding costs nothing",
        f"{_SHARDING}conversions.py",
        "t * local_size(kind.parts, t)",
        "sum(kind.parts)",
        _CONVERSIONS,
    ),
]

OPERATORS = [
    Fault("one random stream for all shards", _OPERATORS, "* ranks.size + ranks.rank", "* ranks.size", _DROPOUT),
    Fault(
        "padding_idx ignored",
        _OPERATORS,
        "found = torch.where(gives_gradient, found, found.detach())",
        "pass",
        _rules("embedding"),
    ),
    Fault(
        "mean over local rows in the loss",
        _OPERATORS,
        "count = group().all_reduce((target != ignore_index).sum())",
        "count = group().size * (target != ignore_index).sum()",
        _rules("cross_entropy"),
    ),
    Fault(
        "softmax without its maximum",
        _OPERATORS,
        ".unsqueeze(1)\n        exponents",
        ".unsqueeze(1) * 0\n        exponents",
        _rules("cross_entropy"),
    ),
    Fault(
        "ignored rows have gradients",
        _OPERATORS,
        "(gradient * valid).unsqueeze(1)",
        "(gradient * 1).unsqueeze(1)",
        _rules("cross_entropy"),
    ),
    Fault(
        "padded classes count",
        _OPERATORS,
        "logits = logits.masked_fill(padding, -torch.inf)",
        "pass",
        _rules("cross_entropy"),
    ),
    Fault(
        "batch norm: mean without its gradient",
        _OPERATORS,
        "all_reduce(x.sum(dims), partial_gradient=True)",
        "all_reduce(x.sum(dims))",
        _rules("batch_norm"),
    ),
    Fault("batch norm: biased running variance", _OPERATORS, "(count / (count - 1))", "1", _rules("batch_norm")),
    Fault(
        "batch norm: count of one rank",
        _OPERATORS,
        "count = group().size * x.numel()",
        "count = x.numel()",
        _rules("batch_norm"),
    ),
    Fault(
        "another rank's experts look up rows",
        _OPERATORS,
        "torch.where(mine, table[local.clamp(0, rows - 1)], zero)",
        "table[local.clamp(0, rows - 1)] + 0 * zero",
        _rules("index.Tensor"),
    ),
    Fault(
        "grouped rows not brought back", _OPERATORS, "found[(rows - before) % x.shape[0]]", "found", _rules("grouped")
    ),
]

RULES = [
    Fault(
        "mean not divided",
        f"{_RULES}reductions.py",
        "if mean and label in sums:",
        "if mean and label in ():",
        _rules("mean"),
    ),
    Fault(
        "bias added by every rank",
        f"{_RULES}labels.py",
        "inputs.append(P if number",
        "inputs.append(R_STAR if number",
        _rules("linear"),
    ),
    Fault(
        "unsplit operands have whole gradients",
        f"{_RULES}labels.py",
        "outputs[0] == P else R_STAR)",
        "outputs[0] == P else R)",
        _rules("linear"),
    ),
    Fault(
        "queries cut under is_causal",
        f"{_RULES}attention.py",
        'None if a["is_causal"] else "queries"',
        '"queries"',
        _rules("scaled_dot_product"),
    ),
    Fault(
        "mask cut by heads alone",
        f"{_RULES}attention.py",
        "(*batch(shape[:-2]), rows if shape[-2] != 1 else None, None)",
        "(*batch(shape[:-2]), None, None)",
        _rules("scaled_dot_product"),
    ),
    Fault(
        "softmax dimension cut",
        f"{_RULES}labels.py",
        "None if d in barred else",
        "None if d in () else",
        _rules("softmax"),
    ),
    Fault(
        "adding a number keeps zeros",
        f"{_RULES}pointwise.py",
        "return len(op.inputs) == 2\n    return op",
        "return True\n    return op",
        _rules("aten.add or aten.sub"),
    ),
    Fault(
        "a term is added to every summand",
        f"{_RULES}table.py",
        "ADDITION = pointwise([0, 1],",
        "ADDITION = pointwise([0],",
        _rules("aten.add or aten.sub"),
    ),
    Fault(
        "groups not divided",
        f"{_RULES}algebra.py",
        "op.call(groups=groups // op.t)",
        "op.call(groups=groups)",
        _rules("conv2d"),
    ),
    Fault(
        "shards of size one squeezed",
        f"{_RULES}views.py",
        "if shape[d] == 1]))",
        "]))",
        _rules("squeeze"),
    ),
    Fault(
        "integers are summed as summands",
        f"{_RULES}labels.py",
        "if not all(v.is_floating_point() for v in tensors):",
        "if False:",
        _rules("cumsum"),
    ),
    Fault(
        "view forgets what a dimension holds",
        f"{_RULES}views.py",
        "blocks % prefix == 0 and size % ((blocks // prefix) * t) == 0",
        "blocks % prefix == 0 and size % t == 0",
        _rules("view or reshape"),
    ),
    Fault(
        "slices keep their whole bounds",
        f"{_RULES}views.py",
        "end=local_size(source.parts[:last], op.t)",
        "end=end",
        _rules("slice"),
    ),
    Fault(
        "nothing is ever split", f"{_RULES}labels.py", "label is None or (len", "True or (len", _rules("offers_more")
    ),
]

REWRITING = [
    Fault(
        "conversions survive changes in place",
        f"{_SHARDING}rewrite.py",
        "                aliases.version(source, user),\n",
        "                0,\n",
        _HAZARDS,
    ),
    Fault(
        "changed memory is converted",
        f"{_SHARDING}aliases.py",
        "return (user, number) in self._edges and bool(self.changes(self._operands[user][number]))",
        "return False",
        _HAZARDS,
    ),
    Fault(
        "operators of other shapes are alike",
        f"{_SHARDING}operation.py",
        "return target, own, other, tensors, flags, context",
        "return target, own, other, flags, context",
        _HAZARDS,
    ),
    Fault(
        "evaluation takes strategies of its own",
        f"{_SHARDING}rewrite.py",
        "following(program, choice.state, wanted)",
        "following(program, choice.state)",
        _ALIKE,
    ),
    Fault(
        "results that are summands are not summed",
        f"{_SHARDING}program.py",
        "if number == self._loss or layout.partial:",
        "if False:",
        _TIED,
    ),
    Fault(
        "evaluation leaves results in shards",
        f"{_SHARDING}program.py",
        "layout.split is None or self._training",
        "True",
        _EVALUATED,
    ),
    Fault(
        "calls of one operator may be separated",
        f"{_SHARDING}colocation.py",
        "(*program.capture.colocated, *parts)",
        "program.capture.colocated",
        _TOGETHER,
    ),
    Fault(
        "a conversion may be separated from a change",
        f"{_SHARDING}colocation.py",
        "together.union(changes[0].name, node.name)",
        "pass",
        _TOGETHER,
    ),
]

JOINING = [
    Fault(
        "weights are those of the next rank",
        f"{_RUNTIME}weights.py",
        "target.copy_(own_part(pipeline, name, tensor, rank))",
        "target.copy_(own_part(pipeline, name, tensor, (rank + 1) % pipeline.tensor))",
        _LOADED,
    ),
    Fault(
        "saved parts in the wrong order",
        f"{_RUNTIME}weights.py",
        "join(parts, shard.dim, shard.parts)",
        "join(parts, shard.dim, shard.parts[::-1])",
        _LOADED,
    ),
    Fault(
        "saved shards in the wrong order of ranks",
        f"{_RUNTIME}weights.py",
        "join(parts, shard.dim, shard.parts)",
        "join(parts[::-1], shard.dim, shard.parts)",
        _LOADED,
    ),
    Fault(
        "all ranks start from the first one's part",
        f"{_RUNTIME}initialization.py",
        "own_part(pipeline, name, drawn, rank)",
        "own_part(pipeline, name, drawn, 0)",
        _DRAWN,
    ),
    Fault(
        "gradients of a tied weight stay in their stages",
        f"{_RUNTIME}ties.py",
        "dist.all_reduce(total, group=group)",
        "pass",
        _TRAINED,
    ),
    Fault(
        "gradients of a tied weight are summed over ranks",
        f"{_RUNTIME}mesh.py",
        "[[self.process(place, rank) for place in places] for rank in range(self.ranks)]",
        "[[self.process(place, rank) for place in places for rank in range(self.ranks)]]",
        _TRAINED,
    ),
    Fault(
        "scattered values in the wrong order",
        f"{_RUNTIME}boundary.py",
        "collectives.split(real.flatten(), 0)",
        "collectives.split(real.flatten().flip(0), 0)",
        _TRAINED,
    ),
    Fault(
        "gradients of scattered values are summed",
        f"{_RUNTIME}boundary.py",
        "collectives.all_gather(wire, 0, (prod(shape),))",
        "collectives.all_gather(wire, 0, (prod(shape),), partial_gradient=True)",
        _TRAINED,
    ),
    Fault(
        "ranks draw differently what they hold alike",
        f"{_RUNTIME}boundary.py",
        "with seeded(self.work.seed, self.work.step, self.index, number, device",
        "with seeded(self.work.seed, self.work.step, self.index, number, collectives.group().rank, device",
        _DRAWING,
    ),
    Fault(
        "copy_to is not written into the package",
        "autopart/codegen/program.py",
        "same := _unchanged(node, arguments)",
        'same := arguments.get("x" if "copy_to" in str(node.target) else None, _unchanged(node, arguments))',
        _CLASSIC,
    ),
    Fault(
        "the package forgets the parts of fused weights",
        "autopart/codegen/table.py",
        "tuple(int(part) for part in split.parts)",
        "(sum(split.parts),)",
        _CLASSIC,
    ),
    Fault(
        "the package calls shards of a result whole",
        "autopart/codegen/table.py",
        'held = "" if split is None else',
        'held = "" if True else',
        _CLASSIC,
    ),
    Fault(
        "constants are those of another rank",
        "autopart/codegen/data.py",
        "cut(whole, split.dim, split.parts, r, len(ranks))",
        "cut(whole, split.dim, split.parts, ranks[-1 - r], len(ranks))",
        _CONSTANTS,
    ),
    Fault(
        "outputs are joined in the wrong order of ranks",
        "autopart/verification/results.py",
        "join(parts, held.shard.dim, held.shard.parts))]",
        "join(parts[::-1], held.shard.dim, held.shard.parts))]",
        _VERIFIED,
    ),
]

_DISPATCH, _ROUTING = f"{_RUNTIME}dispatch.py", f"{_RULES}routing.py"
EXPERTS = [
    Fault("sent rows stay in the order of ranks", _DISPATCH, "rows[_by_expert(rows, ends)]", "rows", _SENT),
    Fault("returned rows stay sorted by expert", _DISPATCH, "x[_by_expert(x, ends).argsort()]", "x", _SENT),
    Fault("sent rows meet another rank's ends", _DISPATCH, "chunk(ranks.size, 1)[ranks.rank]", "chunk(2, 1)[0]", _SENT),
    Fault(
        "ends of sent rows are one rank's",
        _DISPATCH,
        "torch.stack(group().all_gather(ends))",
        "torch.stack([ends] * group().size)",
        _SENT,
    ),
    Fault(
        "gradients of sent rows are not returned",
        _COLLECTIVES,
        "return _convert(x, move, back)",
        "return _convert(x, move, lambda ranks, g: g.new_zeros(sum(sent), *g.shape[1:]))",
        _SENT,
    ),
    Fault(
        "bytes of sent rows are those of all ranks",
        f"{_SHARDING}describe.py",
        "elements = t * prod(source.shape)",
        "elements = t * t * prod(source.shape)",
        _SENT_EVENLY,
    ),
    Fault(
        "rows are sent by what they are not sorted by",
        _ROUTING,
        'routed.role == "sorted" and _sorted_by(op.operands[0], routed.sort)',
        'routed.role == "sorted"',
        _SENT_WHERE,
    ),
    Fault(
        "rows sorted downwards are sent",
        _ROUTING,
        'not Operation(source, 1).arguments["descending"]',
        "True",
        _SENT_WHERE,
    ),
    Fault(
        "slots of one token on two ranks",
        _ROUTING,
        "all(part % (k * op.t) == 0 for part in routed.parts)",
        "all(part % k == 0 for part in routed.parts)",
        _SENT_WHERE,
    ),
    Fault(
        "a cut between stages tears sent rows from their readers",
        f"{_SHARDING}colocation.py",
        'layout.routed.role == "sent"',
        "False",
        _SENT_WHERE,
    ),
]

FAULTS = [*CHANGES_OF_LAYOUT, *OPERATORS, *RULES, *REWRITING, *JOINING, *EXPERTS]
