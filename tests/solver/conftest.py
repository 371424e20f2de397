"""Small real models, captured and costed once."""

import dataclasses

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from autopart.cluster import Cluster
from autopart.profiler import profile
from autopart.tracer import trace
from autopart.workload import Workload

MICROBATCHES = 8


class Case:
    """A captured model with the costs of a cluster."""

    def __init__(self, model, args, kwargs, **options):
        self.graph = trace(model, args, kwargs, microbatches=MICROBATCHES, check=False, **options)

    def on(self, cluster, memory_bytes=None, schedule="1f1b", optimizer="adamw"):
        """Arguments of `solve`, by position."""
        cluster = Cluster.parse(cluster)
        if memory_bytes is not None:
            devices = tuple(dataclasses.replace(d, memory_bytes=int(memory_bytes)) for d in cluster.devices)
            cluster = dataclasses.replace(cluster, devices=devices)
        workload = Workload(self.graph.mode, MICROBATCHES, self.graph.microbatch_size, schedule, optimizer)
        return self.graph, profile(self.graph, cluster), cluster, workload


def _ids(length):
    return torch.zeros(MICROBATCHES, length, dtype=torch.long)


def gpt2_model(**options):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=512, n_positions=64, use_cache=False)
    return GPT2LMHeadModel(config), (), {"input_ids": _ids(32), "labels": _ids(32)}


@pytest.fixture(scope="session")
def gpt2():
    return Case(*gpt2_model())


@pytest.fixture(scope="session")
def t5():
    config = T5Config(
        num_layers=2,
        d_model=64,
        d_kv=16,
        num_heads=4,
        d_ff=128,
        vocab_size=256,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return Case(T5ForConditionalGeneration(config), (), {"input_ids": _ids(32), "labels": _ids(16)})
