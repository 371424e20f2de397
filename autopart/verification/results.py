"""What the processes of a package wrote down against what the original model computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.runtime.shards import cut, join, local_size
from autopart.verification.comparison import Comparison
from autopart.verification.reference import Reference

Place = tuple[int, str]
"""(stage, name in that stage)"""


@dataclass(frozen=True)
class Held:
    """One tensor of the package.

    Attributes:
        name: That of the original which it is compared with.
        where: How messages say where it was found.
        parts: What each tensor rank holds of it.
        shard: How they hold it; None where each has all of it.
    """

    name: str
    where: str
    parts: Sequence[torch.Tensor | None]
    shard: Any = None


def compare_all(
    comparisons: Mapping[str, Comparison], pipeline: Any, reference: Reference, results: list[dict[str, Any]]
) -> list[str]:
    """Compare everything; the sentences say what differs beyond the numbers.

    Args:
        results: What `worker.execute` gives on each process.
    """
    names = _original_names(pipeline)
    last = _by_rank([r for r in results if r["evaluation"] is not None])
    shards = {output.path: output.shard for output in pipeline.outputs}
    for number, step in enumerate(reference.steps):
        ran = [{"tensor_rank": r["tensor_rank"], **r["steps"][number]} for r in results]
        label = f"step {number}"
        gradients = list(_state(pipeline, names, ran, "gradients"))
        loss = max(float(loss.abs()) for loss in step.losses)
        _compare(comparisons["gradient"], label, gradients, step.gradients, loss)
        buffers = list(_state(pipeline, names, ran, "buffers"))
        held = {buffer.name for buffer in buffers}
        # Buffers outside of the state_dict that nothing reads are not in a package; its constants are no buffers.
        expected = {n: b for n, b in step.buffers.items() if n in held or n in pipeline.names}
        _compare(comparisons["buffer"], label, [b for b in buffers if b.name in step.buffers], expected)
        own = [r["steps"][number] for r in last]
        for microbatch, expected_outputs in enumerate(step.outputs):
            here = f"{label} microbatch {microbatch}"
            losses = [Held("loss", "", [r["losses"][microbatch] for r in own])]
            _compare(comparisons["loss"], here, losses, {"loss": step.losses[microbatch].reshape(())})
            outputs = _outputs([r["outputs"][microbatch] for r in own], shards)
            _compare(comparisons["output"], here, outputs, expected_outputs)
    weights = list(_state(pipeline, names, results, "weights"))
    _compare(comparisons["weight_after_steps"], f"after {len(reference.steps)} steps", weights, reference.weights)
    evaluated = _outputs([r["evaluation"] for r in last], {})
    _compare(comparisons["output"], "evaluation", evaluated, _whole_batch(reference))
    if _skeleton(pipeline.result) != _skeleton(reference.structure):
        return ["the package's result does not have the structure of the model's"]
    return []


def _compare(
    comparison: Comparison,
    label: str,
    tensors: Iterable[Held],
    expected: Mapping[str, torch.Tensor | None],
    least_scale: float = 0.0,
) -> None:
    """Compare what the package holds with the original of that name; no name may be left out."""
    actual: dict[str, torch.Tensor | None] = {}
    wanted: dict[str, torch.Tensor | None] = {}
    seen = set()
    for held in tensors:
        seen.add(held.name)
        for rank, tensor in _together(held):
            key = f"{held.name}{held.where}{rank}, {label}"
            actual[key] = tensor
            if held.name in expected:
                wanted[key] = expected[held.name]
        for rank in _spoiled(held):
            key = f"{held.name}{held.where}{rank}, {label}"
            comparison.fail(key, f"{comparison.kind} {key} is not zero where it is padded")
    wanted |= {f"{name}, {label}": expected[name] for name in expected if name not in seen}
    comparison.add(actual, wanted, least_scale)


def _together(held: Held) -> list[tuple[str, torch.Tensor | None]]:
    """(where, tensor): the whole tensor from its shards, or what each rank has where it has all of it.

    Where shards are missing or of a wrong size, what each rank has is no whole tensor, and the comparison says so.
    """
    parts = _shards(held)
    if parts is not None:
        return [("", join(parts, held.shard.dim, held.shard.parts))]
    return [(_on_rank(rank, held), part) for rank, part in enumerate(held.parts)]


def _spoiled(held: Held) -> list[str]:
    """Ranks on which the padding of a shard is not zero."""
    parts = _shards(held) or []
    whole = join(parts, held.shard.dim, held.shard.parts) if parts else torch.empty(())
    same = [
        torch.equal(cut(whole, held.shard.dim, held.shard.parts, rank, len(parts)).nan_to_num(), part.nan_to_num())
        for rank, part in enumerate(parts)
    ]
    return [_on_rank(rank, held) for rank, equal in enumerate(same) if not equal]


def _shards(held: Held) -> list[torch.Tensor] | None:
    """The parts of a tensor that is cut, if they fit together."""
    parts = [part for part in held.parts if part is not None]
    if held.shard is None or len(parts) < len(held.parts):
        return None
    size = local_size(held.shard.parts, len(parts))
    shapes = {part.shape for part in parts}
    fit = len(shapes) == 1 and all(len(s) > held.shard.dim and s[held.shard.dim] == size for s in shapes)
    return parts if fit else None


def _on_rank(rank: int, held: Held) -> str:
    return f" on tensor rank {rank}" if len(held.parts) > 1 else ""


def _state(pipeline: Any, names: Mapping[Place, list[str]], results: list[dict[str, Any]], kind: str) -> Iterator[Held]:
    """What the processes hold of one kind, under every name that the original has for it."""
    found: dict[Place, list[torch.Tensor | None]] = {}
    for result in results:
        for place, tensor in result[kind].items():
            found.setdefault(place, [None] * pipeline.tensor)[result["tensor_rank"]] = tensor
    for (stage, name), parts in found.items():
        for original in names.get((stage, name), [name]):
            yield Held(original, f" in stage {stage}", parts, pipeline.shards.get(original))


def _outputs(by_rank: Sequence[Mapping[str, torch.Tensor]], shards: Mapping[str, Any]) -> list[Held]:
    paths = dict.fromkeys(path for outputs in by_rank for path in outputs)
    return [Held(path, "", [outputs.get(path) for outputs in by_rank], shards.get(path)) for path in paths]


def _by_rank(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(results, key=lambda result: int(result["tensor_rank"]))


def _original_names(pipeline: Any) -> dict[Place, list[str]]:
    found: dict[Place, list[str]] = {}
    for name, place in pipeline.names.items():
        found.setdefault(place, []).append(name)
    return found


def _whole_batch(reference: Reference) -> dict[str, torch.Tensor]:
    """The outputs of the whole first batch in evaluation mode, from those of its microbatches.

    They are joined along the dimension in which the model's output for the whole batch is longer; without one, a number
    is the mean, and what does not depend on the microbatch is itself.
    """
    found = {}
    for path, first in reference.evaluation[0].items():
        pieces = [outputs[path] for outputs in reference.evaluation]
        whole = reference.whole.get(path, first.shape)
        dims = [d for d, (n, m) in enumerate(zip(whole, first.shape, strict=True)) if n != m]
        if dims:
            found[path] = torch.cat(pieces, dims[0])
        elif first.dim() == 0 and first.is_floating_point():
            found[path] = torch.stack(pieces).mean()
        elif all(torch.equal(first, piece) for piece in pieces):
            found[path] = first
        else:
            found[path] = torch.stack(pieces)
    return found


def _skeleton(structure: Any) -> Any:
    """A structure without the numbers of its tensors."""
    if isinstance(structure, Mapping):
        return {key: None if key == "tensor" else _skeleton(item) for key, item in structure.items()}
    return [_skeleton(item) for item in structure] if isinstance(structure, (list, tuple)) else structure
