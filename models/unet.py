"""U-Net (Ronneberger et al. 2015): an encoder whose feature maps are kept and joined to the decoder's.

Whatever the cut, several skips cross it, and the longest ones pass over every stage between.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def normalization(kind: str, channels: int) -> nn.Module:
    """A layer that normalises feature maps: "group" (8 groups) or "batch"."""
    if kind == "group":
        return nn.GroupNorm(min(8, channels), channels)
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    raise ValueError(f"norm is 'group' or 'batch', not {kind!r}")


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each normalised and rectified."""

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = normalization(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = normalization(norm, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(x)))


class Up(nn.Module):
    """Doubles the resolution, joins the encoder's map of that resolution, and mixes the two."""

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.expand = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.mix = DoubleConv(2 * outputs, outputs, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([skip, self.expand(x)], dim=1))


class UNet(nn.Module):
    """Maps images (batch, channels, height, width) to per-pixel scores (batch, classes, height, width).

    Height and width are divisible by 2 ** depth.
    """

    def __init__(
        self, channels: int = 3, classes: int = 2, width: int = 64, depth: int = 4, norm: str = "group"
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = DoubleConv(channels, width, norm)
        self.encoder = nn.ModuleList(DoubleConv(a, b, norm) for a, b in pairwise(widths))
        self.decoder = nn.ModuleList(Up(b, a, norm) for a, b in reversed(list(pairwise(widths))))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        x = self.stem(image)
        for down in self.encoder:
            skips.append(x)
            x = down(self.pool(x))
        for up in self.decoder:
            x = up(x, skips.pop())
        return self.head(x)


def make(batch: int = 32, image: int = 256, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A U-Net of 31 M parameters unless options say otherwise, and a batch of images."""
    model = UNet(**options)
    return model, (torch.randn(batch, 3, image, image),), {}
