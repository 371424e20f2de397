"""Small configurations of library models: name -> function giving (model, args, kwargs)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import timm
import torch
import torchvision
import transformers as hf


def ids(rows: int = 4, length: int = 8) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) * 7 % 50 + 2


def image(size: int = 32) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size).sin()


def language(model: Callable[[], Any], labels: bool = True) -> Callable[[], Any]:
    return lambda: (model(), (), {"input_ids": ids(), **({"labels": ids()} if labels else {})})


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
T5 = dict(num_layers=2, d_model=32, d_ff=64, d_kv=16, num_heads=2, vocab_size=64, decoder_start_token_id=0)
M2M = dict(
    vocab_size=64, encoder_layers=2, decoder_layers=2, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64,
    encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=1, max_position_embeddings=32,
)  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": language(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        )
    ),
    "bert": language(lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)), labels=False),
    "albert": language(lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(embedding_size=16, **SMALL))),
    "t5": language(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5))),
    "llama": language(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **SMALL))),
    "mixtral": language(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL))
    ),
    "yoso": language(lambda: hf.YosoModel(hf.YosoConfig(max_position_embeddings=32, **SMALL)), labels=False),
    "longt5": lambda: (
        hf.LongT5ForConditionalGeneration(
            hf.LongT5Config(**T5, encoder_attention_type="transient-global", local_radius=4, global_block_size=4)
        ),
        (),
        {"input_ids": ids(2, 24), "labels": ids(2, 8)},
    ),
    "m2m_100": lambda: (
        hf.M2M100ForConditionalGeneration(hf.M2M100Config(**M2M, decoder_start_token_id=0)),
        (),
        {"input_ids": ids(), "labels": ids()},
    ),
    "resnet18": lambda: (torchvision.models.resnet18(num_classes=10), (image(),), {}),
    "swin": lambda: (
        torchvision.models.SwinTransformer([4, 4], 8, [2, 2, 4], [2, 2, 4], [4, 4], num_classes=10),
        (image(64),),
        {},
    ),
    "densenet": lambda: (torchvision.models.DenseNet(8, (2, 3, 4), 8, num_classes=10), (image(),), {}),
    "vit": lambda: (
        timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10, drop_path_rate=0.2),
        (image(),),
        {},
    ),
}
