"""Real models on tensor ranks: everything equals the model's, and with dropout all ranks keep equal weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import in_pool
from pool import Pool
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopart
from autopart.runtime.process import Process
from autopart.verification import verify
from autopart.verification.worker import imported

WORDS, ROWS, LENGTH, MICROBATCHES = 50, 8, 6, 4
COMMON: dict[str, Any] = {"vocab_size": WORDS, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=4, n_positions=16, **COMMON))


def llama() -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, **COMMON))


def planned(build: Any, stages: int, tensor: int, places: int, **options: Any) -> tuple[Any, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = build()
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    kwargs = {"input_ids": ids, "labels": ids.flip(0)}
    plan = autopart.partition(
        model,
        f"{places * tensor}xA100-80G",
        example_kwargs=kwargs,
        microbatches=MICROBATCHES,
        stages=stages,
        tensor=tensor,
        optimizer="sgd",
        **options,
    )
    return plan, model, kwargs


@pytest.mark.parametrize(
    ("build", "stages", "tensor", "places", "schedule"),
    [(gpt2, 4, 2, 2, "zbv"), (llama, 2, 2, 2, "1f1b"), (llama, 1, 4, 1, "gpipe")],
)
def test_a_package_equals_its_model(
    pool: Pool, build: Any, stages: int, tensor: int, places: int, schedule: str
) -> None:
    plan, model, kwargs = planned(build, stages, tensor, places, schedule=schedule, dtype=torch.float64)
    report = verify(plan, model, kwargs=kwargs, steps=2, launch=in_pool(pool))
    assert report.passed, str(report)
    assert report.processes == places * tensor
    assert max(error for error in report.worst_relative_error.values() if error is not None) < 1e-9
    parameters = len(list(model.named_parameters(remove_duplicate=False)))
    assert report.parameters == parameters
    assert report.compared["gradient"] >= 2 * parameters and report.compared["weight_after_steps"] >= parameters
    assert not any("randint" in note or "differ" in note for note in report.notes)


def _weights_after_training(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """The weights of this process that are whole, after steps with dropout."""
    with imported(folder) as module:
        runtime = importlib.import_module("runtime.train")
        process = Process(rank, dist.get_world_size(), torch.device("cpu"))
        options = runtime.parser(module.PIPELINE).parse_args([])
        engine = runtime.build(
            module.PIPELINE,
            schedule=options.schedule,
            microbatches=MICROBATCHES,
            seed=0,
            dtype=module.PIPELINE.dtype,
            process=process,
        )
        optimizer = runtime.make_optimizer("adamw", 1e-2, engine)
        for batch in runtime._batches(module.PIPELINE, options)[1]:
            optimizer.zero_grad()
            engine.step(batch)
            optimizer.step()
        state = {n: p.detach().clone() for part in engine.modules.values() for n, p in part.named_parameters()}
        return {name: p for name, p in state.items() if name not in module.PIPELINE.shards}


def test_with_dropout_all_ranks_keep_the_same_weights(pool: Pool, tmp_path: Path) -> None:
    plan, _, _ = planned(gpt2, 2, 2, 2)
    folder = plan.emit(tmp_path / "package")
    first, second, third, fourth = pool.run(4, _weights_after_training, str(folder))
    assert first and third
    for one, other in ((first, second), (third, fourth)):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)
