"""How long does it take to plan a model that does not fit on this machine?

Llama-3-8B (8.0 billion parameters, on `meta`, so that no weight exists) on 8 x H100: seconds of each step of
`partition` and of `emit`, the peak memory of this process, and how much code a person has to read of one stage.
"""

from __future__ import annotations

import argparse
import ast
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

import autopart
from benchmarks.output import parser, show

logging.set_verbosity_error()


def llama_3_8b(device: str = "meta") -> torch.nn.Module:
    """Llama-3-8B by its published configuration; on `meta` without weights."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def code_lines(file: Path) -> int:
    """Lines of a Python file that are neither blank, nor comment, nor docstring."""
    text = file.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in docstrings)


def classes(files: list[Path]) -> list[str]:
    """Names of the classes that files define."""
    trees = [ast.parse(file.read_text()) for file in files]
    return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of seconds, and the rest."""
    model = llama_3_8b()
    tokens = torch.zeros(options.batch, options.length, dtype=torch.long, device="meta")
    start, cpu_start = time.perf_counter(), time.process_time()
    plan = autopart.partition(
        model, options.gpus, example_kwargs={"input_ids": tokens, "labels": tokens}, microbatches=options.batch
    )
    with tempfile.TemporaryDirectory() as directory:
        package = plan.emit(Path(directory) / "out")
        total, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        stage = package / f"stage_{plan.strategy.stages // 2}.py"
        shared = package / "blocks.py"
        read = [file for file in (stage, shared) if file.exists()]
        summary = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "nodes": len(plan.graph.primary.calls),
            "peak memory, GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            "read for one middle stage": ", ".join(file.name for file in read),
            "its lines": sum(len(file.read_text().splitlines()) for file in read),
            "its lines of code": sum(code_lines(file) for file in read),
            "its classes": ", ".join(classes(read)),
            "decoder layer classes in the package": len(
                [name for name in classes(sorted(package.glob("*.py"))) if "DecoderLayer" in name]
            ),
            "stages x tensor ranks": f"{plan.strategy.stages} x {plan.strategy.tensor}",
            "step by tensor ranks, s": {t: round(time_s, 3) for t, time_s in plan.degrees.items()},
            "granularity": plan.granularity,
            "status": plan.status,
            "predicted step, s": plan.step_time_s,
            "gap": plan.gap,
            "balance": plan.balance,
            "worst device, GiB": round(max(s.peak_memory_bytes for s in plan.per_stage) / 2**30, 1),
        }
    rows = [{"step": step, "seconds": seconds} for step, seconds in plan.seconds.items()]
    return [*rows, {"step": "all", "seconds": total}, {"step": "all, CPU seconds", "seconds": cpu}], summary


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--gpus", default="8xH100-80G")
    arguments.add_argument("--batch", type=int, default=32, help="rows of a step, each a microbatch")
    arguments.add_argument("--length", type=int, default=2048, help="tokens of a row")
    chosen = arguments.parse_args()
    timings, facts = run(chosen)
    show(timings, chosen.json, facts)
