"""Packages of tensor splits compute what the model computes, on all ranks, wherever they are cut into stages."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from emitted import random_cuts
from pool import Pool
from split_packages import check_split, emit_split
from torch import fx, nn
from undecided_model import AroundUndecided

from autopart.graph import Graph
from autopart.runtime.split_operators import grouped_mm
from autopart.sharding import Choice, Program, S, Split, Strategy, choose, random_choice, rewrite
from autopart.tracer import trace
from autopart.verification import verify
from tests.sharding.models import build
from tests.sharding.running import in_double
from tests.sharding.test_classics import CLASSICS, classic_choice
from tests.verification.launching import in_pool


@functools.cache
def traced(name: str) -> tuple[nn.Module, Graph, dict[str, torch.Tensor]]:
    model, args, kwargs = build(name)
    graph = in_double(trace(model, args, kwargs, check=False))
    inputs = {spec.name: eval(spec.path, {"args": args, "kwargs": kwargs}) for spec in graph.inputs}
    return model, graph, inputs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_packages_of_random_layouts_equal_the_model(name: str, seed: int, tmp_path: Path) -> None:
    model, graph, inputs = traced(name)
    t, stages = (2, 4)[seed % 2], 1 + seed % 3
    choice = random_choice(Program.of(graph, t), random.Random(seed))
    cuts = random_cuts(rewrite(graph, choice, t), stages, seed)
    check_split(model, graph, choice, t, cuts, stages, tmp_path / "out", inputs)


def text_of(folder: Path) -> str:
    """All model code of a package."""
    return "\n".join(path.read_text() for path in sorted([*folder.glob("stage_*.py"), *folder.glob("blocks.py")]))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packages_of_the_classic_split_equal_the_model_and_read_well(name: str, stages: int, tmp_path: Path) -> None:
    model, graph, inputs = traced(name)
    program = Program.of(graph, 2)
    choice = classic_choice(graph, program, CLASSICS[name])
    cuts = random_cuts(rewrite(graph, choice, 2), stages, 0)
    check_split(model, graph, choice, 2, cuts, stages, tmp_path / "out", inputs)
    text = text_of(tmp_path / "out")
    assert "torch.ops" not in text and "autopart." not in text
    if name == "llama" and stages == 1:
        for line in (
            "self.q_proj = nn.Linear(32, 16, bias=False, dtype=torch.float64)",
            "self.o_proj = nn.Linear(16, 32, bias=False, dtype=torch.float64)",
            "hidden_states = copy_to(hidden_states)  # [2, 8, 32]",
            "return all_reduce(self.o_proj(",
            "return all_reduce(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))",
            "logits = logits if self.training else all_gather(logits, dim=2)",
        ):
            assert line in text
        assert text.count("class LlamaDecoderLayer") == 1
        assert text.count("self.training") == 1


@pytest.mark.parametrize(("name", "schedule"), [("vit", "zbv"), ("resnet", "interleavedzerobubble")])
def test_processes_may_split_the_backward(name: str, schedule: str, pool: Pool, tmp_path: Path) -> None:
    """Input gradients first, weight gradients later, with collectives in both."""
    model, graph, _ = traced(name)
    choice = random_choice(Program.of(graph, 2), random.Random(0))
    cuts = random_cuts(rewrite(graph, choice, 2), 4, 0)
    emit_split(graph, choice, 2, cuts, 4, tmp_path / "out", schedule=schedule, microbatches=4)
    report = verify(tmp_path / "out", model, launch=in_pool(pool), steps=2)
    assert report.passed, str(report)


def test_a_conversion_that_every_layer_reads_stands_before_them(tmp_path: Path) -> None:
    """Attention runs on rows of the batch: its mask is cut once, in front of the loop over the layers."""
    model, graph, inputs = traced("llama")
    program = Program.of(graph, 2)
    attention = {n.name for n in graph.primary.calls if "self_attn" in str(n.meta["nn_module_stack"])}
    choice = by_rows(program, attention)
    cuts = random_cuts(rewrite(graph, choice, 2), 1, 0)
    check_split(model, graph, choice, 2, cuts, 1, tmp_path / "out", inputs)
    before, loop = "causal_mask = split(causal_mask, dim=0)", "for layer in self.layers:"
    text = text_of(tmp_path / "out")
    assert text.count(before) == 1 and text.index(before) < text.index(loop)


@pytest.mark.parametrize("seed", range(2))
def test_inference_packages_give_whole_results_on_every_rank(seed: int, tmp_path: Path) -> None:
    model, args, kwargs = build("gpt2")
    kwargs.pop("labels")
    graph = in_double(trace(model, args, kwargs, mode="inference", check=False))
    inputs = {spec.name: kwargs[spec.name] for spec in graph.inputs}
    choice = random_choice(Program.of(graph, 2), random.Random(seed))
    cuts = random_cuts(rewrite(graph, choice, 2), 2, seed)
    package = check_split(model, graph, choice, 2, cuts, 2, tmp_path / "out", inputs)
    assert all(output.shard is None for output in package.table.outputs)


def by_rows(program: Program, names: Collection[str]) -> Choice:
    """The batch split wherever that is possible among the nodes of these names, and no parameter."""

    def pick(node: fx.Node, legal: list[Strategy], layout: object) -> Strategy:
        if node.name not in names:
            return legal[0]
        return next((s for s in legal if s.outputs[0].split is not None and s.outputs[0].split.dim == 0), legal[0])

    return choose(program, {}, pick)


@pytest.mark.parametrize("stages", [1, 2])
def test_batch_norm_over_all_ranks_updates_its_statistics(stages: int, tmp_path: Path) -> None:
    model, graph, inputs = traced("resnet")
    choice = by_rows(Program.of(graph, 2), {n.name for n in graph.primary.calls})
    cuts = random_cuts(rewrite(graph, choice, 2), stages, 0)
    check_split(model, graph, choice, 2, cuts, stages, tmp_path / "out", inputs)
    assert "batch_norm_of_split_batch(" in text_of(tmp_path / "out")


def test_constants_are_cut_for_each_rank(tmp_path: Path) -> None:
    """A parameter that starts from data, and a buffer of the code, are read from the package's own file."""
    torch.manual_seed(0)
    model = Positions().double()
    graph = trace(model, (torch.randn(4, 6, dtype=torch.float64),), check=False)
    program = Program.of(graph, 2)
    held = {str(n.target): S(0, 6) for n in program.layouts if n.op == "get_attr" and S(0, 6) in program.layouts[n]}
    assert len(held) == 2
    choice = choose(program, held, lambda node, legal, layout: legal[0])
    inputs = {graph.inputs[0].name: torch.randn(4, 6, dtype=torch.float64)}
    cuts = random_cuts(rewrite(graph, choice, 2), 1, 0)
    package = check_split(model, graph, choice, 2, cuts, 1, tmp_path / "out", inputs)
    for rank, stages in enumerate(package.ranks.run(lambda rank: package.package.anew().stages)):
        assert torch.equal(stages[0].scale, model.scale[3 * rank : 3 * rank + 3])


class Positions(nn.Module):
    """Scales that no `state_dict` of a fresh model could draw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(6) * 0.37 + torch.randn(6))
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[3, 3, 7, 10], [0, 0, 10, 10], [2, 5, 5, 8]])
@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_matrix_products_are_those_of_the_library(dtype: torch.dtype, ends: list[int], autocast: bool) -> None:
    importlib.import_module("transformers.integrations.moe")
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in ((10, 6), (4, 6, 8)))
    seed = torch.randn(10, 8, generator=generator).to(dtype)
    found = []
    for function in (torch.ops.transformers.grouped_mm_fallback, grouped_mm):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = function(x, weight, torch.tensor(ends, dtype=torch.int32))
        found.append((result, *torch.autograd.grad(result, (x, weight), seed)))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_result_of_an_early_stage_may_stay_in_shards(tmp_path: Path) -> None:
    """T5 returns what its encoder gives: shards in training, whole in evaluation."""
    model, graph, inputs = traced("t5")
    program = Program.of(graph, 2)
    for seed in range(20):
        local = rewrite(graph, random_choice(program, random.Random(seed)), 2)
        if local.output_splits[-1] is not None:
            break
    assert graph.outputs[-1].path == "encoder_last_hidden_state" and local.output_splits[-1] is not None
    check_split(model, graph, local.choice, 2, random_cuts(local, 3, 0), 3, tmp_path / "out", inputs)


def test_shards_are_gathered_in_front_of_a_module_that_is_kept_whole(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = AroundUndecided().double(), torch.randn(4, 8, dtype=torch.float64)
    graph = trace(model, (x,), check=False)
    assert graph.opaque

    def pick(node: fx.Node, legal: list[Strategy], layout: object) -> Strategy:
        return next((s for s in legal if s.outputs[0].split == Split(1, (12,))), legal[0])

    choice = choose(Program.of(graph, 2), {}, pick)
    assert choice.strategies["linear"].outputs[0].split is not None
    emit_split(graph, choice, 2, {n.name: 0 for n in rewrite(graph, choice, 2).primary.calls}, 1, tmp_path / "out")
    assert text_of(tmp_path / "out").count("self.whole(") == 1
    assert verify(tmp_path / "out", model, (x,), launch=in_pool(pool), steps=2).passed
