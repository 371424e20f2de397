"""Times follow what kernels do: torch's own flop counts, the bytes they move, and the device they run on."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import EXAMPLES, eager_flops, gpt2, peak_bytes, traced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopart.cluster import Cluster
from autopart.graph import Graph, OpaqueCall
from autopart.profiler import analytic, profile
from autopart.profiler.isolated import Call, Runner, TensorSpec
from autopart.profiler.kernels import Kernel
from autopart.profiler.roofline import kernel_seconds
from autopart.tracer import trace

aten = torch.ops.aten
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # torch's counter knows the GPU kernels only


class Recorder(Runner):
    """A runner that keeps what it ran."""

    def __init__(self, kind: str, tensor: int) -> None:
        super().__init__(kind, tensor)
        self.outcomes: list[Any] = []

    def run(self, call: Call) -> Any:
        outcome = super().run(call)
        self.outcomes.append(outcome)
        return outcome


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The runners that `profile` makes."""
    made: list[Recorder] = []

    def make(kind: str, tensor: int) -> Recorder:
        made.append(Recorder(kind, tensor))
        return made[-1]

    monkeypatch.setattr(analytic, "Runner", make)
    return made


@pytest.mark.parametrize("name", EXAMPLES)
def test_flops_equal_what_torch_counts_in_eager_training(name: str) -> None:
    model, kwargs, graph = traced(name)
    walk = analytic.Walk(graph, "cpu")
    walk.run()
    forward = backward = 0.0
    for outcome in walk.outcomes.values():
        forward += sum(k.flops for k in outcome.work.forward if k.name != CPU_ATTENTION)
        backward += sum(k.flops for k in outcome.work.backward if k.name != f"{CPU_ATTENTION}_backward")
    assert (forward, backward) == eager_flops(model, kwargs)


def run(target: Any, *arguments: Any, kind: str = "cpu") -> Any:
    return Runner(kind).run(Call(target, (arguments, {}), True, ()))


def tensor(*shape: int, weight: bool = False, requires_grad: bool = True, dtype: Any = torch.float32) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, requires_grad, weight)


def test_attention_on_a_cpu_costs_two_products_forward_and_five_backward() -> None:
    query, key = tensor(2, 4, 32, 16), tensor(2, 4, 48, 16)
    work = run(aten.scaled_dot_product_attention.default, query, key, key).work
    product = 2 * (2 * 4) * 32 * 48 * 16
    assert sum(kernel.flops for kernel in work.forward) == 2 * product
    assert sum(kernel.flops for kernel in work.backward) == 5 * product


def test_input_and_weight_gradients_are_apart() -> None:
    product = 2 * 6 * 16 * 32
    linear = aten.linear.default
    both = run(linear, tensor(6, 16), tensor(32, 16, weight=True)).work
    assert sum(k.flops for k in both.backward) == 2 * product and sum(k.flops for k in both.backward_input) == product
    first = run(linear, tensor(6, 16, requires_grad=False), tensor(32, 16, weight=True)).work
    assert sum(k.flops for k in first.backward) == product and first.backward_input == ()
    frozen = run(linear, tensor(6, 16), tensor(32, 16, weight=True, requires_grad=False)).work
    assert sum(k.flops for k in frozen.backward) == product and frozen.backward == frozen.backward_input


def test_the_parameters_of_a_model_are_its_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    graph = trace(model, (torch.randn(256, 64),), check=False)
    times = profile(graph, Cluster.parse("CPU")).times["CPU"]
    first, tanh, second = [times[node.name] for node in graph.primary.calls][:3]
    product_s = 2 * 256 * 64 * 64 / 90e9
    assert first.backward_input_s == 0 and first.backward_weight_s > product_s
    assert tanh.backward_input_s > 0 and tanh.backward_weight_s == 0
    assert second.backward_input_s > product_s and second.backward_weight_s > product_s


def test_bytes_are_what_a_kernel_must_read_and_write() -> None:
    (add,) = run(
        aten.add.Tensor, tensor(100, 30, requires_grad=False), tensor(100, 30, requires_grad=False)
    ).work.forward
    assert add.bytes == 3 * 100 * 30 * 4
    ids = tensor(5, requires_grad=False, dtype=torch.int64)
    (lookup,) = run(aten.embedding.default, tensor(1000, 8, weight=True, requires_grad=False), ids).work.forward
    assert lookup.bytes == 5 * 8 + 2 * 5 * 8 * 4  # the rows, not the table
    table, ids = tensor(1000, 8, weight=True, requires_grad=False), tensor(20, requires_grad=False, dtype=torch.int64)
    starts = tensor(4, requires_grad=False, dtype=torch.int64)
    bags, *_ = run(aten.embedding_bag.default, table, ids, starts).work.forward
    assert 20 * 8 * 4 <= bags.bytes < 1000 * 8 * 4 / 10


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution_in_groups_take_what_its_forward_takes(groups: int, transposed: bool) -> None:
    x, rest = tensor(2, 16, 9, 9), (None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)
    weight = tensor(16, 16 // groups, 3, 3, weight=True)
    work = run(aten.convolution.default, x, weight, *rest).work
    (forward,), (both,), (one,) = work.forward, work.backward, work.backward_input
    points = 9 * 9 if transposed else 5 * 5  # where the window stands
    assert forward.flops == 2 * 2 * points * (16 * 16 // groups) * 3 * 3
    assert both.flops == 2 * forward.flops and one.flops == forward.flops
    assert (forward.family == both.family == "grouped convolution") == (groups > 1)


def test_views_cost_nothing() -> None:
    for target, arguments in [
        (aten.view.default, ([6, 4],)),
        (aten.transpose.int, (0, 1)),
        (aten.slice.Tensor, (0, 0, 2)),
        (aten.unsqueeze.default, (0,)),
    ]:
        assert run(target, tensor(4, 6), *arguments).work.forward == ()


def cost(kernel: Kernel, device: str) -> float:
    return kernel_seconds(kernel, Cluster.parse(device).devices[0])


def test_a_large_product_runs_near_the_peak_and_a_small_one_at_the_launch_rate() -> None:
    large = Kernel("mm", "matmul", torch.bfloat16, flops=2 * 8192**3, bytes=3 * 2 * 8192**2)
    ideal = large.flops / 989.4e12
    assert ideal < cost(large, "H100-80G") < 2 * ideal
    small = Kernel("mm", "matmul", torch.bfloat16, flops=2 * 64**3, bytes=3 * 2 * 64**2)
    assert cost(small, "H100-80G") == Cluster.parse("H100-80G").devices[0].launch_s


def test_float32_does_not_run_at_the_rate_of_tf32() -> None:
    product = Kernel("mm", "matmul", torch.float32, flops=2 * 8192**3, bytes=3 * 4 * 8192**2)
    assert cost(product, "A100-80G") > product.flops / 19.5e12


def test_a_dtype_without_fast_units_runs_at_the_rate_of_float32() -> None:
    half = Kernel("mm", "matmul", torch.bfloat16, flops=1e12, bytes=1e6)
    full = Kernel("mm", "matmul", torch.float32, flops=1e12, bytes=1e6)
    assert cost(half, "T4") == cost(full, "T4") > 5 * cost(half, "A10")


def test_time_grows_with_work_and_falls_with_the_device() -> None:
    """A larger batch takes longer on every device; a later data-centre GPU is never slower."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    cluster = Cluster.parse("V100-16G,A100-80G,H100-80G,B200")
    totals = {}
    for rows in (256, 4096):
        times = profile(trace(model, (torch.randn(rows, 1024),), check=False), cluster).times
        totals[rows] = [sum(node.forward_s + node.backward_s for node in times[name].values()) for name in times]
    assert all(small < large for small, large in zip(totals[256], totals[4096], strict=True))
    assert totals[4096] == sorted(totals[4096], reverse=True)


def test_equal_nodes_of_repeated_blocks_are_run_once(recorded: list[Recorder]) -> None:
    ran = {}
    for layers in (2, 6):
        model, kwargs = gpt2(num_hidden_layers=layers)
        graph = trace(model, (), kwargs, check=False)
        profile(graph, Cluster.parse("CPU"))
        ran[layers] = len(recorded[-1].outcomes)
        assert len(graph.primary.calls) > ran[layers]
    assert ran[6] == ran[2]


def test_every_node_is_priced() -> None:
    _, _, graph = traced("gpt2")
    costs = profile(graph, Cluster.parse("A100-80G"))
    names = {node.name for node in graph.primary.graph.nodes if node.op != "output"}
    assert set(costs.memory) == names == set(costs.times["A100-80G"])
    for node in graph.primary.calls:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            assert costs.memory[node.name].output_bytes == value.numel() * value.element_size()


def test_a_shared_value_pays_for_adding_up_its_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y.sin() + y.cos() + y.tanh()

    graph = trace(Model(), (torch.randn(256, 64),), check=False)
    costs = profile(graph, Cluster.parse("CPU"))
    linear = next(node.name for node in graph.primary.calls if "linear" in str(node.target))
    # Two additions of 64 KiB tensors (read, read, write) at less than 10 GB/s.
    assert costs.times["CPU"][linear].backward_input_s > 2 * 3 * 65536 / 10e9


class Checkpointed(nn.Module):
    """Three layers of which the second may be recomputed: as a module call, or as a function."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.first, self.last, self.region = nn.Linear(64, 64), nn.Linear(64, 64), region
        self.block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.region == "module":
            return self.last(checkpoint(self.block, x, use_reentrant=False))
        if self.region == "function":
            return self.last(checkpoint(lambda x: self.block(x) + x, x, use_reentrant=False))
        return self.last(self.block(x))


def test_a_checkpointed_region_pays_for_its_second_forward() -> None:
    times = {}
    for region in ("", "module"):
        graph = trace(Checkpointed(region), (torch.randn(256, 64),), check=False)
        times[region] = profile(graph, Cluster.parse("CPU")).times["CPU"]
    again = {
        name: times["module"][name].backward_s - times[""][name].backward_s
        for name in times["module"]
        if times["module"][name].backward_s != times[""][name].backward_s
    }
    region = [node for node in graph.primary.calls if node.meta["checkpoint"] is not None]
    assert {node.name for node in region if times["module"][node.name].forward_s} == set(again)
    for name, extra_s in again.items():
        assert extra_s == pytest.approx(times[""][name].forward_s)


def test_a_region_that_packages_do_not_recompute_pays_nothing() -> None:
    graph = trace(Checkpointed("function"), (torch.randn(256, 64),), check=False)
    assert any(node.meta["checkpoint"] is not None for node in graph.primary.calls)
    walk = analytic.Walk(graph, "cpu")
    walk.run()
    assert walk.runs_again == set()


@pytest.mark.parametrize(
    ("target", "specs"),
    [
        (aten.linear.default, [tensor(64, 96), tensor(128, 96, weight=True), tensor(128, weight=True)]),
        (aten.softmax.int, [tensor(64, 256), -1]),
        (aten.gelu.default, [tensor(64, 256)]),
        (aten.layer_norm.default, [tensor(64, 256), [256], tensor(256, weight=True), tensor(256, weight=True)]),
        (aten.embedding.default, [tensor(500, 64, weight=True), tensor(96, requires_grad=False, dtype=torch.int64)]),
        (aten.cat.default, [[tensor(64, 96), tensor(64, 32)], 1]),
        (aten.mul.Tensor, [tensor(64, 256), tensor(64, 256)]),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "",
)
def test_temporaries_cover_what_the_allocator_hands_out(target: Any, specs: list[Any]) -> None:
    """Against the allocator's events of a real run: never less, and at most the incoming gradient and a page more."""

    def real(spec: Any) -> Any:
        if isinstance(spec, list):
            return [real(item) for item in spec]
        if not isinstance(spec, TensorSpec):
            return spec
        if not spec.dtype.is_floating_point:
            return torch.zeros(spec.shape, dtype=spec.dtype)
        return torch.randn(spec.shape, requires_grad=spec.requires_grad)

    predicted = run(target, *specs)
    arguments = [real(spec) for spec in specs]
    sources = [t for t in torch.utils._pytree.tree_leaves(arguments) if isinstance(t, Tensor) and t.requires_grad]
    target(*arguments)
    output = target(*arguments)
    gradient = torch.ones_like(output)
    with peak_bytes() as peak:
        torch.autograd.grad(output, sources, gradient)
    incoming = gradient.numel() * gradient.element_size()
    assert peak[0] <= predicted.temporary_bytes <= peak[0] + incoming + 4096


def test_an_opaque_node_is_estimated_and_noted() -> None:
    graph = trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),), check=False)
    tanh = next(node for node in graph.primary.calls if node.target is aten.tanh.default)
    kept = OpaqueCall("o0", "module", None, nn.Linear(8, 8), "decoder.router", "it branches on data")
    with graph.primary.graph.inserting_before(tanh):
        opaque = graph.primary.graph.create_node("call_module", "o0", (tanh.args[0],))
        opaque.meta = {**tanh.meta, "val": [tanh.meta["val"]], "requires_grad": [True]}
        first = graph.primary.graph.call_function(operator.getitem, (opaque, 0))
        first.meta = tanh.meta
    tanh.replace_all_uses_with(first)
    graph.primary.graph.erase_node(tanh)
    costs = profile(replace(graph, opaque={"o0": kept}), Cluster.parse("CPU"))
    time = costs.times["CPU"][opaque.name]
    # At least the 2 x 4 x 8 x 9 operations that the module's parameters suggest, and twice those backward.
    assert time.forward_s > 2 * 4 * 72 / 60e9 and time.backward_s > time.forward_s
    assert len(costs.notes) == 1
    assert all(word in costs.notes[0] for word in (opaque.name, "decoder.router", "branches on data", "estimated"))
    assert any(opaque.name in saved.savers for saved in costs.saved)


def test_an_operator_that_cannot_be_analysed_is_estimated_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Graph = trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),), check=False)
    original = Runner.run

    def fail(self: Runner, call: Call) -> Any:
        if call.target is aten.tanh.default:
            raise NotImplementedError("no fake kernel")
        return original(self, call)

    monkeypatch.setattr(Runner, "run", fail)
    costs = profile(graph, Cluster.parse("CPU"))
    assert len(costs.notes) == 1 and "no fake kernel" in costs.notes[0]
    tanh = next(node.name for node in graph.primary.calls if node.target is aten.tanh.default)
    assert costs.times["CPU"][tanh].forward_s > 0 and costs.memory[tanh].output_bytes == 4 * 8 * 4
    assert any(tanh in saved.savers for saved in costs.saved)
