"""One process of a verification: runs a package as its own `train.py` would, and writes down all it computed.

A script for `torchrun`; it uses the package's own copy of the runtime, and needs torch alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LEARNING_RATE = 0.05
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@contextmanager
def imported(package: str) -> Iterator[ModuleType]:
    """The package's `pipeline` module; it and what it imports from its folder are forgotten afterwards."""
    folder = Path(package).resolve()
    own = _own_names(folder)
    shadowed = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in own}
    for name in shadowed:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("pipeline")
    finally:
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.partition(".")[0] in own]:
            del sys.modules[name]
        sys.modules.update(shadowed)


def _own_names(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def execute(job: dict[str, Any], process: Any) -> dict[str, Any]:
    """Run a job on this process: training steps, then one evaluation.

    Returns:
        What `autopart.verify` compares: this process's tensor rank; for every step gradients and buffers by (stage,
        name), losses and outputs of each microbatch; weights after the last step, and the outputs in evaluation mode.
    """
    fixed = _fixed_randomness()
    # Where dropout is zero, no rank needs a stream of its own; a draw for it would be reported as one of the model's.
    split_operators: Any = importlib.import_module("runtime.split_operators")
    split_operators.rank_stream = lambda device: nullcontext()
    pipeline = importlib.import_module("pipeline").PIPELINE
    train = importlib.import_module("runtime.train")
    engine = train.build(
        pipeline,
        schedule=job["schedule"],
        microbatches=job["microbatches"],
        seed=0,
        dtype=pipeline.dtype,
        process=process,
        weights_file=job["weights"],
    )
    wanted = tuple(output.value for output in pipeline.outputs)
    trained = [p for p in engine.parameters() if p.requires_grad] or [torch.nn.Parameter(torch.zeros(1))]
    optimizer = OPTIMIZERS[job["optimizer"]](trained, lr=LEARNING_RATE)
    results: dict[str, Any] = {"tensor_rank": engine.mesh.rank, "steps": []}
    with fixed:
        for step, batch in enumerate(job["batches"] if pipeline.loss is not None else []):
            process.step = step
            optimizer.zero_grad()
            _, kept = engine.step(batch, wanted)
            results["steps"].append(
                {
                    "gradients": _by_place(engine, lambda m: [(n, p.grad) for n, p in _parameters(m)]),
                    "buffers": _by_place(engine, lambda m: m.named_buffers(remove_duplicate=False)),
                    "losses": [k[pipeline.loss] for k in kept],
                    "outputs": [{o.path: k[o.value] for o in pipeline.outputs} for k in kept],
                }
            )
            optimizer.step()
        results["weights"] = _by_place(engine, _parameters)
        evaluated = engine.evaluate_outputs(job["batches"][0])
        results["evaluation"] = evaluated and {
            o.path: t for o, t in zip(pipeline.outputs, evaluated, strict=True) if t is not None
        }
    results["notes"] = fixed.notes()
    return results


def _parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _by_place(engine: Any, named: Any) -> dict[tuple[int, str], torch.Tensor | None]:
    return {
        (stage, name): None if tensor is None else tensor.detach().clone()
        for stage, module in engine.modules.items()
        for name, tensor in named(module)
    }


def _fixed_randomness() -> Any:
    path = Path(__file__).with_name("fixed_randomness.py")
    spec = importlib.util.spec_from_file_location("autopart_fixed_randomness", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FixedRandomness()


def main(job_file: str) -> None:
    """Run a job as one of torchrun's processes; results go beside the job's file, one for each process."""
    job = torch.load(job_file, weights_only=True)
    with imported(job["package"]):
        joined = importlib.import_module("runtime.process").joined
        with joined(job["timeout_s"]) as process:
            try:
                results = execute(job, process)
            except (Exception, SystemExit) as error:
                process.blame(error)
                sys.excepthook = lambda *_: None
                # A package that exits, with whatever status, has not run.
                raise SystemExit(1) from error
            torch.save(results, Path(job_file).with_name(f"results-{process.number}.pt"))


if __name__ == "__main__":
    # torchrun puts this file's folder first on the path; nothing of it may shadow what a package imports.
    sys.path.pop(0)
    main(sys.argv[1])
