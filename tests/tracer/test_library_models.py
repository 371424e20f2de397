"""Models of transformers, timm and torchvision: equal to eager, the same on meta, cut into the blocks people know."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from library_models import MODELS
from oracle import differences

from autopart.blocks import find_blocks
from autopart.graph import Graph
from autopart.graph_signature import signature
from autopart.tracer import trace

BLOCKS = {
    "gpt2": {"transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"},
    "bert": {"bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"},
    "albert": {"albert.encoder.albert_layer_groups.0", "albert.encoder.albert_layer_groups.0@1"},
    "t5": {"encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1", "lm_head"},
    "llama": {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"},
    "resnet18": {"conv1", "bn1", "layer1.0", "layer1.1", "layer4.1", "fc"},
    "swin": {"features.1.0", "features.1.1", "features.2", "features.5.0", "features.5.3", "head"},
    "densenet": {f"features.denseblock3.denselayer{i}" for i in (1, 2, 3, 4)} | {"features.transition1"},
    "vit": {"patch_embed", "blocks.0", "blocks.2", "head"},
}
_traced: dict[str, Graph] = {}


def traced(name: str) -> Graph:
    if name not in _traced:
        torch.manual_seed(0)
        _traced[name] = trace(*MODELS[name]())
    return _traced[name]


@pytest.mark.parametrize("name", MODELS)
def test_library_models_equal_eager(name: str) -> None:
    modes = (True, False) if name in ("gpt2", "t5", "vit", "mixtral", "m2m_100", "longt5") else (True,)
    assert differences(MODELS[name], modes=modes) == []


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "resnet18", "vit"])
def test_meta_gives_the_same_graph(name: str) -> None:
    with torch.device("meta"):
        model, args, kwargs = MODELS[name]()
    meta = trace(model, args, kwargs)
    assert signature(meta) == signature(traced(name))
    assert all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_the_ones_people_know(name: str) -> None:
    graph = traced(name)
    blocks = find_blocks(graph, graph.primary)
    assert BLOCKS[name] <= set(blocks.values())
    assert set(blocks) == {n.name for n in graph.primary.calls}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_can_be_put_in_an_order(name: str) -> None:
    graph = traced(name)
    blocks = find_blocks(graph, graph.primary)
    edges = {
        (blocks[s.name], blocks[n.name])
        for n in graph.primary.calls
        for s in n.all_input_nodes
        if s.name in blocks and blocks[s.name] != blocks[n.name]
    }
    left = set(blocks.values())
    while left:
        free = {b for b in left if not any(s in left and t == b for s, t in edges)}
        assert free, f"a cycle through {left}"
        left -= free
    for group in graph.primary.colocated:
        assert len({blocks[name] for name in group}) == 1


def test_no_block_of_a_deep_model_holds_most_of_it() -> None:
    graph = traced("densenet")
    sizes = Counter(find_blocks(graph, graph.primary).values())
    assert max(sizes.values()) * 4 < len(graph.primary.calls)


def test_the_key_value_cache_is_left_out_and_noted() -> None:
    model, args, kwargs = MODELS["gpt2"]()
    graph = trace(model, args, kwargs)
    assert model.config.use_cache is True
    assert [o.path for o in graph.outputs] == ["loss", "logits"]
    assert any("use_cache" in note for note in graph.notes)
    assert graph.result["object"].endswith("CausalLMOutputWithCrossAttentions")


def test_a_layer_drop_is_named_with_its_remedy() -> None:
    assert any("layerdrop=0" in note for note in traced("m2m_100").notes)


def test_custom_functions_of_a_library_are_named() -> None:
    assert any(n.startswith("YosoCumulation") for n in traced("yoso").notes)


def test_an_eight_billion_parameter_model_is_traced_on_meta_in_little_memory() -> None:
    script = """
import time, resource, torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
import transformers.models.llama.modeling_llama
from autopart.tracer import trace
config = LlamaConfig(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, vocab_size=128256,
                     num_attention_heads=32, num_key_value_heads=8)
with torch.device("meta"):
    model, ids = LlamaForCausalLM(config), torch.zeros(8, 2048, dtype=torch.long)
start = time.process_time()
graph = trace(model, (), {"input_ids": ids, "labels": ids}, microbatches=8)
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, len(graph.primary.calls))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, gib, calls = map(float, run.stdout.split()[-3:])
    assert seconds < 30 and gib < 4 and calls > 1500, run.stdout
