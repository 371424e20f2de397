"""Which attention kernel a GPU runs for `scaled_dot_product_attention`.

On fake tensors without a GPU the operator silently takes the unfused path, which saves about twenty times as much.
So for a GPU target it is replaced by the operator of the kernel that PyTorch would choose (`sdp_utils.cpp`): flash
attention for half precision without a mask, the memory-efficient kernel otherwise, and the unfused path for what
neither takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from autopart.runtime import split_operators

aten = torch.ops.aten

FLASH_DTYPES = (torch.float16, torch.bfloat16)
EFFICIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLASH_MAX_HEAD_DIM = 256
BIAS_ALIGNMENT = 8


def gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`aten.scaled_dot_product_attention` as a GPU runs it; the arguments are the operator's."""
    head_dim = query.shape[-1]
    grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    usable = query.dim() == 4 and key.shape[-1] == head_dim and value.shape[-1] == head_dim
    if usable and attn_mask is None and query.dtype in FLASH_DTYPES and head_dim <= FLASH_MAX_HEAD_DIM:
        return aten._scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if usable and not grouped and query.dtype in EFFICIENT_DTYPES:
        bias = None if attn_mask is None else _bias(query, key, attn_mask)
        needs_grad = any(tensor.requires_grad for tensor in (query, key, value))
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask as the memory-efficient kernel reads it: floating, rows padded to its alignment, expanded."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    length = key.shape[-2]
    if length % BIAS_ALIGNMENT and mask.shape[-1] == length:
        mask = F.pad(mask, (0, BIAS_ALIGNMENT - length % BIAS_ALIGNMENT))[..., :length]
    return mask.expand(*query.shape[:-1], length)


GPU_OPERATORS: Mapping[Any, Any] = {
    aten.scaled_dot_product_attention.default: gpu_attention,
    split_operators.attention: gpu_attention,
}
