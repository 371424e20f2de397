"""What a package looks like: each kind of block once, formatted, the same bytes every time, and torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torchvision
import transformers as hf
from emitted import legal, make_plan, random_cuts
from small_models import MODELS
from torch import nn

from autopart.codegen import emit
from autopart.graph import Graph
from autopart.tracer import trace


def by_layers(graph: Graph, prefix: str, layers: int, stages: int) -> Mapping[str, int]:
    """Equal runs of layers; what comes before them goes to the first stage, what comes after to the last."""
    assignment: dict[str, int] = {}
    for node in graph.primary.calls:
        paths = [path for path, _ in node.meta["nn_module_stack"].values()]
        layer = next((p for p in paths if p.startswith(prefix)), None)
        inputs = [assignment[i.name] for i in node.all_input_nodes if i.name in assignment]
        assignment[node.name] = (
            int(layer.removeprefix(prefix).split(".")[0]) * stages // layers if layer else max(inputs, default=0)
        )
    return legal(graph, assignment)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hf.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    graph = trace(model, (), {"input_ids": tokens, "labels": tokens})
    folder = tmp_path_factory.mktemp("llama") / "out"
    emit(graph, make_plan(graph, by_layers(graph, "model.layers.", 32, 8), 8), folder)
    return folder


def test_llama_8b_shows_its_decoder_layer_once_in_150_lines(llama_8b: Path) -> None:
    blocks, middle = (llama_8b / "blocks.py").read_text(), (llama_8b / "stage_3.py").read_text()
    assert len(blocks.splitlines()) + len(middle.splitlines()) <= 150
    everything = "\n".join(path.read_text() for path in llama_8b.glob("*.py"))
    assert everything.count("class LlamaDecoderLayer") == 1
    assert "for layer in self.layers.values():" in middle
    assert "torch.ops" not in everything


def test_llama_8b_keeps_every_key(llama_8b: Path) -> None:
    names = (llama_8b / "pipeline.py").read_text()
    assert names.count("model.layers.31.mlp.down_proj.weight") >= 1
    assert '"lm_head.weight": (7, "lm_head.weight")' in names


@pytest.mark.parametrize("name", ["gpt2", "swin", "t5"])
def test_packages_are_formatted_and_clean_and_the_same_every_time(name: str, tmp_path: Path) -> None:
    model, args, kwargs = MODELS[name]()
    graph = trace(model, args, kwargs, check=False)
    plan = make_plan(graph, random_cuts(graph, 3, 0), 3)
    emit(graph, plan, tmp_path / "one")
    emit(graph, plan, tmp_path / "two")
    one, two = (
        {p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()}
        for d in (tmp_path / "one", tmp_path / "two")
    )
    assert one == two
    written = [str(p) for p in (tmp_path / "one").glob("*.py")]
    for command in (["format", "--check"], ["check", "--select", "F,I"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", *written], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_packages_import_nothing_but_torch_and_their_own_files(name: str, tmp_path: Path) -> None:
    model, args, kwargs = MODELS[name]()
    graph = trace(model, args, kwargs, check=False)
    emit(graph, make_plan(graph, random_cuts(graph, 2, 0), 2), tmp_path / "out")
    own = {p.stem for p in (tmp_path / "out").glob("*.py")} | {"runtime"}
    for path in (tmp_path / "out").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for module in modules:
                root = module.split(".")[0]
                assert root == "torch" or root in own or root in sys.stdlib_module_names, (path.name, module)


class Pooled(nn.Module):
    """Features of boxes, by an operator of torchvision's own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return torchvision.ops.roi_align(self.features(images), boxes, 4)


def test_packages_say_which_library_their_operators_are_from(tmp_path: Path) -> None:
    boxes = torch.tensor([[0.0, 0, 0, 4, 4], [1, 1, 1, 6, 6]])
    graph = trace(Pooled(), (torch.randn(2, 3, 8, 8), boxes), check=False)
    emit(graph, make_plan(graph, random_cuts(graph, 1, 0), 1), tmp_path / "out")
    assert "It needs torch and torchvision." in (tmp_path / "out" / "README.md").read_text()
    assert "import torchvision" in (tmp_path / "out" / "stage_0.py").read_text()


def test_grouped_matrix_products_need_torch_alone(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["mixtral"]()
    graph = trace(model, args, kwargs, check=False)
    assert any("grouped_mm" in str(node.target) for node in graph.primary.calls)
    emit(graph, make_plan(graph, random_cuts(graph, 2, 0), 2), tmp_path / "out")
    assert "It needs torch alone." in (tmp_path / "out" / "README.md").read_text()
    assert "from runtime.split_operators import grouped_mm" in (tmp_path / "out" / "stage_0.py").read_text()


def test_stage_files_say_what_the_plan_predicts(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["unet"]()
    graph = trace(model, args, kwargs, check=False)
    emit(graph, make_plan(graph, random_cuts(graph, 2, 0), 2), tmp_path / "out")
    text = (tmp_path / "out" / "stage_1.py").read_text()
    assert "forward 1 ms, backward 2 ms, communication 0.1 ms" in text and "peak memory 1 GiB of 16 GiB" in text
    assert "captured in float32" in text
