"""Operators whose arguments are shards and which need more than the operator itself: they exchange something inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from .collectives import all_reduce, group, shapes_only


@contextmanager
def rank_stream(device: torch.device) -> Iterator[None]:
    """Random numbers of this rank's own stream inside; the common stream moves on by one draw, on every rank alike.

    The draw is from the generator of the CPU, so that nothing waits for a GPU, and so that recomputation of an
    activation checkpoint, which restores that generator, repeats it.
    """
    ranks = group()
    if shapes_only():
        yield
        return
    seed = int(torch.randint(2**48, ()).item()) * ranks.size + ranks.rank
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In single precision where it is in half: torch's own operators sum so inside."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Dropout of a shard: every rank draws its own mask."""
    if not training:
        return x
    with rank_stream(x.device):
        return F.dropout(x, p, training=True)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention with dropout on shards: every rank draws its own mask."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    with rank_stream(query.device):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


def vocabulary_embedding(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1) -> torch.Tensor:
    """Embedding of a table whose rows are cut among the ranks; a summand of the result.

    Args:
        weight: This rank's rows, [words of a rank, width].
        indices: Indices into the whole table.
        padding_idx: Row of the whole table that receives no gradient; negative for none.
    """
    rows = weight.shape[0]
    local = indices - group().rank * rows
    mine = (local >= 0) & (local < rows)
    if padding_idx >= 0:
        gives_gradient = (indices != padding_idx).unsqueeze(-1)
    found = F.embedding(torch.where(mine, local, 0), weight)
    if padding_idx >= 0:
        found = torch.where(gives_gradient, found, found.detach())
    return torch.where(mine.unsqueeze(-1), found, torch.zeros((), dtype=found.dtype, device=found.device))


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy of rows of logits whose classes are cut among the ranks (Megatron-LM, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
        ranks = group()
        width = logits.shape[1]
        first = ranks.rank * width
        dtype, logits = logits.dtype, _wide(logits)
        padding = torch.arange(first, first + width, device=logits.device) >= classes
        logits = logits.masked_fill(padding, -torch.inf)
        shifted = logits - ranks.all_reduce(logits.amax(1), maximum=True).unsqueeze(1)
        exponents = shifted.exp()
        total = ranks.all_reduce(exponents.sum(1))
        valid = target != ignore_index
        local = torch.where(valid, target, 0) - first
        mine = (local >= 0) & (local < width)
        local = torch.where(mine, local, 0)
        chosen = torch.where(mine, shifted.gather(1, local.unsqueeze(1)).squeeze(1), 0)
        losses = torch.where(valid, total.log() - ranks.all_reduce(chosen), 0)
        ctx.save_for_backward((exponents / total.unsqueeze(1)).to(dtype), local, mine, valid)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        probabilities, local, mine, valid = ctx.saved_tensors
        result = probabilities.scatter_add(1, local.unsqueeze(1), -mine.unsqueeze(1).to(probabilities.dtype))
        return (result * (gradient * valid).unsqueeze(1)).to(result.dtype), None, None, None


def vocabulary_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, classes: int, reduction: int = 1, ignore_index: int = -100
) -> torch.Tensor:
    """Cross-entropy of logits whose classes are cut among the ranks; the result is whole on every rank.

    Args:
        logits: This rank's columns, [rows, classes of a rank], padding behind the last class.
        target: Classes of the whole, [rows].
        classes: Number of classes without padding.
        reduction: 0 none, 1 mean over rows that are not ignored, 2 sum (as in ATen).
    """
    losses = _VocabularyCrossEntropy.apply(logits, target, classes, ignore_index)
    if reduction > 0:
        losses = losses.sum() / (target != ignore_index).sum() if reduction == 1 else losses.sum()
    return losses.to(logits.dtype)


def cross_entropy_of_rows(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """A summand of the mean cross-entropy of rows that are cut among the ranks.

    The mean is over the rows of all ranks that are not ignored; a rank may have none.
    """
    count = group().all_reduce((target != ignore_index).sum())
    losses = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    return (_wide(losses).sum() / count).to(logits.dtype)


def batch_norm_of_split_batch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Batch norm; in training with the statistics of all ranks' equally many elements."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    dtype, x = x.dtype, _wide(x)
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = group().size * x.numel() // x.shape[1]
    mean = all_reduce(x.sum(dims), partial_gradient=True) / count
    centered = x - mean.view(shape)
    variance = all_reduce(centered.square().sum(dims), partial_gradient=True) / count
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    result = centered * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    return (result if bias is None else result + bias.view(shape)).to(dtype)


def own_rows(table: torch.Tensor, indices: torch.Tensor, whole_rows: int) -> torch.Tensor:
    """`table[indices]` of a table whose rows are cut among the ranks: zeros where another rank has the row.

    Args:
        table: This rank's rows, [rows of a rank, ...].
        indices: Into the whole table, [n]; negative ones count from its end.
        whole_rows: Of the whole table.
    """
    rows = table.shape[0]
    local = torch.where(indices < 0, indices + whole_rows, indices) - group().rank * rows
    mine = ((local >= 0) & (local < rows)).view(-1, *[1] * (table.dim() - 1))
    zero = torch.zeros((), dtype=table.dtype, device=table.device)
    return torch.where(mine, table[local.clamp(0, rows - 1)], zero)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of x, sorted by group, each times its group's matrix.

    Args:
        x: [rows, k].
        weight: [groups, k, n].
        ends: The row behind each group's last, [groups]; rows behind the last group give zeros.
    """
    return _grouped_mm(x, weight, ends, x.shape[0])


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, expected: int) -> torch.Tensor:
    """Args: expected: How many rows belong to a group, for shapes and prices alone."""
    meta = x.device.type == "meta"  # where nothing is computed, and autocast is unknown
    with nullcontext() if meta else torch.autocast(x.device.type, enabled=False):
        if shapes_only():  # how many rows a group has is not known
            return torch.cat([x[:expected] @ weight[0], x.new_zeros(x.shape[0] - expected, weight.shape[2])])
        borders = [0, *ends.tolist(), x.shape[0]]
        *rows, rest = x.split([end - start for start, end in pairwise(borders)])
        products = [own @ matrix for own, matrix in zip(rows, weight.unbind(), strict=True)]
        return torch.cat([*products, rest.new_zeros(rest.shape[0], weight.shape[2])])


def grouped_mm_of_own_experts(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rows of this rank's experts, zeros elsewhere.

    Args:
        x: All rows, sorted by expert, [rows, k].
        weight: This rank's experts, [experts of a rank, k, n].
        ends: The row behind each expert's last, for all experts.
    """
    experts = weight.shape[0]
    first = group().rank * experts
    before = ends[first - 1] if first else torch.zeros_like(ends[0])
    rows = torch.arange(x.shape[0], device=x.device)
    # Own rows to the front, so that their groups start at row 0; and back.
    own, own_ends = x[(rows + before) % x.shape[0]], ends[first : first + experts] - before
    found = _grouped_mm(own, weight, own_ends, x.shape[0] // group().size)
    mine = (rows >= before) & (rows < ends[first + experts - 1])
    result = found[(rows - before) % x.shape[0]]
    return torch.where(mine.unsqueeze(1), result, torch.zeros((), dtype=result.dtype, device=result.device))
