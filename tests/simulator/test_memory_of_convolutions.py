"""What convolutions take for themselves on a CPU is what torch's allocator gives out while they run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from memory_jobs import peak_bytes
from torch import Tensor, nn

from autopart.profiler.workspace import INSIDE, PLAIN_CHANNELS

aten = torch.ops.aten

# What is known not to be counted: guards, barriers, and rows of a strided kernel.
UNCOUNTED_BYTES = 32_000


@dataclass(frozen=True)
class Convolution:
    rows: int
    inputs: int
    results: int
    kernel: int
    side: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    transposed: bool = False

    def make(self) -> nn.Conv2d | nn.ConvTranspose2d:
        options = {"stride": self.stride, "padding": self.padding, "groups": self.groups}
        kind = nn.ConvTranspose2d if self.transposed else nn.Conv2d
        return kind(self.inputs, self.results, self.kernel, **options)


CASES = {
    "kernel of three": Convolution(1, 128, 64, 3, 64, padding=1),
    "several rows": Convolution(4, 64, 64, 3, 32, padding=1),
    "odd side": Convolution(1, 256, 256, 3, 15, padding=1),
    "kernel of five": Convolution(1, 128, 128, 5, 32, padding=2),
    "strided": Convolution(1, 128, 128, 3, 64, 2, 1),
    "stem": Convolution(1, 3, 64, 7, 128, 2, 3),
    "single point": Convolution(2, 128, 256, 1, 32),
    "single point, strided": Convolution(1, 128, 256, 1, 64, 2),
    "few channels": Convolution(1, 64, 2, 1, 64),
    "groups": Convolution(1, 128, 128, 3, 56, padding=1, groups=2),
    "depthwise": Convolution(1, 64, 64, 3, 56, padding=1, groups=64),
    "transposed": Convolution(1, 256, 128, 2, 32, 2, transposed=True),
    "transposed, small image": Convolution(1, 1024, 512, 2, 4, 2, transposed=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_convolution_takes_what_is_said(case: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("kernels in half precision are those of AVX-512 with bfloat16")
    shape = CASES[case]
    module = shape.make().to(dtype)
    image = torch.randn(shape.rows, shape.inputs, shape.side, shape.side, dtype=dtype)
    image.requires_grad_(shape.inputs > PLAIN_CHANNELS)
    gradient = torch.ones_like(module(image))
    module(image).backward(gradient)
    image.grad = None
    module.zero_grad()
    made: list[Tensor] = []
    forward = peak_bytes(lambda: made.append(module(image)))
    backward = peak_bytes(lambda: made[0].backward(gradient))
    how = [shape.stride] * 2, [shape.padding] * 2, [1] * 2, shape.transposed, [0] * 2, shape.groups
    said = INSIDE[aten.convolution.default](image, module.weight, module.bias, *how)
    assert said == pytest.approx(forward, abs=UNCOUNTED_BYTES)
    wanted = [image.requires_grad, True, True]
    said = INSIDE[aten.convolution_backward.default](gradient, image, module.weight, [shape.results], *how, wanted)
    assert said == pytest.approx(backward, abs=UNCOUNTED_BYTES)
