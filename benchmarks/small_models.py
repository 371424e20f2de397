"""Small models for benchmarks that no spec can name: their libraries' builders do not take these sizes."""

from __future__ import annotations

import torch
import torchvision
from torch import nn


def vit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """torchvision's vision transformer, on `nn.MultiheadAttention`."""
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=50, num_classes=10
    )
    return model, (torch.randn(4, 3, 32, 32),)
