"""Mixtures of experts of a library, each with its own router, gates and biases, with tokens sent to their experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from autopart.sharding import Program, rewrite
from autopart.tracer import trace
from tests.sharding.dispatching import by_plain_products, dispatching
from tests.sharding.running import in_double, run_split, run_whole, worst_error

COMMON: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "experts_implementation": "grouped_mm",
    "use_cache": False,
}
SMALL = {"num_key_value_heads": 2, "intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}
MODELS = {
    "gpt-oss": transformers.GptOssConfig(**COMMON, **SMALL, num_local_experts=4, head_dim=8),
    "qwen3-moe": transformers.Qwen3MoeConfig(**COMMON, **SMALL, num_experts=4, moe_intermediate_size=16, head_dim=8),
    "deepseek-v3": transformers.DeepseekV3Config(
        **COMMON, **LATENT, **GROUPS, num_key_value_heads=4, n_routed_experts=8, moe_intermediate_size=16
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_dispatched_tokens_are_exact(name: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(3, 40, (2, 8))
    with by_plain_products():
        graph = in_double(trace(model, (), {"input_ids": ids, "labels": ids}, check=False))
    whole = run_whole(graph, [ids, ids])
    for t in (2, 4):
        choice = dispatching(Program.of(graph, t), t)
        assert [s.name for name, s in choice.strategies.items() if "grouped_mm" in name] == ["all-to-all"] * 2
        found, _ = run_split(rewrite(graph, choice, t), [ids, ids])
        assert max(worst_error(found, whole).values()) < 1e-12
