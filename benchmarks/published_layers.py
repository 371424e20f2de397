"""What the parts of a published transformer cost on one rank, by the analytic profile of each part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor, fx, nn

from autopart.cluster import Cluster, Device, Link
from autopart.costs import NodeTime
from autopart.graph import Graph
from autopart.profiler import profile
from autopart.profiler.call_times import addition
from autopart.profiler.isolated import TensorSpec
from autopart.profiler.kernels import Kernel
from autopart.profiler.roofline import kernel_seconds
from autopart.tracer import trace
from benchmarks.published_shapes import Attention, Embedding, Head, Mlp, Norm, Residual, Shape

Float8 = Literal["no", "tensorwise", "rowwise"]
FLOAT8_SPEEDUP = 2.0
"""Of dense float8 over bfloat16 on tensor cores (H100 and H200)."""
# Bytes moved for an element that is cast: its maximum is read from 2 bytes, then 2 are read and 1 written; row by row
# this is done for rows and for columns.
CAST_BYTES = {"tensorwise": 5.0, "rowwise": 10.0}
CORE = {"scaled_dot_product_attention", "bmm", "softmax", "dropout"}
"""Operators of attention between its linears."""
Part = Callable[[Shape], nn.Module]
_UNUSED = Link("unused", 0.0, 1.0)


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of a part, for one microbatch.

    Attributes:
        forward_s, input_s, weight_s: Forward, and the gradients of activations and of weights.
        products_s: Matrix products of the forward without those of attention.
        core_s: Attention's own products, softmax and dropout, forward.
        saved_bytes: What autograd keeps; `input_bytes` of it is the part's input, `core_bytes` belongs to the core.
        temporary_bytes: Most bytes that exist only while one of its operators runs.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    products_s: float = 0.0
    core_s: float = 0.0
    saved_bytes: int = 0
    input_bytes: int = 0
    core_bytes: int = 0
    temporary_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        mine, its = vars(self), vars(other)
        largest = max(self.temporary_bytes, other.temporary_bytes)
        return replace(Cost(**{name: mine[name] + its[name] for name in mine}), temporary_bytes=largest)

    def times(self, count: float) -> Cost:
        """So many of it, one after the other."""
        return replace(
            Cost(**{name: value * count for name, value in vars(self).items()}), temporary_bytes=self.temporary_bytes
        )


@dataclass(frozen=True)
class Input:
    """A tensor that a part is given; floating ones in half precision have gradients."""

    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Parts:
    """Profiles the parts of a shape for microbatches of `rows` rows."""

    shape: Shape
    rows: int
    device: Device
    sequence_parallel: bool = False
    float8: Float8 = "no"

    def norm(self) -> Cost:
        return self._cost(Norm, self._between)

    def attention(self) -> Cost:
        shape = self.shape
        angles = Input((shape.tokens, shape.head_dim), torch.float32)
        # Only a rank of a ring reads the keys and values of all tokens.
        kv_heads = max(1, shape.kv_heads // shape.tensor)
        whole = Input((shape.sequence if shape.context > 1 else 1, self.rows, kv_heads, shape.head_dim))
        return self._cost(Attention, self._inside, angles, whole, whole)

    def mlp(self) -> Cost:
        return self._cost(Mlp, self._inside)

    def residual(self) -> Cost:
        """With the sum of the two gradients of its first input."""
        x = self._between
        both = kernel_seconds(addition(TensorSpec(x.sizes, (), x.dtype, False)), self.device)
        return self._cost(Residual, x, x) + Cost(input_s=both)

    def embedding(self) -> Cost:
        return self._cost(Embedding, self._ids)

    def head(self) -> Cost:
        # The output layer stays in half precision where the others are in float8.
        return replace(self, float8="no")._cost(Head, self._inside, self._ids)

    def layer(self) -> Cost:
        return self.norm() + self.attention() + self.residual() + self.norm() + self.mlp() + self.residual()

    @property
    def _inside(self) -> Input:
        """Activations where tensors are split."""
        return Input((self.shape.tokens, self.rows, self.shape.hidden))

    @property
    def _between(self) -> Input:
        """Activations between, which sequence parallelism splits by tokens."""
        parts = self.shape.tensor if self.sequence_parallel else 1
        return Input((self.shape.tokens // parts, self.rows, self.shape.hidden))

    @property
    def _ids(self) -> Input:
        return Input((self.shape.tokens, self.rows), torch.long)

    def _cost(self, part: Part, *inputs: Input) -> Cost:
        graph = _traced(part, self.shape, inputs)
        costs = profile(graph, Cluster((self.device,), (0,), _UNUSED, _UNUSED))
        times = {**costs.times[self.device.name], **self._float8_times(graph)}
        calls = [node for node in graph.primary.calls if _in_part(node)]
        core = {node.name for node in calls if part is Attention and _name(node) in CORE}
        inside = {node.name for node in calls}
        saved = [storage for storage in costs.saved if inside.intersection(storage.savers)]
        return Cost(
            forward_s=sum(times[name].forward_s for name in inside),
            input_s=sum(times[name].backward_input_s for name in inside),
            weight_s=sum(times[name].backward_weight_s for name in inside),
            products_s=sum(times[node.name].forward_s for node in calls if _name(node) == "linear"),
            core_s=sum(times[name].forward_s for name in core),
            saved_bytes=sum(storage.bytes for storage in saved),
            input_bytes=sum(storage.bytes for storage in saved if storage.owner not in inside),
            core_bytes=sum(storage.bytes for storage in saved if core.issuperset({storage.owner, *storage.savers})),
            temporary_bytes=max(costs.memory[name].temporary_bytes for name in inside),
        )

    def _float8_times(self, graph: Graph) -> dict[str, NodeTime]:
        """Of linears: products at twice the rate, after activations, weights and gradients were cast."""
        if self.float8 == "no":
            return {}
        rates = {dtype: rate * FLOAT8_SPEEDUP for dtype, rate in self.device.flops_per_s.items()}
        faster = replace(self.device, name="float8", flops_per_s=rates)
        times = profile(graph, Cluster((faster,), (0,), _UNUSED, _UNUSED)).times["float8"]
        found = {}
        for node in graph.primary.calls:
            if _in_part(node) and _name(node) == "linear":
                x, weight = (node.args[i].meta["val"].numel() for i in (0, 1))
                time = times[node.name]
                found[node.name] = NodeTime(
                    time.forward_s + self._cast_s(x) + self._cast_s(weight),
                    time.backward_input_s + self._cast_s(node.meta["val"].numel()),
                    time.backward_weight_s,
                )
        return found

    def _cast_s(self, elements: int) -> float:
        kernel = Kernel("cast", "pointwise", torch.bfloat16, 0.0, CAST_BYTES[self.float8] * elements)
        return kernel_seconds(kernel, self.device)


class _Tracked(nn.Module):
    """A part whose half-precision inputs have gradients, as values of a model do."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.one = nn.Parameter(torch.empty(()))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.part(*(x * self.one if x.dtype == torch.bfloat16 else x for x in inputs))


@cache
def _traced(part: Part, shape: Shape, inputs: tuple[Input, ...]) -> Graph:
    with torch.device("meta"):
        module = _Tracked(part(shape)).bfloat16()
        tensors = [torch.zeros(x.sizes, dtype=x.dtype) for x in inputs]
    return trace(module, tuple(tensors), check=False)


def _in_part(node: fx.Node) -> bool:
    return any(path.split(".")[0] == "part" for path, _ in node.meta["nn_module_stack"].values())


def _name(node: fx.Node) -> str:
    """Of the operator, without its overload."""
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
