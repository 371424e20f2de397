"""Does a model compute the same when its tensors are split? Random legal layouts of every family, by `verify`.

Every family is captured once, in float64. On each mesh (stages x tensor ranks) the best plan and random legal layouts
are emitted and verified on real processes: the loss, outputs, every gradient, buffers, and every weight after three
steps. Random layouts of a mesh prefer strategies that were not drawn before. Sizes are odd on purpose: vocabularies and
widths that do not divide, six heads, two key-value heads on four ranks.

    python -m benchmarks.tensor_exactness [--only PATTERN] [--mesh 1x2 1x4 2x2] [--random 10] [--json FILE]

Plans are made for devices and links that take no time to start, or such small models would not be split at all.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart.cluster import Cluster
from autopart.codegen import emit
from autopart.costs import Costs
from autopart.degrees import plan_degrees, plan_layouts
from autopart.errors import AutopartError
from autopart.graph import Graph
from autopart.model_spec import load
from autopart.plan import Plan
from autopart.profiler import LayoutPrices, profile
from autopart.sharding import Program, random_choice
from autopart.solver import priced
from autopart.tracer import trace
from autopart.verification import verify
from autopart.verification.report import KINDS
from autopart.workload import Workload
from benchmarks.double import InDouble
from benchmarks.output import differences, parser, show
from benchmarks.processes import Processes, swift_cluster

MICROBATCHES = 2
TOLERANCE = 1e-9
MESHES = ("1x2", "1x4", "2x2")
PARAMETER_NOISE = 0.05
LABELLED, IGNORED = ("gpt2", "llama", "bert", "t5", "mixtral", "phi3"), 3

_LLAMA = "hidden_size=48&num_hidden_layers=2&num_key_value_heads=2&vocab_size=101&max_position_embeddings=32"
FAMILIES = {
    # Six heads on four ranks, and an odd vocabulary that is tied.
    "gpt2": "hf:gpt2?n_layer=2&n_embd=48&n_head=6&vocab_size=101&n_positions=16&batch=4&seq=8",
    "llama": f"hf:llama?{_LLAMA}&num_attention_heads=4&intermediate_size=50&batch=4&seq=8",
    "bert": "hf:bert?num_hidden_layers=2&hidden_size=32&num_attention_heads=4&intermediate_size=50&vocab_size=101"
    "&max_position_embeddings=16&batch=4&seq=8",
    "t5": "hf:t5?num_layers=1&d_model=32&d_kv=8&num_heads=4&d_ff=50&vocab_size=101&batch=4&seq=8",
    "mixtral": f"hf:mixtral?{_LLAMA}&num_attention_heads=4&intermediate_size=40&num_local_experts=4"
    "&_experts_implementation=batched_mm&batch=4&seq=8",
    "phi3": f"hf:phi3?{_LLAMA}&num_attention_heads=4&intermediate_size=50&pad_token_id=0&batch=4&seq=8",
    "vit": "benchmarks.small_models:vit",
    "swin": "timm:swin_tiny_patch4_window7_224?img_size=32&patch_size=2&window_size=4&embed_dim=16&depths=[2,2]"
    "&num_heads=[2,4]&num_classes=10&batch=4",
    "convnext": "timm:convnext_atto?depths=[1,1,1,1]&dims=[8,16,24,32]&num_classes=10&image=32&batch=4",
    "resnet": "timm:resnet18?layers=[1,1,1,1]&channels=[8,16,24,32]&num_classes=10&image=32&batch=8",
    "mobilenet": "torchvision:mobilenet_v2?width_mult=0.5&inverted_residual_setting=[[1,8,1,1],[4,16,2,2]]"
    "&num_classes=10&image=32&batch=8",
    "lstm": "zoo:lstm?vocabulary=101&width=16&layers=2&batch=4&seq=6",
    "dlrm": "zoo:dlrm?tables=4&rows=50&width=8&bottom=16&top=16&batch=8",
}


@dataclass(frozen=True)
class Captured:
    """A family's model in float64, with one batch."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: Graph


def captured(name: str) -> Captured:
    """Build and trace a family.

    Every parameter is random, for libraries start some at zero, which hides errors; some labels are ignored, more in
    one row than in another.
    """
    loaded = load(FAMILIES[name], meta=False)
    model = loaded.model.double()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(PARAMETER_NOISE * noise)
    args, kwargs = tuple(map(_double, loaded.args)), {key: _double(value) for key, value in loaded.kwargs.items()}
    if name in LABELLED:
        kwargs["labels"] = kwargs["labels"].clone()
        kwargs["labels"][0, :IGNORED] = -100
    with InDouble():
        graph = trace(model, args, kwargs, microbatches=MICROBATCHES, check=False)
    return Captured(name, model, args, kwargs, graph)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@dataclass
class Row:
    """All plans of one family on one mesh."""

    family: str
    mesh: str
    plans: int = 0
    passed: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    strategies: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def printed(self) -> dict[str, Any]:
        errors = {kind.replace("weight_after_steps", "weights"): self.worst.get(kind) for kind in KINDS}
        return {
            "family": self.family,
            "mesh": self.mesh,
            "verified": f"{self.passed} of {self.plans}",
            **errors,
            "parameters": self.parameters,
            "strategies drawn": self.strategies,
            "seconds": round(self.seconds, 1),
            "failures": "; ".join(self.failures),
        }


def plans(
    family: Captured, costs: Costs, cluster: Cluster, stages: int, t: int, count: int, used: Counter[tuple[str, str]]
) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """(name, function that makes it) of the best plan and of `count` random ones."""
    graph = family.graph
    workload = Workload("training", MICROBATCHES, graph.microbatch_size, "1f1b", "sgd")
    yield "best", lambda: plan_degrees(graph, costs, cluster, workload, tensor=t, stages=stages).plan
    program = Program.of(graph, t)

    def at_random(seed: int) -> Plan:
        choice = random_choice(program, random.Random(seed), used)
        chosen = priced(graph, LayoutPrices(graph, cluster), cluster, t, choice, optimizer=workload.optimizer)
        return plan_layouts(graph, chosen, cluster, workload, {"stages": stages}).plan

    for seed in range(count):
        yield f"random {seed}", partial(at_random, seed)


def run(family: Captured, mesh: str, count: int, processes: Processes) -> Row:
    """Verify every plan of a family on a mesh, with a line for each that fails."""
    stages, t = map(int, mesh.split("x"))
    row = Row(family.name, mesh)
    cluster = swift_cluster(stages * t)
    costs = profile(family.graph, cluster)
    used: Counter[tuple[str, str]] = Counter()
    start = time.perf_counter()
    for name, make in plans(family, costs, cluster, stages, t, count, used):
        row.plans += 1
        reason = _verified(family, make, processes, row)
        if reason is None:
            row.passed += 1
        else:
            row.failures.append(f"{name}: {reason}")
            print(f"  {family.name} {mesh} {name} FAILED: {reason}", flush=True)
    program = Program.of(family.graph, t)
    legal = {(str(node.target), str(s)) for node, found in program.strategies.items() for s in found}
    row.strategies = f"{len(used)} of {len(legal)}"
    row.seconds = time.perf_counter() - start
    return row


def _verified(family: Captured, make: Callable[[], Plan], processes: Processes, row: Row) -> str | None:
    """Why one plan is not exact, or None."""
    try:
        with tempfile.TemporaryDirectory(prefix="autopart-exactness-") as work:
            package = Path(work) / "package"
            emit(family.graph, make(), package)
            with InDouble():
                report = verify(package, family.model, family.args, family.kwargs, launch=processes.launch)
    except AutopartError as error:
        return f"{type(error).__name__}: {error.message}"
    for kind, error in report.worst_relative_error.items():
        if error is not None:
            row.worst[kind] = max(row.worst.get(kind, 0.0), error)
    row.parameters = report.parameters
    if reason := differences(report, TOLERANCE):
        return reason
    names = len(list(family.model.named_parameters(remove_duplicate=False)))
    if report.parameters != names or report.compared["gradient"] < names * report.steps:
        return f"only {report.compared['gradient']} gradients of {names} parameters were compared"
    return None if report.passed else "nothing was compared"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="*", metavar="PATTERN", help="names of families")
    options.add_argument("--mesh", nargs="+", default=MESHES, metavar="STAGESxTENSOR")
    options.add_argument("--random", type=int, default=10, metavar="N", help="random layouts for each mesh")
    arguments = options.parse_args()
    rows = []
    with Processes() as processes:
        for name in FAMILIES:
            if not fnmatch(name, arguments.only):
                continue
            family = captured(name)
            for mesh in arguments.mesh:
                row = run(family, mesh, arguments.random, processes)
                rows.append(row)
                print(f"{name} {mesh}: {row.passed} of {row.plans} in {row.seconds:.0f} s", flush=True)
    worst = [error for row in rows for error in row.worst.values()]
    summary = {
        "plans verified": f"{sum(row.passed for row in rows)} of {sum(row.plans for row in rows)}",
        "worst relative error": max(worst, default=math.nan),
        "minutes": round(sum(row.seconds for row in rows) / 60, 1),
    }
    show([row.printed() for row in rows], arguments.json, summary)
    return int(any(row.failures for row in rows) or not rows)


if __name__ == "__main__":
    sys.exit(main())
