"""The table of rules: one entry for each operator. An operator that is not here runs replicated.

An entry is the operator's name, its rule, and example arguments. The property test runs every strategy of every
example on shards and compares with the whole: adding an entry adds its test. In examples `f(4, 8)` is a floating
tensor, `i(9, 4, 8)` holds integers below 9, `b(4, 8)` booleans, and `pos(4, 8)` floating numbers between 1/2 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopart.sharding.rules import (
    algebra,
    attention,
    experts,
    indexing,
    normalization,
    reductions,
    routing,
    views,
    vocabulary,
)
from autopart.sharding.rules.labels import Rule
from autopart.sharding.rules.pointwise import DROPOUT, PRELU, pointwise
from autopart.sharding.rules.recurrent import RECURRENT


@dataclass(frozen=True)
class Entry:
    """One operator's rule; `examples` are arguments as Python text."""

    rule: Rule
    examples: tuple[str, ...]


TABLE: dict[Any, Entry] = {}


# Operators that a library registers itself, by name: they exist only where it is imported.
LIBRARY: dict[str, Entry] = {}
# Operator, which knows no double precision -> one that computes the same.
LIKE = {"aten::_grouped_mm": "transformers::grouped_mm_fallback"}


def _add(names: str, rule: Rule, *examples: str) -> None:
    for name in names.split():
        operator, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, operator, None)
        if packet is not None and (overload or "default") in packet.overloads():
            TABLE[getattr(packet, overload or "default")] = Entry(rule, examples)


def rule_of(target: Any) -> Rule | None:
    schema = getattr(target, "_schema", None)
    entry = TABLE.get(target) or (LIBRARY.get(LIKE.get(schema.name, schema.name)) if schema is not None else None)
    return None if entry is None else entry.rule


NONLINEAR = pointwise()
NONLINEAR_ZERO = pointwise(zero=True)  # f(0) = 0 with a finite derivative
LINEAR = pointwise([0], zero=True)
ADDITION = pointwise([0, 1], zero_when_all=True)
PRODUCT = pointwise([0], [1], zero=True)
QUOTIENT = pointwise([0])
ONE, POSITIVE = "f(4, 8, 8)", "pos(4, 8, 8)"
ODD = "f(3, 7)"
PAIRS = ("f(4, 8, 8), f(4, 8, 8)", "f(4, 8, 8), f(8, 1)", "f(8), f(4, 8, 8)", "f(3, 7), f(7)", "f(3, 7), f(3, 1)")
PAIR = PAIRS[:2]

# Pointwise.
_add(
    "relu tanh silu gelu sin abs square erf expm1 mish selu elu leaky_relu hardswish softsign", NONLINEAR_ZERO, ONE, ODD
)
_add("relu_ tanh_ silu_ gelu_ leaky_relu_ hardswish_ elu_", NONLINEAR_ZERO, ONE, ODD)
_add("relu6 relu6_", NONLINEAR_ZERO, ONE)
_add("sigmoid exp cos softplus log_sigmoid hardsigmoid sign floor round ceil exp2 logical_not", NONLINEAR, ONE)
_add("sigmoid_ exp_ hardsigmoid_", NONLINEAR, ONE)
_add("log rsqrt sqrt reciprocal log2 log1p", NONLINEAR, POSITIVE)
_add("pow.Tensor_Scalar", NONLINEAR, "f(4, 8, 8), 3.0", "f(4, 8, 8), 2")
_add("pow.Scalar", NONLINEAR, "2.0, f(4, 8, 8)")
_add("pow.Tensor_Tensor atan2 fmod.Tensor remainder.Tensor", NONLINEAR, "pos(4, 8, 8), pos(8, 8)")
_add("hardtanh hardtanh_", NONLINEAR_ZERO, "f(4, 8, 8), -1.0, 1.0", "f(3, 7), 0.5, 1.0")
_add("clamp clamp_ clip", NONLINEAR, "f(4, 8, 8), -0.5, 0.5")
_add("clamp_min clamp_max", NONLINEAR, "f(4, 8, 8), 0.25")
_add("neg clone contiguous detach alias positive", LINEAR, ONE, ODD)
_add("neg_", LINEAR, ONE)
_add("isnan isinf isfinite bitwise_not", NONLINEAR, "b(4, 8, 8)")
_add("to.dtype", LINEAR, "f(4, 8, 8), torch.float64", "f(4, 8, 8), torch.int64", "i(5, 8, 8), torch.float64")
_add("to.dtype_layout", LINEAR, "f(4, 8, 8), dtype=torch.float64")
_add("to.device", LINEAR, "f(4, 8, 8), torch.device('cpu'), torch.float64")
_add("_to_copy", LINEAR, "f(4, 8, 8), dtype=torch.float64")
_add("type_as", LINEAR, "f(4, 8, 8), f(2)")
_add("add.Tensor sub.Tensor", ADDITION, *PAIRS, "f(4, 8, 8), 1.0", "i(9, 4, 8), 1", "f(8, 8), f(8, 8), alpha=2")
_add("rsub.Tensor", ADDITION, *PAIR)
_add("rsub.Scalar add.Scalar sub.Scalar", pointwise(), "f(4, 8, 8), 1.0")
_add("add_.Tensor sub_.Tensor", ADDITION, *PAIR, "f(4, 8, 8), 1.0", "i(9, 8, 8), 1")
_add("mul.Tensor", PRODUCT, *PAIRS, "f(4, 8, 8), 0.5", "f(4, 8, 8), b(8, 8)", "f(4, 8, 8), f()")
_add("mul_.Tensor", pointwise([0], zero=True), *PAIR, "f(4, 8, 8), 0.5")
_add("mul.Scalar", LINEAR, "f(4, 8, 8), 0.5")
_add("div.Tensor div_.Tensor", QUOTIENT, "f(4, 8, 8), pos(4, 8, 8)", "f(4, 8, 8), pos(8, 1)", "f(4, 8, 8), 3.0")
_add("div.Scalar", QUOTIENT, "f(4, 8, 8), 3.0")
_add("div.Tensor_mode", NONLINEAR, "i(9, 4, 8), 2, rounding_mode='floor'")
_add("floor_divide", routing.FLOOR_DIVIDE, "i(9, 4, 8), 2")
_add("addcmul", pointwise(), "f(4, 8, 8), f(4, 8, 8), f(8, 8)")
_add("lerp.Scalar", pointwise(), "f(4, 8, 8), f(4, 8, 8), 0.25")
_add("maximum minimum max.other min.other", NONLINEAR, *PAIR)
_add("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", NONLINEAR, "i(3, 4, 8, 8), i(3, 8, 1)")
_add("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", NONLINEAR, "i(3, 4, 8, 8), 1")
_add("__and__.Tensor __or__.Tensor __xor__.Tensor", NONLINEAR, "b(4, 8, 8), b(8, 1)")
_add("logical_and logical_or logical_xor", NONLINEAR, "b(4, 8, 8), b(8, 1)")
_add("bitwise_and.Tensor bitwise_or.Tensor", NONLINEAR, "b(4, 8, 8), b(8, 1)")
_add("where.self", pointwise([1, 2]), "b(4, 8, 8), f(4, 8, 8), f(8, 8)", "b(8, 1), f(8, 8), f()")
_add("where.ScalarOther", pointwise(), "b(4, 8, 8), f(4, 8, 8), -5.0")
_add("where.ScalarSelf", pointwise(), "b(4, 8, 8), -5.0, f(4, 8, 8)")
_add("masked_fill.Scalar masked_fill_.Scalar", pointwise(), "f(4, 8, 8), b(8, 8), -5.0", "f(4, 8, 8), b(4, 1, 8), 0.0")
_add("masked_fill.Tensor", pointwise(), "f(4, 8, 8), b(8, 8), f()")
_add("nan_to_num", NONLINEAR, ONE)
_add("prelu", PRELU, "f(4, 8, 8), f(1)", "f(4, 8, 8), f(8)", "f(4, 12, 8, 3), f(12)", "f(3, 7), f(7)")
_add("copy_", pointwise([0, 1]), "f(4, 8, 8), f(8, 8)", "i(9, 4, 8), i(9, 4, 8)")
_add("fill_.Scalar", pointwise(), "f(4, 8, 8), 2.0")
_add("zero_", pointwise(), ONE)
_add("dropout dropout_", DROPOUT, "f(4, 8, 8), 0.0, True", "f(4, 8, 8), 0.5, False")

# Views, permutations, slices, lists.
_add(
    "view",
    views.view("size"),
    "f(4, 8, 32), [32, 32]",
    "f(4, 8, 32), [4, 8, 8, 4]",
    "f(4, 8, 3, 8), [4, 8, 24]",
    "f(4, 8, 50), [-1, 50]",
)
_add(
    "reshape",
    views.view("shape"),
    "f(4, 8, 8, 4), [4, 8, -1]",
    "f(32, 16), [4, 8, 16]",
    "f(4, 8, 7), [32, 7]",
    "f(8, 4, 6), [8, 24]",
    "f(2, 2, 4, 8), [2, 8, 8]",
)
_add("_unsafe_view", views.view("size"), "f(4, 8, 32), [32, 32]")
_add("flatten.using_ints", views.view(None), "f(4, 8, 4, 8), 1", "f(4, 8, 4, 8), 2, 3")
_add("unflatten.int", views.UNFLATTEN, "f(4, 8, 96), -1, [3, 32]", "f(32, 4), 0, [4, 8]")
_add("unsqueeze unsqueeze_", views.view(None), "f(4, 8, 8), 1", "f(4, 8), -1")
_add("squeeze.dim", views.SQUEEZE, "f(4, 1, 8), 1", "f(8, 4, 8), 1")
_add("squeeze", views.SQUEEZE, "f(4, 1, 8)")
_add("squeeze.dims", views.SQUEEZE, "f(4, 1, 8, 1), [1, 3]", "f(4, 1, 8), [0, 1]")
_add("transpose.int", views.permutation(views.transposed), "f(4, 7, 12), 1, 2", "f(4, 8, 12), 0, -1")
_add("permute", views.permutation(views.permuted), "f(4, 8, 12), [2, 0, 1]")
_add("t", views.permutation(views.transposed), "f(4, 8)")
_add(
    "slice.Tensor",
    views.SLICE,
    "f(4, 8, 16), 2, 0, 8",
    "f(4, 8, 16), 2, 8, 9223372036854775807",
    "f(4, 24), 1, 8, 16",
    "f(4, 8), 1, 0, 8",
    "f(4, 8), 1, 0, 8, 2",
    "f(4, 9), 1, 0, -1",
)
_add("select.int", views.SELECT, "f(4, 8, 12), 1, 2", "f(4, 8, 12), -1, 0")
_add("split.Tensor", views.PiecesRule(), "f(4, 8, 24), 8, 2", "f(4, 20, 3), 8, 1")
_add("split_with_sizes", views.PiecesRule(), "f(4, 8, 24), [16, 4, 4], 2")
_add("chunk", views.PiecesRule(), "f(4, 8, 24), 3, -1", "f(4, 8, 24), 2, 1")
_add("unbind.int", views.PiecesRule(removes_dim=True), "f(3, 4, 8)", "f(4, 2, 8), 1")
_add(
    "cat", views.JoinRule(), "[f(4, 8, 4), f(4, 8, 8)], -1", "[f(4, 8), f(4, 8), f(4, 8)], 1", "[f(4, 8), f(4, 0)], -1"
)
_add("stack", views.JoinRule(adds_dim=True), "[f(4, 8), f(4, 8)], 1", "[f(4, 8), f(4, 8)], -1")
_add("expand", indexing.EXPAND, "f(4, 1, 8), [4, 8, 8]", "f(1, 8), [4, -1, 8]")
_add("expand_as", indexing.EXPAND_AS, "f(4, 1, 8), f(4, 8, 8)")

# Matrix products and convolutions.
_add("linear", algebra.LINEAR, "f(4, 8, 16), f(12, 16), f(12)", "f(4, 8, 16), f(50, 16)", "f(8, 16), f(24, 16), f(24)")
_add("addmm", algebra.ADDMM, "f(12), f(8, 16), f(16, 12)", "f(8, 12), f(8, 16), f(16, 12)")
_add("mm", algebra.MM, "f(8, 16), f(16, 12)")
_add("bmm", algebra.BMM, "f(4, 8, 16), f(4, 16, 12)")
_add("baddbmm", algebra.BADDBMM, "f(4, 8, 12), f(4, 8, 16), f(4, 16, 12)", "f(4, 1, 12), f(4, 8, 16), f(4, 16, 12)")
_add(
    "matmul",
    algebra.MATMUL,
    "f(4, 8, 8, 16), f(4, 8, 16, 12)",
    "f(4, 8, 16), f(16, 12)",
    "f(8, 16), f(16)",
    "f(16), f(16)",
    "f(4, 1, 8, 4), f(8, 4, 12)",
)
_add("dot", algebra.DOT, "f(8), f(8)")
_add(
    "einsum", algebra.EINSUM, "'bik,bjk->bij', [f(4, 8, 16), f(4, 12, 16)]", "'bhk,hkn->bhn', [f(4, 8, 4), f(8, 4, 12)]"
)
_add(
    "conv2d",
    algebra.CONVOLUTION,
    "f(4, 8, 5, 5), f(12, 8, 3, 3), f(12)",
    "f(4, 8, 5, 5), f(8, 1, 3, 3), f(8), [1, 1], [1, 1], [1, 1], 8",
    "f(4, 8, 5, 5), f(16, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 4",
)
_add("conv1d", algebra.CONVOLUTION, "f(4, 8, 9), f(12, 8, 3), f(12)")
_add("conv3d", algebra.CONVOLUTION, "f(4, 8, 3, 3, 3), f(4, 8, 2, 2, 2)")
_add("conv2d.padding", algebra.CONVOLUTION, "f(4, 8, 5, 5), f(12, 8, 3, 3), f(12), [1, 1], 'same'")
_add("conv1d.padding", algebra.CONVOLUTION, "f(4, 8, 9), f(12, 8, 3), f(12), [1], 'same'")
_add("conv_transpose2d.input", algebra.TRANSPOSED_CONVOLUTION, "f(4, 8, 5, 5), f(8, 12, 2, 2), f(12), [2, 2]")
_add("conv_transpose1d", algebra.TRANSPOSED_CONVOLUTION, "f(4, 8, 5), f(8, 12, 2), f(12), [2]")

# Reductions and operators along one dimension.
_add("sum.dim_IntList mean.dim", reductions.SUM, "f(4, 8, 8), [-1], True", "f(4, 8, 8), [0, 1]")
_add("sum mean", reductions.SUM, "f(4, 8)")
_add("amax amin", reductions.REDUCTION, "f(4, 8, 8), [-1], True")
_add("max.dim min.dim", reductions.REDUCTION, "f(4, 8, 8), -1")
_add("argmax argmin", reductions.REDUCTION, "f(4, 8, 8), -1")
_add("any.dim all.dim", reductions.REDUCTION, "b(4, 8, 8), -1")
_add("prod.dim_int", reductions.REDUCTION, "f(4, 8, 8), 1")
_add("logsumexp", reductions.REDUCTION, "f(4, 8, 8), [1]")
_add("var.correction std.correction", reductions.REDUCTION, "f(4, 8, 8), [-1], correction=1, keepdim=True")
_add("linalg_vector_norm", reductions.REDUCTION, "f(4, 8, 8), 2, [-1], True")
_add("softmax.int log_softmax.int", reductions.ALONG_DIM, "f(4, 8, 8), -1")
_add("_softmax _log_softmax", reductions.ALONG_DIM, "f(4, 8, 8), -1, False")
_add("cumsum", routing.CUMSUM, "f(4, 8, 8), 1", "b(4, 8), -1", "f(4, 8, 8).detach(), 1, dtype=torch.int64")
_add("cumprod", reductions.ALONG_DIM, "f(4, 8, 8), 1")
_add("glu", reductions.GLU, "f(4, 8, 8), -1")
_add("roll", reductions.ROLL, "f(4, 8, 8), [2, 1], [0, 1]", "f(4, 8), [1]")
_add("flip", reductions.FLIP, "f(4, 8, 8), [1]")
_add(
    "pad", reductions.PAD, "f(4, 8, 8), [0, 0, 1, 2]", "f(4, 8, 8), [0, 0, 0, 0]", "f(4, 8, 8), [1, 1], 'constant', 2.0"
)
_add("constant_pad_nd", reductions.PAD, "f(4, 8, 8), [1, 1]")
_add("tril triu", reductions.TRIANGLE, "f(4, 8, 8)")
_add("max_pool2d", reductions.POOL_2D, "f(4, 8, 6, 6), [2, 2]")
_add("max_pool1d", reductions.POOL_1D, "f(4, 8, 6), [2]")
_add("avg_pool2d", reductions.AVERAGE_POOL_2D, "f(4, 8, 6, 6), [2, 2]")
_add("adaptive_avg_pool2d", reductions.AVERAGE_POOL_2D, "f(4, 8, 6, 6), [2, 2]")
_add("adaptive_avg_pool1d", reductions.AVERAGE_POOL_1D, "f(4, 8, 6), [2]")
_add("upsample_nearest2d.vec", reductions.AVERAGE_POOL_2D, "f(4, 8, 3, 3), None, [2.0, 2.0]")
_add("upsample_bilinear2d.vec", reductions.AVERAGE_POOL_2D, "f(4, 8, 3, 3), None, False, [2.0, 2.0]")

# Norms.
_add("layer_norm", normalization.LAYER_NORM, "f(4, 8, 16), [16], f(16), f(16)", "f(4, 8, 16), [16]")
_add("rms_norm", normalization.LAYER_NORM, "f(4, 8, 16), [16], f(16)")
_add("group_norm", normalization.GROUP_NORM, "f(4, 16, 5), 8, f(16), f(16)")
_add(
    "batch_norm",
    normalization.BATCH_NORM,
    "f(8, 8, 5), f(8), f(8), z(8), o(8), True, 0.1, 1e-5, False",
    "f(8, 8, 4, 4), f(8), f(8), z(8), o(8), True, 0.1, 1e-5, False",
    "f(8, 8), f(8), f(8), z(8), o(8), False, 0.1, 1e-5, False",
    "f(8, 8), None, None, None, None, True, 0.1, 1e-5, False",
)

# Attention.
_add(
    "scaled_dot_product_attention",
    attention.ATTENTION,
    "f(4, 8, 6, 4), f(4, 8, 5, 4), f(4, 8, 5, 3)",
    "f(4, 8, 8, 4), f(4, 8, 8, 4), f(4, 8, 8, 4), b1(4, 1, 8, 8)",
    "f(4, 8, 8, 4), f(4, 8, 8, 4), f(4, 8, 8, 4), f(1, 8, 8, 8)",
    "f(4, 8, 8, 4), f(4, 8, 8, 4), f(4, 8, 8, 4), None, 0.0, True",
    "f(4, 8, 6, 4), f(4, 4, 6, 4), f(4, 4, 6, 4), enable_gqa=True",
)

# Embeddings and losses.
_add(
    "embedding",
    vocabulary.EMBEDDING,
    "f(16, 8), i(16, 4, 8)",
    "f(16, 8), i(16, 4, 8), 3",
    "f(50, 8), i(50, 4, 8), 49",
    "f(16, 8), i(16, 4, 8), -1, True",
)
_add(
    "cross_entropy_loss",
    vocabulary.CROSS_ENTROPY,
    "f(16, 12), labels(12, 16)",
    "f(16, 13), labels(13, 16)",
    "1000 * f(16, 13), labels(13, 16), None, 1, -100",
    "f(16, 12), labels(12, 16), None, 2",
    "f(16, 12), labels(12, 16), None, 0",
    "f(8, 12, 4), labels(12, 8, 4)",
    "f(16, 12), labels(12, 16), None, 1, -100, 0.1",
)

# Experts.
GROUPED_EXAMPLE = "f(16, 8), f(4, 8, 12), torch.tensor([3, 3, 10, 16], dtype=torch.int32)"
LIBRARY["transformers::grouped_mm_fallback"] = Entry(experts.GROUPED, (GROUPED_EXAMPLE,))

# Indexing, filling.
_add(
    "index.Tensor",
    routing.INDEX_OF_SLOTS,
    "f(9, 8), [i(9, 4, 8)]",
    "f(8, 6, 4), [i(8, 16)]",
    "f(8, 6, 4), [i(8, 16) - 8]",
    "f(4, 9, 8), [None, i(9, 16)]",
    "f(4, 9, 7, 8), [None, i(9, 4, 1), i(7, 4)]",
    "f(9, 8, 7), [i(9, 4), None, i(7, 4)]",
    "f(8, 8), [i(8, 4, 1), i(8, 1, 8)]",
)
_add("gather", indexing.GATHER, "f(4, 8, 9), -1, i(9, 4, 8, 4)", "f(4, 9), 1, i(9, 4, 8)")
_add("index_select", indexing.INDEX_SELECT, "f(4, 9, 8), 1, i(9, 4)")
_add("topk", indexing.TOPK, "f(4, 8, 9), 2")
_add("sort", routing.SORT, "f(4, 8, 9)")
_add("argsort", routing.SORT, "f(4, 8, 9)")
_add("histc", routing.HISTOGRAM, "i(9, 16).double(), 9, 0, 8")
_add("index_put_", routing.INDEX_PUT, "f(6, 8), [torch.tensor([3, 5, 0, 1])], f(4, 8)")
_add("zeros ones", indexing.filled("size"), "[4, 8], dtype=torch.float64")
_add("full", indexing.filled("size"), "[4, 8], 2.0, dtype=torch.float64")
_add("new_zeros new_ones", indexing.filled("size"), "f(3), [4, 8]")
_add("new_full", indexing.filled("size"), "f(3), [4, 8], 2.0")
_add("zeros_like ones_like", indexing.filled(None, reads=True), "f(4, 8)")
_add("empty_like", routing.EMPTY_LIKE, "f(4, 8)")
_add("full_like", indexing.filled(None, reads=True), "f(4, 8), 2.0")

# Recurrent layers.
_RECURRENT = "f(4, 3, 8), {}, [f(4 * {g}, 8), f(4 * {g}, 4), f(4 * {g}), f(4 * {g})], True, 1, 0.0, True, False, True"
_add("lstm.input", RECURRENT, _RECURRENT.format("[f(1, 4, 4), f(1, 4, 4)]", g=4))
_add("gru.input", RECURRENT, _RECURRENT.format("f(1, 4, 4)", g=3))
_add("rnn_tanh.input", RECURRENT, _RECURRENT.format("f(1, 4, 4)", g=1))
