"""Kernels: what a run of PyTorch code does, counted one ATen operator at a time.

`KernelCounter` watches a run (on fake tensors, so nothing is computed) below autograd, where composite operators have
become the kernels that a device would start. Each is a `Kernel`: floating-point operations by torch's own formulas
(`torch.utils.flop_counter`; a few operators it lacks are added here) and the bytes it has to read and write.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from autopart.profiler.workspace import INSIDE
from autopart.torch_private import TorchDispatchMode

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: Of the operator, for people.
        family: Key of `roofline.DEFAULTS`.
        dtype: Of its arithmetic.
        flops: Floating-point operations, a multiply-add being two.
        bytes: Read plus written, each tensor once.
    """

    name: str
    family: str
    dtype: torch.dtype
    flops: float
    bytes: float


def _attention_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Two matrix products: scores [B, H, Sq, Sk] from D, and output from Sk."""
    batch_heads = math.prod(query.shape[:-2])
    return 2 * batch_heads * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> int:
    """Five matrix products: the scores again, and the gradients of output, scores, query, key."""
    batch_heads = math.prod(query.shape[:-2])
    return 2 * batch_heads * query.shape[-2] * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _grouped_matmul(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every row of `left` meets one of the matrices in `right`, whose group sizes are data."""
    rows = left.shape[-2] * (left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1)
    return 2 * rows * left.shape[-1] * right.shape[-1]


def _grouped_matmul_backward(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Two products: the gradients of rows and of matrices."""
    return 2 * _grouped_matmul(left, right)


def _mkldnn_rnn(input: torch.Tensor, w_input: torch.Tensor, w_hidden: torch.Tensor, *_: Any, **__: Any) -> int:
    rows = math.prod(input.shape[:-1])
    return 2 * rows * (w_input.numel() + w_hidden.numel())


def _convolution_backward(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any
) -> int:
    """Each wanted gradient takes as much as the forward; torch's formula counts a weight's once for every group."""
    transposed, wanted = rest[4], rest[7]
    points = (input if transposed else gradient).shape[2:]
    forward = 2 * input.shape[0] * math.prod(points) * weight.numel()
    return forward * sum(wanted[:2])


# Operators that torch's flop counter does not know, or counts wrongly. Arguments as in the operator.
EXTRA_FLOPS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped_matmul,
    aten.mkldnn_rnn_layer: _mkldnn_rnn,
}
# The same for operators that a library registers itself, by name: they exist only where it is imported.
LIBRARY_FLOPS: dict[str, Callable[..., int]] = {
    "transformers::grouped_mm_fallback": _grouped_matmul,
    "transformers::grouped_mm_fallback_backward": _grouped_matmul_backward,
}


def _mkldnn_rnn_workspace(input: torch.Tensor, *arguments: Any, **_: Any) -> int:
    """oneDNN's for an LSTM layer: four gates for each step, and five and a half copies of its states."""
    steps, rows, hidden = input.shape[0], input.shape[1], arguments[4].shape[-1]
    gates, state = 16 * steps * rows * hidden, 4 * (steps + 1) * rows * hidden
    return _pages(gates) + 5 * _pages(2 * state) + _pages(state)


def _pages(size: int) -> int:
    return -(-size // 4096) * 4096


# What an operator keeps for its backward in a buffer that its fake implementation leaves empty.
WORKSPACES: dict[Any, Callable[..., int]] = {aten.mkldnn_rnn_layer: _mkldnn_rnn_workspace}

_FUNCTIONS = "exp log tanh sigmoid gelu silu erf sin cos pow sqrt rsqrt softplus mish elu log_sigmoid_forward"
_FUNCTIONS += " gelu_backward silu_backward mish_backward elu_backward softplus_backward"
_POOLING = "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d"
_POOLING += " upsample_bilinear2d"

# Operator packet -> family; everything else is "pointwise" if it computes nothing that is counted.
FAMILIES_OF: dict[str, str] = {
    **{name + in_place: "function" for name in _FUNCTIONS.split() for in_place in ("", "_")},
    **{name + end: "pooling" for name in _POOLING.split() for end in ("", "_backward")},
    **dict.fromkeys(("clone", "copy_", "_to_copy", "cat", "stack"), "copy"),
    **dict.fromkeys(("native_dropout", "bernoulli_", "bernoulli", "rand_like", "randn_like"), "random"),
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_grouped_mm": "matmul",
    "grouped_mm_fallback": "matmul",
    "grouped_mm_fallback_backward": "matmul",
    "_scaled_mm": "matmul",
    "mkldnn_rnn_layer": "matmul",
    "convolution": "convolution",
    "_convolution": "convolution",
    "cudnn_convolution": "convolution",
    "convolution_backward": "convolution",
    "native_layer_norm": "normalization",
    "native_layer_norm_backward": "normalization",
    "native_group_norm": "normalization",
    "native_group_norm_backward": "normalization",
    "native_batch_norm": "normalization",
    "native_batch_norm_backward": "normalization",
    "_softmax": "normalization",
    "_softmax_backward_data": "normalization",
    "_log_softmax": "normalization",
    "_log_softmax_backward_data": "normalization",
    "sum": "reduction",
    "mean": "reduction",
    "amax": "reduction",
    "var": "reduction",
    "var_mean": "reduction",
    "embedding": "gather",
    "_embedding_bag": "gather",
    "_embedding_bag_forward_only": "gather",
    "embedding_dense_backward": "gather",
    "index": "gather",
    "index_select": "gather",
    "gather": "gather",
    "index_put_": "gather",
    "_index_put_impl_": "gather",
    "index_add_": "gather",
    "scatter_add": "gather",
}

# These read only the rows that they return, not the whole of their first argument.
READS_ROWS = {"embedding", "index", "index_select", "gather", "_unsafe_index", "nll_loss_forward"}

# These read the rows of their first argument that their second one names, and return sums of them.
READS_BAGS = {"_embedding_bag", "_embedding_bag_forward_only"}

# These change the rows that they are given, not the whole of their first argument.
WRITES_ROWS = {"index_put_", "_index_put_impl_", "index_add_"}

# No kernel at all: storage without contents, or a new name for a storage.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
FREE |= {"_unsafe_view", "_reshape_alias"}


class KernelCounter(TorchDispatchMode):
    """Records the kernels of the code run inside it.

    Attributes:
        kernels: In the order in which they ran.
        peak_bytes: The most bytes of new storages that were alive at once.
        shared_peak_bytes: The same if none of `lasting` were let go.
        lasting: Addresses of new storages that the code run here lets go, but something else may keep.
        converted: (index in `present`, bytes of the copy) of each tensor there that was converted to another dtype.
        workspaces: Sizes of the buffers that the kernels keep for their backward without showing them.
    """

    def __init__(self, present: Iterable[torch.Tensor] = (), host: bool = False) -> None:
        """What is new from here on.

        Args:
            present: Tensors that are there before the run.
            host: Whether the kernels are those of a CPU: what they take for themselves is counted, too.
        """
        super().__init__()
        self._host = host
        self._present = tuple(present)
        self.converted: list[tuple[int, int]] = []
        self.kernels: list[Kernel] = []
        self.peak_bytes = 0
        self.shared_peak_bytes = 0
        self.lasting: set[int] = set()
        self.workspaces: list[int] = []
        self._live_bytes = 0
        self._lasting_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in self._present}

    def restart(self) -> None:
        """Count from here on: what is there now was there before, and may be let go."""
        self.kernels.clear()
        self._live_bytes = self._lasting_bytes = self.peak_bytes = self.shared_peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._live_bytes
        result = func(*args, **kwargs)
        if _is_view(func):
            return result
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for output in outputs:
            self._allocate(output)
        if func is aten._to_copy.default:
            found = (i for i, tensor in enumerate(self._present) if tensor is args[0])
            self.converted += [(i, outputs[0].untyped_storage().nbytes()) for i in found]
        if self._host and func in INSIDE:
            self._note_peak(before + INSIDE[func](*args, **kwargs) - self._live_bytes)
        if func.overloadpacket in WORKSPACES:
            self.workspaces.append(WORKSPACES[func.overloadpacket](*args, **kwargs))
        # What gives no tensor only asks for a property (a size, a device).
        if outputs and func.overloadpacket.__name__ not in FREE:
            self.kernels.append(_kernel(func, args, kwargs, result, outputs))
        return result

    def _allocate(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        identity, size = storage._cdata, storage.nbytes()
        if identity in self._known:
            return
        self._known.add(identity)
        self._live_bytes += size
        self._note_peak(0)
        weakref.finalize(storage, self._free, identity, size)

    def _note_peak(self, inside_bytes: int) -> None:
        live = self._live_bytes + inside_bytes
        self.peak_bytes = max(self.peak_bytes, live)
        self.shared_peak_bytes = max(self.shared_peak_bytes, live + self._lasting_bytes)

    def _free(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self._live_bytes -= size
        if identity in self.lasting:
            self.lasting.discard(identity)
            self._lasting_bytes += size


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel moves for a tensor: an expanded one is read from its smaller storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_view(func: Any) -> bool:
    """Whether the operator only gives a storage another shape."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _kernel(func: Any, args: Any, kwargs: Any, result: Any, outputs: list[torch.Tensor]) -> Kernel:
    packet = func.overloadpacket
    name = packet.__name__
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in READS_ROWS:
        moved = [*inputs[1:], *outputs, *outputs]
    elif name in READS_BAGS:
        moved = [*inputs[1:], *outputs]
    elif name in WRITES_ROWS:
        moved = [*inputs[1:], *inputs[1:]]
    else:
        moved = [*{id(tensor): tensor for tensor in inputs}.values(), *outputs]
    bags = math.prod(inputs[0].shape[1:]) * inputs[0].element_size() * inputs[1].numel() if name in READS_BAGS else 0
    floating = [tensor.dtype for tensor in (*outputs, *inputs) if tensor.dtype.is_floating_point and tensor.dim()]
    return Kernel(
        name=name,
        family=_family(name, args, kwargs, func),
        dtype=min(floating, key=lambda dtype: dtype.itemsize) if floating else torch.float32,
        flops=float(_flops(packet, args, kwargs, result)),
        bytes=float(bags + sum(tensor_bytes(tensor) for tensor in moved)),
    )


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    if packet in EXTRA_FLOPS:
        return EXTRA_FLOPS[packet](*args, **kwargs)
    if packet._qualified_op_name in LIBRARY_FLOPS:
        return LIBRARY_FLOPS[packet._qualified_op_name](*args, **kwargs)
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    return 0


def _family(name: str, args: Any, kwargs: Any, func: Any) -> str:
    if "_attention" in name:
        return "causal attention" if _argument(func, args, kwargs, "is_causal") else "attention"
    if "convolution" in name and (_argument(func, args, kwargs, "groups") or 1) > 1:
        return "grouped convolution"
    return FAMILIES_OF.get(name, "pointwise")


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    for index, parameter in enumerate(func._schema.arguments):
        if parameter.name == name:
            return args[index] if index < len(args) else kwargs.get(name, parameter.default_value)
    return None
