"""Real models in small, and the truths about them that eager PyTorch tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from autopart.graph import Graph
from autopart.tracer import trace
from models import unet

Example = tuple[nn.Module, dict[str, Any]]


def _tokens() -> Tensor:
    return torch.randint(2, 100, (2, 24), generator=torch.Generator().manual_seed(0))


def _images(size: int, name: str = "x") -> dict[str, Any]:
    return {name: torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))}


def _language(padded: bool = False) -> dict[str, Any]:
    """Tokens; `padded` with a mask that hides some, for models that drop a mask of ones when they are not traced."""
    mask = {"attention_mask": (torch.arange(24) < torch.tensor([[24], [20]])).long()} if padded else {}
    return {"input_ids": _tokens(), "labels": _tokens(), **mask}


def gpt2(**options: Any) -> Example:
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=1, **options
    )
    return GPT2LMHeadModel(config), {**_language(), "use_cache": False}


def bert() -> Example:
    config = BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=96, vocab_size=100
    )
    return BertForMaskedLM(config), _language()


def albert() -> Example:
    config = AlbertConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=100,
        embedding_size=32,
    )
    return AlbertForMaskedLM(config), _language(padded=True)


def t5() -> Example:
    config = T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=100,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    return T5ForConditionalGeneration(config), {**_language(padded=True), "use_cache": False}


def resnet() -> Example:
    return torchvision.models.resnet18(num_classes=10), _images(64)


def densenet() -> Example:
    return torchvision.models.DenseNet(8, (2, 2), 16, num_classes=10, drop_rate=0.1), _images(64)


def vit() -> Example:
    options = {"img_size": 32, "num_classes": 10, "depth": 2, "drop_rate": 0.1, "attn_drop_rate": 0.1}
    return timm.create_model("vit_tiny_patch16_224", **options), _images(32)


def swin() -> Example:
    options = {"img_size": 56, "num_classes": 10, "depths": (1, 1), "drop_path_rate": 0.1}
    return timm.create_model("swin_tiny_patch4_window7_224", **options), _images(56)


def unet_batch_norm() -> Example:
    model, _, _ = unet.make(width=8, depth=2, norm="batch")
    return model, _images(32, "image")


EXAMPLES: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2,
    "gpt2 without fused attention": lambda: gpt2(attn_implementation="eager"),
    "bert": bert,
    "albert": albert,
    "t5": t5,
    "resnet": resnet,
    "densenet": densenet,
    "vit": vit,
    "swin": swin,
    "unet": unet_batch_norm,
}


@cache
def traced(name: str) -> tuple[nn.Module, dict[str, Any], Graph]:
    """An example in training mode and its graph; made once, because tracing is the slow part."""
    model, kwargs = EXAMPLES[name]()
    model.train()
    return model, kwargs, trace(model, (), kwargs, check=False)


def loss_of(output: Any) -> Tensor:
    """The loss that a captured graph computes: the model's own, or the stand-in."""
    return output.loss if hasattr(output, "loss") else output.square().mean()


def eager_saved_bytes(model: nn.Module, kwargs: dict[str, Any]) -> list[int]:
    """Sizes of all storages but the model's own that autograd keeps after a real forward pass, sorted."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model(**kwargs))
    sizes = sorted(storage.nbytes() for storage in kept.values() if storage.nbytes())
    del loss
    return sizes


def eager_flops(model: nn.Module, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Floating-point operations of a real forward and backward pass, as torch counts them."""
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model(**kwargs))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    model.zero_grad()
    return forward.get_total_flops(), backward.get_total_flops()


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """The most bytes that the CPU allocator handed out above the start, by the profiler's memory events.

    A dispatch mode would change what autograd allocates; the allocator's own events do not.
    """
    peak = [0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        yield peak
    live = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak[0] = max(peak[0], live)
