"""Small models, and plans that are made to recompute blocks."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from autopart.blocks import find_blocks
from autopart.codegen.recomputed import recomputable
from autopart.runtime.process import Process
from autopart.verification.worker import imported

WORDS, ROWS, LENGTH = 40, 8, 6
COMMON: dict[str, Any] = {"vocab_size": WORDS, "use_cache": False}

# A model, and what `partition` and `verify` are given to run it.
Example = tuple[nn.Module, dict[str, Any]]


def _text() -> dict[str, Any]:
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"kwargs": {"input_ids": ids, "labels": ids.flip(0)}}


def gpt2(layers: int = 4) -> Example:
    config = GPT2Config(n_layer=layers, n_embd=16, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0, **COMMON)
    return GPT2LMHeadModel(config), _text()


def llama() -> Example:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, **COMMON)), _text()


def t5() -> Example:
    config = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, **COMMON)
    example = _text()
    example["kwargs"]["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    return T5ForConditionalGeneration(config), example


def _images() -> dict[str, Any]:
    images = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"args": (images,), "target": torch.arange(ROWS) % 5, "loss_fn": F.cross_entropy}


def vit() -> Example:
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5, dropout=0.2
    )
    nn.init.normal_(model.heads.head.weight)  # zeros would keep gradients away from everything before it
    return model, _images()


class Pair(nn.Module):
    """Gives and takes two values, draws numbers, is called with keywords, and computes in another dtype inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(
        self, x: torch.Tensor, *, beside: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.gelu(self.up(x + beside))
        hidden = self.dropout(hidden.clone().mul_(2.0))
        y = self.down(hidden)
        return x + y * self.scale, beside + y.tanh()


class Hazards(nn.Module):
    """Blocks with several results, keywords, a left-out argument, and one weight in two places; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(6))
        self.blocks[4].up.weight = self.blocks[0].up.weight
        self.blocks[1].requires_grad_(False)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = x.cos()
        for block in self.blocks:
            x, beside = block(x, beside=beside)
        return self.last(x + beside)


def hazards() -> Example:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    return Hazards(), {"args": (x,), "target": torch.arange(ROWS) % 5, "loss_fn": F.cross_entropy}


class Autocast(nn.Module):
    """Its blocks run in half precision, and share a weight that is cast once for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(6))
        self.blocks[5][0].weight = self.blocks[4][0].weight
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = x + block(x)
        return self.last(x.float())


def autocast() -> Example:
    return Autocast(), hazards()[1]


MODELS: dict[str, Callable[[], Example]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit, "hazards": hazards}


def for_partition(example: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `verify` under the names of `partition`."""
    names = {"args": "example_inputs", "kwargs": "example_kwargs"}
    return {names.get(name, name): value for name, value in example.items()}


def batch_of(example: dict[str, Any]) -> dict[str, Any]:
    """The global batch as a package takes it."""
    return {"args": (), "kwargs": {}, "target": None, **{k: v for k, v in example.items() if k != "loss_fn"}}


def recomputing(plan: Any, keep_every: int = 0) -> Any:
    """The plan with all blocks recomputed that can be; of those, every `keep_every`th is kept."""
    can = [label for label, reason in recomputable(plan.graph, "1f1b").items() if reason is None]
    chosen = [label for i, label in enumerate(can) if not keep_every or i % keep_every]
    stages: dict[str, set[int]] = {}
    for node, label in find_blocks(plan.graph, plan.graph.primary).items():
        stages.setdefault(label, set()).add(plan.assignment[node])
    per_stage = tuple(
        dataclasses.replace(stage, recomputed=tuple(label for label in chosen if stages[label] == {s}))
        for s, stage in enumerate(plan.per_stage)
    )
    return dataclasses.replace(plan, per_stage=per_stage)


def train(
    rank: int, folder: str, schedule: str, weights: str, batch: dict[str, Any], keep: bool = True
) -> dict[str, Any]:
    """Two steps of gradient descent with dropout; what this process computes, and how often it called a block.

    Args:
        keep: Whether to return gradients and buffers.
    """
    with imported(folder) as module:
        pipeline = module.PIPELINE
        process = Process(rank, dist.get_world_size(), torch.device("cpu"))
        options = {"schedule": schedule, "microbatches": pipeline.microbatches, "seed": 0, "dtype": pipeline.dtype}
        engine = importlib.import_module("runtime.train").build(
            pipeline, process=process, weights_file=weights, **options
        )
        inputs = importlib.import_module("runtime.batches").flatten(batch, pipeline, pipeline.microbatches)
        calls = [0]

        def count(*_: Any) -> None:
            calls[0] += 1

        for part in engine.modules.values():
            for child in part.modules():
                if type(child).__name__ == "GPT2Block":
                    child.register_forward_pre_hook(count)
        optimizer = torch.optim.SGD(engine.parameters(), 0.05)
        losses, tensors = [], {}
        for step in range(2):
            optimizer.zero_grad()
            losses.append(engine.step(inputs)[0])
            for stage, part in engine.modules.items() if keep else ():
                tensors |= {(step, stage, name): _copy(p.grad) for name, p in part.named_parameters()}
                tensors |= {(step, stage, name): b.clone() for name, b in part.named_buffers()}
            optimizer.step()
        return {"losses": losses if losses[0] is not None else [], "tensors": tensors, "calls": calls[0]}


def measure(rank: int, folder: str, schedule: str, weights: str, batch: dict[str, Any]) -> int:
    """The most bytes that the CPU allocator handed out for this process's stages, from weights to the last step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        train(rank, folder, schedule, weights, batch, keep=False)
    live = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
