"""Leaves: modules of `torch.nn` recognised by the one operator they ran, not by the class they were.

A table, one line for each operator: the module, and how its constructor's arguments follow from the operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart.codegen.frames import Frame
from autopart.codegen.modules import Module
from autopart.codegen.program import Op, Switch, Value

Arguments = list[tuple[str | None, Any]]
"""Constructor arguments in order; None as name means positional."""


@dataclass(frozen=True)
class Leaf:
    """A call of a `torch.nn` constructor."""

    constructor: str
    arguments: Arguments


class _Call:
    """An operator call with its defaults filled in, as the table's lambdas read it."""

    def __init__(self, op: Op, module: Module) -> None:
        self.args = {a.name: a.default_value for a in op.target._schema.arguments if a.has_default_value()} | op.args
        self.state = module.state

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.args[name].tensor.shape)

    def given(self, name: str) -> bool:
        return isinstance(self.args.get(name), Value)


def _linear(c: _Call) -> Arguments:
    out, inner = c.shape("weight")
    return [(None, inner), (None, out), ("bias", c.given("bias"))]


def _convolution(c: _Call) -> Arguments:
    out, inner, *kernel = c.shape("weight")
    found: Arguments = [(None, inner * c["groups"]), (None, out), (None, _plain(kernel))]
    return found + _convolution_options(c)


def _transposed_convolution(c: _Call) -> Arguments:
    inner, out, *kernel = c.shape("weight")
    found: Arguments = [(None, inner), (None, out * c["groups"]), (None, _plain(kernel))]
    return [*found, ("output_padding", _spread(c["output_padding"], len(kernel))), *_convolution_options(c)]


def _convolution_options(c: _Call) -> Arguments:
    dims = len(c.shape("weight")) - 2
    options: Arguments = [
        (n, c[n] if isinstance(c[n], str) else _spread(c[n], dims)) for n in ("stride", "padding", "dilation")
    ]
    return [*options, ("groups", c["groups"]), ("bias", c.given("bias"))]


def _plain(sizes: list[int]) -> Any:
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def _spread(sizes: Any, dims: int) -> Any:
    sizes = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
    return _plain(sizes * dims if len(sizes) == 1 else sizes)


def _normalized(c: _Call) -> Arguments:
    shape = list(c["normalized_shape"])
    sizes = shape[0] if len(shape) == 1 else tuple(shape)
    return [(None, sizes), ("eps", c["eps"]), ("elementwise_affine", c.given("weight"))]


def _layer_norm(c: _Call) -> Arguments:
    return [*_normalized(c), *([] if c.given("bias") or not c.given("weight") else [("bias", False)])]


def _batch_norm(c: _Call) -> Arguments:
    return [
        (None, c.shape("input")[1]),
        ("eps", c["eps"]),
        ("momentum", c["momentum"]),
        ("affine", c.given("weight")),
        ("track_running_stats", c.given("running_mean")),
    ]


def _pooling(*names: str) -> Callable[[_Call], Arguments]:
    def arguments(c: _Call) -> Arguments:
        dims = len(c["kernel_size"])
        found: Arguments = [(None, _spread(c["kernel_size"], dims))]
        found.append(("stride", _spread(c["stride"] or c["kernel_size"], dims)))
        return found + [(n, _spread(c[n], dims) if isinstance(c[n], list) else c[n]) for n in names]

    return arguments


_Rule = tuple[str, Callable[[_Call], Arguments | None]]

_LEAVES: dict[str, _Rule] = {
    "aten::linear": ("nn.Linear", _linear),
    "aten::embedding": (
        "nn.Embedding",
        lambda c: [
            *((None, n) for n in c.shape("weight")),
            ("padding_idx", None if c["padding_idx"] < 0 else c["padding_idx"]),
            ("scale_grad_by_freq", c["scale_grad_by_freq"]),
            ("sparse", c["sparse"]),
        ],
    ),
    "aten::conv1d": ("nn.Conv1d", _convolution),
    "aten::conv2d": ("nn.Conv2d", _convolution),
    "aten::conv3d": ("nn.Conv3d", _convolution),
    "aten::conv_transpose1d": ("nn.ConvTranspose1d", _transposed_convolution),
    "aten::conv_transpose2d": ("nn.ConvTranspose2d", _transposed_convolution),
    "aten::conv_transpose3d": ("nn.ConvTranspose3d", _transposed_convolution),
    "aten::layer_norm": ("nn.LayerNorm", _layer_norm),
    "aten::rms_norm": ("nn.RMSNorm", _normalized),
    "aten::group_norm": (
        "nn.GroupNorm",
        lambda c: [
            (None, c["num_groups"]),
            (None, c.shape("input")[1]),
            ("eps", c["eps"]),
            ("affine", c.given("weight")),
        ],
    ),
    "aten::batch_norm": ("nn.BatchNorm", _batch_norm),
    "aten::dropout": ("nn.Dropout", lambda c: [(None, c["p"])]),
    "aten::relu": ("nn.ReLU", lambda c: []),
    "aten::relu_": ("nn.ReLU", lambda c: [("inplace", True)]),
    "aten::gelu": ("nn.GELU", lambda c: [("approximate", c["approximate"])]),
    "aten::silu": ("nn.SiLU", lambda c: []),
    "aten::silu_": ("nn.SiLU", lambda c: [("inplace", True)]),
    "aten::tanh": ("nn.Tanh", lambda c: []),
    "aten::sigmoid": ("nn.Sigmoid", lambda c: []),
    "aten::softmax": ("nn.Softmax", lambda c: [("dim", c["dim"])] if c["dtype"] is None else None),
    "aten::log_softmax": ("nn.LogSoftmax", lambda c: [("dim", c["dim"])] if c["dtype"] is None else None),
    "aten::mish": ("nn.Mish", lambda c: []),
    "aten::hardswish": ("nn.Hardswish", lambda c: []),
    "aten::hardswish_": ("nn.Hardswish", lambda c: [("inplace", True)]),
    "aten::hardsigmoid": ("nn.Hardsigmoid", lambda c: []),
    "aten::leaky_relu": ("nn.LeakyReLU", lambda c: [(None, c["negative_slope"])]),
    "aten::max_pool2d": ("nn.MaxPool2d", _pooling("padding", "dilation", "ceil_mode")),
    "aten::avg_pool2d": ("nn.AvgPool2d", _pooling("padding", "ceil_mode", "count_include_pad", "divisor_override")),
    "aten::adaptive_avg_pool2d": ("nn.AdaptiveAvgPool2d", lambda c: [(None, _plain(list(c["output_size"])))]),
    "aten::adaptive_avg_pool1d": ("nn.AdaptiveAvgPool1d", lambda c: [(None, c["output_size"][0])]),
    "aten::flatten": ("nn.Flatten", lambda c: [(None, c["start_dim"]), (None, c["end_dim"])]),
}

# What each constructor does by itself; an argument equal to it is left out.
_DEFAULTS: dict[str, Any] = {
    "bias": True,
    "affine": True,
    "track_running_stats": True,
    "elementwise_affine": True,
    "padding_idx": None,
    "scale_grad_by_freq": False,
    "sparse": False,
    "output_padding": 0,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "approximate": "none",
    "momentum": 0.1,
    "ceil_mode": False,
    "count_include_pad": True,
    "divisor_override": None,
}
_STATE = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
_FLAGS = {"aten::dropout": "train", "aten::batch_norm": "training"}


def is_leaf_operator(op: Op) -> bool:
    """Whether a module of `torch.nn` may stand for the operation."""
    return isinstance(op.target, torch._ops.OpOverload) and op.target._schema.name in _LEAVES


def match_leaf(module: Module) -> Leaf | None:
    """The `torch.nn` module that does what every call of `module` did, if there is one."""
    if module.children or not module.calls:
        return None
    found = [_match_call(module, call) for call in module.calls]
    first = found[0]
    return first if first is not None and all(leaf == first for leaf in found) else None


def _match_call(module: Module, call: Frame) -> Leaf | None:
    ops = [op for op in call.body if isinstance(op, Op)]
    if len(ops) != len(call.body) or not ops:
        return None
    op = ops[-1]
    if not is_leaf_operator(op) or op.mode != "both" or call.outputs != op.results or len(call.inputs) != 1:
        return None
    name = op.target._schema.name
    tensor = next(iter(op.args.values()))
    if name == "aten::embedding":
        tensor = op.args["indices"]
    if tensor is not call.inputs[0] or not _follows_mode(name, op):
        return None
    if not _counts_batches(name, ops, call) or not _uses_all_state(module, call, op):
        return None
    constructor, arguments = _LEAVES[name]
    if constructor == "nn.BatchNorm":
        constructor += {2: "1d", 3: "1d", 4: "2d", 5: "3d"}[op.args["input"].tensor.dim()]
    c = _Call(op, module)
    if any(isinstance(v, Switch) for k, v in op.args.items() if k != _FLAGS.get(name)):
        return None
    wanted = arguments(c)
    if wanted is None:
        return None
    found = [(k, v) for k, v in wanted if k is None or not _is_default(constructor, k, v)]
    parameters = [e.tensor for e in module.state.values() if e.tensor.is_floating_point()]
    if parameters:
        if len({p.dtype for p in parameters}) > 1:
            return None
        if parameters[0].dtype != torch.float32:
            found.append(("dtype", parameters[0].dtype))
    return Leaf(constructor, found)


def _is_default(constructor: str, name: str, value: Any) -> bool:
    if name == "eps":
        return constructor != "nn.RMSNorm" and _same(1e-5, value)
    return name in _DEFAULTS and _same(_DEFAULTS[name], value)


def _same(default: Any, value: Any) -> bool:
    return type(default) is type(value) and default == value


def _follows_mode(name: str, op: Op) -> bool:
    flag = _FLAGS.get(name)
    if flag is None:
        return True
    if name == "aten::batch_norm" and not isinstance(op.args.get("running_mean"), Value):
        return op.args[flag] is True
    return op.args[flag] == Switch(True, False)


def _counts_batches(name: str, ops: list[Op], call: Frame) -> bool:
    """Nothing but the operator, or, for a batch norm in training, its counter before it."""
    tracks = name == "aten::batch_norm" and isinstance(ops[-1].args.get("running_mean"), Value)
    if not tracks:
        return len(ops) == 1
    if len(ops) != 2 or ops[0].mode != "training" or not isinstance(ops[0].target, torch._ops.OpOverload):
        return False
    counter = next(iter(ops[0].values()), None)
    return (
        ops[0].target._schema.name == "aten::add_"
        and counter is not None
        and call.state.get(counter.name) == "num_batches_tracked"
    )


def _uses_all_state(module: Module, call: Frame, op: Op) -> bool:
    """Each entry under its own name as the operator's argument, and no other."""
    if not set(module.state) <= _STATE or set(call.state.values()) != set(module.state):
        return False
    for argument, value in op.args.items():
        if isinstance(value, Value) and value.kind == "state" and call.state.get(value.name) != argument:
            return False
    return all(e.persistent and e.kind != "constant" for e in module.state.values())


def leaf_requires_grad(state: Mapping[str, Any]) -> bool | None:
    """True or False where all parameters agree, None where they do not."""
    flags = {e.requires_grad for e in state.values() if e.kind == "parameter"}
    return flags.pop() if len(flags) == 1 else (True if not flags else None)
