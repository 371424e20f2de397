"""How each operator is written: a table from ATen overloads to torch, `F.` and tensor-method spelling.

Each entry is one Python call or expression whose names are arguments of the operator's schema. Arguments that are left
out or equal to the schema's default are dropped; an entry is used if it names every argument that is then left, else
the next one is tried. `*size` spreads a list. What has no entry is written as `torch.ops.aten...`: correct, though ugly.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

TABLE: dict[str, tuple[str, ...]] = {
    # arithmetic
    "aten::add": ("self + other", "torch.add(self, other, alpha=alpha)"),
    "aten::sub": ("self - other", "torch.sub(self, other, alpha=alpha)"),
    "aten::rsub": ("other - self", "torch.rsub(self, other, alpha=alpha)"),
    "aten::mul": ("self * other",),
    "aten::div": ("self / other", "torch.div(self, other, rounding_mode=rounding_mode)"),
    "aten::floor_divide": ("self // other",),
    "aten::remainder": ("self % other",),
    "aten::matmul": ("self @ other",),
    "aten::neg": ("-self",),
    "aten::bitwise_not": ("~self",),
    "aten::bitwise_and": ("self & other",),
    "aten::bitwise_or": ("self | other",),
    "aten::bitwise_xor": ("self ^ other",),
    "aten::__and__": ("self & other",),
    "aten::__or__": ("self | other",),
    "aten::pow.Tensor_Scalar": ("self**exponent",),
    "aten::pow.Tensor_Tensor": ("self**exponent",),
    "aten::pow.Scalar": ("self**exponent",),
    "aten::eq": ("self == other",),
    "aten::ne": ("self != other",),
    "aten::lt": ("self < other",),
    "aten::le": ("self <= other",),
    "aten::gt": ("self > other",),
    "aten::ge": ("self >= other",),
    # in place
    "aten::add_": ("self.add_(other, alpha=alpha)",),
    "aten::sub_": ("self.sub_(other, alpha=alpha)",),
    "aten::mul_": ("self.mul_(other)",),
    "aten::div_": ("self.div_(other, rounding_mode=rounding_mode)",),
    "aten::copy_": ("self.copy_(src, non_blocking=non_blocking)",),
    "aten::fill_": ("self.fill_(value)",),
    "aten::zero_": ("self.zero_()",),
    "aten::relu_": ("F.relu_(self)",),
    "aten::masked_fill_": ("self.masked_fill_(mask, value)",),
    "aten::clamp_": ("self.clamp_(min, max)",),
    "aten::bernoulli_.float": ("self.bernoulli_(p)",),
    # torch
    "aten::addmm": ("torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)",),
    "aten::baddbmm": ("torch.baddbmm(self, batch1, batch2, beta=beta, alpha=alpha)",),
    "aten::bmm": ("torch.bmm(self, mat2)",),
    "aten::mm": ("torch.mm(self, mat2)",),
    "aten::einsum": ("torch.einsum(equation, *tensors)",),
    "aten::cat": ("torch.cat(tensors, dim=dim)",),
    "aten::stack": ("torch.stack(tensors, dim=dim)",),
    "aten::where": ("torch.where(condition, self, other)",),
    "aten::arange": ("torch.arange(end, dtype=dtype, device=device)",),
    "aten::arange.start": ("torch.arange(start, end, dtype=dtype, device=device)",),
    "aten::arange.start_step": ("torch.arange(start, end, step, dtype=dtype, device=device)",),
    "aten::linspace": ("torch.linspace(start, end, steps, dtype=dtype, device=device)",),
    "aten::zeros": ("torch.zeros(size, dtype=dtype, device=device)",),
    "aten::ones": ("torch.ones(size, dtype=dtype, device=device)",),
    "aten::full": ("torch.full(size, fill_value, dtype=dtype, device=device)",),
    "aten::empty.memory_format": ("torch.empty(size, dtype=dtype, device=device)",),
    "aten::eye": ("torch.eye(n, dtype=dtype, device=device)",),
    "aten::eye.m": ("torch.eye(n, m, dtype=dtype, device=device)",),
    "aten::rand": ("torch.rand(size, dtype=dtype, device=device)",),
    "aten::randn": ("torch.randn(size, dtype=dtype, device=device)",),
    "aten::scalar_tensor": ("torch.scalar_tensor(s, dtype=dtype, device=device)",),
    "aten::zeros_like": ("torch.zeros_like(self, dtype=dtype, device=device)",),
    "aten::ones_like": ("torch.ones_like(self, dtype=dtype, device=device)",),
    "aten::full_like": ("torch.full_like(self, fill_value, dtype=dtype, device=device)",),
    "aten::empty_like": ("torch.empty_like(self, dtype=dtype, device=device)",),
    "aten::rand_like": ("torch.rand_like(self, dtype=dtype, device=device)",),
    "aten::randn_like": ("torch.randn_like(self, dtype=dtype, device=device)",),
    "aten::outer": ("torch.outer(self, vec2)",),
    "aten::max.other": ("torch.maximum(self, other)",),
    "aten::min.other": ("torch.minimum(self, other)",),
    "aten::constant_pad_nd": ("F.pad(self, pad, value=value)",),
    "aten::maximum": ("torch.maximum(self, other)",),
    "aten::minimum": ("torch.minimum(self, other)",),
    "aten::view_as_complex": ("torch.view_as_complex(self)",),
    "aten::view_as_real": ("torch.view_as_real(self)",),
    "aten::polar": ("torch.polar(abs, angle)",),
    "aten::complex": ("torch.complex(real, imag)",),
    "aten::bernoulli": ("torch.bernoulli(self)",),
    "aten::diff": ("torch.diff(self, n, dim, prepend, append)",),
    "aten::linalg_vector_norm": ("torch.linalg.vector_norm(self, ord, dim, keepdim, dtype=dtype)",),
    "aten::logical_not": ("torch.logical_not(self)",),
    "aten::logical_and": ("torch.logical_and(self, other)",),
    "aten::logical_or": ("torch.logical_or(self, other)",),
    "aten::broadcast_tensors": ("torch.broadcast_tensors(*tensors)",),
    "aten::meshgrid": ("torch.meshgrid(*tensors)",),
    "aten::meshgrid.indexing": ("torch.meshgrid(*tensors, indexing=indexing)",),
    # views
    "aten::view": ("self.view(*size)",),
    "aten::view.dtype": ("self.view(dtype)",),
    "aten::_unsafe_view": ("self.view(*size)",),
    "aten::reshape": ("self.reshape(*shape)",),
    "aten::view_as": ("self.view_as(other)",),
    "aten::expand": ("self.expand(*size)",),
    "aten::expand_as": ("self.expand_as(other)",),
    "aten::permute": ("self.permute(*dims)",),
    "aten::transpose.int": ("self.transpose(dim0, dim1)",),
    "aten::t": ("self.t()",),
    "aten::numpy_T": ("self.T",),
    "aten::mT": ("self.mT",),
    "aten::unsqueeze": ("self.unsqueeze(dim)",),
    "aten::squeeze": ("self.squeeze()",),
    "aten::squeeze.dim": ("self.squeeze(dim)",),
    "aten::squeeze.dims": ("self.squeeze(dim)",),
    "aten::flatten.using_ints": ("self.flatten(start_dim, end_dim)",),
    "aten::unflatten.int": ("self.unflatten(dim, sizes)",),
    "aten::narrow": ("self.narrow(dim, start, length)",),
    "aten::split.Tensor": ("self.split(split_size, dim=dim)",),
    "aten::split.sizes": ("self.split(split_size, dim=dim)",),
    "aten::split_with_sizes": ("self.split_with_sizes(split_sizes, dim=dim)",),
    "aten::chunk": ("self.chunk(chunks, dim=dim)",),
    "aten::tensor_split.sections": ("self.tensor_split(sections, dim=dim)",),
    "aten::tensor_split.indices": ("self.tensor_split(indices, dim=dim)",),
    "aten::unbind.int": ("self.unbind(dim)",),
    "aten::diagonal": ("self.diagonal(offset, dim1, dim2)",),
    "aten::unfold": ("self.unfold(dimension, size, step)",),
    "aten::movedim.int": ("self.movedim(source, destination)",),
    "aten::movedim.intlist": ("self.movedim(source, destination)",),
    "aten::detach": ("self.detach()",),
    "aten::real": ("self.real",),
    "aten::imag": ("self.imag",),
    "aten::conj": ("self.conj()",),
    # copies
    "aten::clone": ("self.clone(memory_format=memory_format)",),
    "aten::lift_fresh_copy": ("self.clone()",),
    "aten::contiguous": ("self.contiguous(memory_format=memory_format)",),
    "aten::repeat": ("self.repeat(*repeats)",),
    "aten::repeat_interleave.self_int": ("self.repeat_interleave(repeats, dim=dim, output_size=output_size)",),
    "aten::roll": ("self.roll(shifts, dims)",),
    "aten::flip": ("self.flip(dims)",),
    "aten::tile": ("self.tile(dims)",),
    "aten::tril": ("self.tril(diagonal)",),
    "aten::triu": ("self.triu(diagonal)",),
    "aten::to.dtype": ("self.to(dtype, copy=copy, memory_format=memory_format)",),
    "aten::to.dtype_layout": ("self.to(dtype, copy=copy, memory_format=memory_format)",),
    "aten::to.device": ("self.to(dtype, copy=copy, memory_format=memory_format)",),
    "aten::type_as": ("self.type_as(other)",),
    "aten::new_zeros": ("self.new_zeros(size, dtype=dtype)",),
    "aten::new_ones": ("self.new_ones(size, dtype=dtype)",),
    "aten::new_full": ("self.new_full(size, fill_value, dtype=dtype)",),
    "aten::new_empty": ("self.new_empty(size, dtype=dtype)",),
    # pointwise
    **{
        f"aten::{name}": (f"torch.{name}(self)",)
        for name in [
            "abs",
            "exp",
            "log",
            "log1p",
            "expm1",
            "sqrt",
            "rsqrt",
            "sin",
            "cos",
            "tan",
            "tanh",
            "sigmoid",
            "erf",
            "floor",
            "ceil",
            "round",
            "sign",
            "reciprocal",
            "square",
            "isnan",
            "isinf",
            "isfinite",
            "atan",
            "sinh",
            "cosh",
            "log2",
        ]
    },
    "aten::clamp": ("self.clamp(min=min, max=max)",),
    "aten::clamp_min": ("self.clamp_min(min)",),
    "aten::clamp_max": ("self.clamp_max(max)",),
    "aten::masked_fill": ("self.masked_fill(mask, value)",),
    "aten::lerp": ("torch.lerp(self, end, weight)",),
    # reductions
    "aten::sum": ("self.sum(dtype=dtype)",),
    "aten::sum.dim_IntList": ("self.sum(dim, keepdim=keepdim, dtype=dtype)",),
    "aten::mean": ("self.mean(dtype=dtype)",),
    "aten::mean.dim": ("self.mean(dim, keepdim=keepdim, dtype=dtype)",),
    "aten::var.correction": ("self.var(dim, correction=correction, keepdim=keepdim)",),
    "aten::std.correction": ("self.std(dim, correction=correction, keepdim=keepdim)",),
    "aten::max": ("self.max()",),
    "aten::min": ("self.min()",),
    "aten::max.dim": ("self.max(dim, keepdim=keepdim)",),
    "aten::min.dim": ("self.min(dim, keepdim=keepdim)",),
    "aten::amax": ("self.amax(dim, keepdim=keepdim)",),
    "aten::amin": ("self.amin(dim, keepdim=keepdim)",),
    "aten::argmax": ("self.argmax(dim, keepdim=keepdim)",),
    "aten::argmin": ("self.argmin(dim, keepdim=keepdim)",),
    "aten::any": ("self.any()",),
    "aten::any.dim": ("self.any(dim, keepdim=keepdim)",),
    "aten::all": ("self.all()",),
    "aten::all.dim": ("self.all(dim, keepdim=keepdim)",),
    "aten::cumsum": ("self.cumsum(dim, dtype=dtype)",),
    "aten::logsumexp": ("self.logsumexp(dim, keepdim=keepdim)",),
    "aten::topk": ("self.topk(k, dim=dim, largest=largest, sorted=sorted)",),
    "aten::sort": ("self.sort(dim, descending=descending)",),
    "aten::argsort": ("self.argsort(dim, descending=descending)",),
    # indexing
    "aten::gather": ("self.gather(dim, index)",),
    "aten::index_select": ("self.index_select(dim, index)",),
    "aten::index_add": ("self.index_add(dim, index, source, alpha=alpha)",),
    "aten::index_add_": ("self.index_add_(dim, index, source, alpha=alpha)",),
    "aten::scatter.src": ("self.scatter(dim, index, src)",),
    "aten::scatter.value": ("self.scatter(dim, index, value)",),
    "aten::scatter_.src": ("self.scatter_(dim, index, src)",),
    "aten::scatter_.value": ("self.scatter_(dim, index, value)",),
    "aten::scatter_add": ("self.scatter_add(dim, index, src)",),
    "aten::scatter_add_": ("self.scatter_add_(dim, index, src)",),
    # torch.nn.functional
    "aten::linear": ("F.linear(input, weight, bias)",),
    "aten::embedding": (
        "F.embedding(indices, weight, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)",
    ),
    "aten::one_hot": ("F.one_hot(self, num_classes)",),
    **{
        f"aten::conv{n}d": (
            f"F.conv{n}d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)",
        )
        for n in (1, 2, 3)
    },
    "aten::scaled_dot_product_attention": (
        "F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, "
        "is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)",
    ),
    "aten::layer_norm": ("F.layer_norm(input, normalized_shape, weight, bias, eps=eps)",),
    "aten::group_norm": ("F.group_norm(input, num_groups, weight, bias, eps=eps)",),
    "aten::rms_norm": ("F.rms_norm(input, normalized_shape, weight, eps=eps)",),
    "aten::batch_norm": (
        "F.batch_norm(input, running_mean, running_var, weight, bias, training=training, momentum=momentum, eps=eps)",
    ),
    "aten::dropout": ("F.dropout(input, p, training=train)",),
    "aten::softmax.int": ("F.softmax(self, dim=dim, dtype=dtype)",),
    "aten::log_softmax.int": ("F.log_softmax(self, dim=dim, dtype=dtype)",),
    "aten::relu": ("F.relu(self)",),
    "aten::gelu": ("F.gelu(self, approximate=approximate)",),
    "aten::silu": ("F.silu(self)",),
    "aten::silu_": ("F.silu(self, inplace=True)",),
    "aten::mish": ("F.mish(self)",),
    "aten::softplus": ("F.softplus(self, beta=beta, threshold=threshold)",),
    "aten::log_sigmoid": ("F.logsigmoid(self)",),
    "aten::leaky_relu": ("F.leaky_relu(self, negative_slope)",),
    "aten::hardswish": ("F.hardswish(self)",),
    "aten::hardsigmoid": ("F.hardsigmoid(self)",),
    "aten::hardtanh": ("F.hardtanh(self, min_val, max_val)",),
    "aten::elu": ("F.elu(self, alpha)",),
    "aten::pad": ("F.pad(self, pad, mode=mode, value=value)",),
    "aten::max_pool2d": (
        "F.max_pool2d(self, kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)",
    ),
    "aten::avg_pool2d": (
        "F.avg_pool2d(self, kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode, "
        "count_include_pad=count_include_pad, divisor_override=divisor_override)",
    ),
    "aten::adaptive_avg_pool2d": ("F.adaptive_avg_pool2d(self, output_size)",),
    "aten::adaptive_avg_pool1d": ("F.adaptive_avg_pool1d(self, output_size)",),
    "aten::pixel_shuffle": ("F.pixel_shuffle(self, upscale_factor)",),
    "aten::upsample_nearest2d.vec": ("F.interpolate(input, output_size, scale_factors)",),
    "aten::mse_loss": ("F.mse_loss(self, target, reduction=reduction)",),
    "aten::l1_loss": ("F.l1_loss(self, target, reduction=reduction)",),
    "aten::cross_entropy_loss": (
        "F.cross_entropy(self, target, weight=weight, ignore_index=ignore_index, reduction=reduction, "
        "label_smoothing=label_smoothing)",
    ),
    "aten::nll_loss_nd": ("F.nll_loss(self, target, weight=weight, ignore_index=ignore_index, reduction=reduction)",),
    "aten::nll_loss": ("F.nll_loss(self, target, weight=weight, ignore_index=ignore_index, reduction=reduction)",),
    "aten::binary_cross_entropy_with_logits": (
        "F.binary_cross_entropy_with_logits(self, target, weight=weight, pos_weight=pos_weight, reduction=reduction)",
    ),
}

# Arguments that change nothing here, whatever they are.
_IGNORED = {"layout", "pin_memory", "non_blocking", "cudnn_enable", "cudnn_enabled", "generator", "implicit"}
# What torch.nn.functional takes by default where the operator's schema says otherwise or nothing.
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_FUNCTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "aten::batch_norm": {},
    "aten::to.device": {"device": ...},
    "aten::to.dtype_layout": {"device": ...},
    "aten::new_zeros": {"device": ...},
    "aten::new_ones": {"device": ...},
    "aten::new_full": {"device": ...},
    "aten::new_empty": {"device": ...},
    "aten::zeros_like": {"device": ...},
    "aten::ones_like": {"device": ...},
    "aten::full_like": {"device": ...},
    "aten::empty_like": {"device": ...},
    "aten::rand_like": {"device": ...},
    "aten::randn_like": {"device": ...},
}


class Symbol:
    """An argument whose value is only known when the module is built or runs."""


class Argument:
    """One argument: its constant value (or a `Symbol`) and how it is written."""

    def __init__(self, value: Any, code: ast.expr) -> None:
        self.value = value
        self.code = code


Writer = Callable[[str, Any], Argument]


def spell(target: torch._ops.OpOverload, arguments: dict[str, Any], write: Writer) -> ast.expr:
    """The expression that calls `target`.

    Args:
        arguments: Argument name -> value, as captured.
        write: (argument name, value) -> how it is written; called once for each argument, in order.
    """
    written = {name: write(name, value) for name, value in arguments.items()}
    schema = target._schema
    qualified = schema.name + ("." + schema.overload_name if schema.overload_name else "")
    special = _SPECIAL.get(schema.name)
    if special is not None:
        first = next(iter(arguments.values()))
        found = special(written, first.tensor.dim() if hasattr(first, "tensor") else 0)
        if found is not None:
            return found
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    ignored = _IGNORED | {n for n, v in _FUNCTION_DEFAULTS.get(qualified, {}).items() if v is ...}
    needed = {
        name: argument
        for name, argument in written.items()
        if name not in ignored and not (name in defaults and _same(argument.value, defaults[name]))
    }
    if "reduction" in needed and needed["reduction"].value in _REDUCTIONS:
        name = _REDUCTIONS[needed["reduction"].value]
        needed["reduction"] = Argument(name, ast.Constant(name))
    for template in TABLE.get(qualified) or TABLE.get(schema.name) or ():
        if needed.keys() <= _names(template):
            return _fill(_parsed(template), needed)
    return _raw(target, written)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


@cache
def _parsed(template: str) -> ast.expr:
    return ast.parse(template, mode="eval").body


@cache
def _names(template: str) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(_parsed(template)) if isinstance(n, ast.Name)) - {"torch", "F"}


def _fill(node: ast.expr, given: dict[str, Argument]) -> ast.expr:
    """Put the arguments into a template; what is not given is left out."""
    if isinstance(node, ast.Name):
        return given[node.id].code if node.id in given else node
    if isinstance(node, ast.Call):
        positional: list[ast.expr] = []
        keywords: list[ast.keyword] = []
        for arg in node.args:
            starred = isinstance(arg, ast.Starred)
            name = arg.value.id if starred else arg.id  # type: ignore[attr-defined]
            if name not in given:
                continue
            code = given[name].code
            if starred:
                positional += code.elts if isinstance(code, ast.List) else [ast.Starred(code, ast.Load())]
            elif len(positional) < node.args.index(arg):
                keywords.append(ast.keyword(name, code))
            else:
                positional.append(code)
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant):
                keywords.append(keyword)
            elif keyword.value.id in given:  # type: ignore[attr-defined]
                keywords.append(ast.keyword(keyword.arg, given[keyword.value.id].code))  # type: ignore[attr-defined]
        return ast.Call(_fill(node.func, given), positional, keywords)
    if isinstance(node, ast.Attribute):
        return ast.Attribute(_fill(node.value, given), node.attr, ast.Load())
    if isinstance(node, ast.BinOp):
        return ast.BinOp(_fill(node.left, given), node.op, _fill(node.right, given))
    if isinstance(node, ast.UnaryOp):
        return ast.UnaryOp(node.op, _fill(node.operand, given))
    assert isinstance(node, ast.Compare), ast.dump(node)
    return ast.Compare(_fill(node.left, given), node.ops, [_fill(c, given) for c in node.comparators])


def _raw(target: torch._ops.OpOverload, written: dict[str, Argument]) -> ast.expr:
    schema = target._schema
    keyword_only = {a.name for a in schema.arguments if a.kwarg_only}
    namespace, _, name = schema.name.partition("::")
    function = f"torch.ops.{namespace}.{name}.{schema.overload_name or 'default'}"
    order = [a.name for a in schema.arguments if a.name in written]
    positional, keywords = [], []
    for place, argument in enumerate(order):
        gap = place >= len(schema.arguments) or schema.arguments[place].name != argument
        if gap or argument in keyword_only:
            keywords.append(ast.keyword(argument, written[argument].code))
        else:
            positional.append(written[argument].code)
    return ast.Call(ast.parse(function, mode="eval").body, positional, keywords)


def _slice(a: dict[str, Argument], rank: int) -> ast.expr | None:
    """x[:, 1:3]"""
    dim = a["dim"].value if "dim" in a else 0
    if not isinstance(dim, int):
        return None
    start = None if "start" not in a or a["start"].value in (0, None) else a["start"].code
    end = None if "end" not in a or _is_end(a["end"].value) else a["end"].code
    step = None if "step" not in a or a["step"].value == 1 else a["step"].code
    return _subscript(a["self"].code, dim, rank, ast.Slice(start, end, step))


def _is_end(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value >= 2**62)


def _select(a: dict[str, Argument], rank: int) -> ast.expr | None:
    """x[:, 0]"""
    dim = a["dim"].value
    if not isinstance(dim, int):
        return None
    return _subscript(a["self"].code, dim, rank, a["index"].code)


def _subscript(value: ast.expr, dim: int, rank: int, index: ast.expr) -> ast.expr:
    """Counted from the front, or from the back behind an ellipsis where that is shorter."""
    everything: ast.expr = ast.Slice(None, None, None)
    before = dim if dim >= 0 else dim + rank
    after = rank - 1 - before
    parts = [everything] * before + [index]
    if before > after + 1:
        parts = [ast.Constant(...), index, *[everything] * after]
    return ast.Subscript(value, parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load()), ast.Load())


def _index(a: dict[str, Argument], rank: int) -> ast.expr | None:
    """x[mask] or x[:, i, j]"""
    code = a["indices"].code
    if not isinstance(code, ast.List):
        return None
    parts: list[ast.expr] = [
        ast.Slice(None, None, None) if isinstance(e, ast.Constant) and e.value is None else e for e in code.elts
    ]
    return ast.Subscript(a["self"].code, parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load()), ast.Load())


_SPECIAL: dict[str, Callable[[dict[str, Argument], int], ast.expr | None]] = {
    "aten::slice": _slice,
    "aten::select": _select,
    "aten::index": _index,
}
