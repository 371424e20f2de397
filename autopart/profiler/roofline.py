"""Roofline: seconds of a kernel on a device; and of the steps of a node, some of which are collectives.

    execution = max(flops / (peak rate x fraction), bytes / (memory bandwidth x fraction)) + ramp
    GPU: time = max(launch, execution)     the host starts kernels ahead of the device; the slower of the two counts
    CPU: time = launch + execution         one thread does both

The fractions are what a family of operators reaches of the peaks at large sizes. The ramp makes efficiency depend on
size: a kernel whose ideal time equals the ramp runs at half of its family's fraction. Fractions and ramps are stated
assumptions (docs/costs.md), the same for every device of a kind; they rank operators rather than promise microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autopart.cluster import Device, Link
from autopart.profiler.kernels import Kernel
from autopart.profiler.ranks import Exchange


@dataclass(frozen=True)
class Family:
    """Fractions of the peaks that a family of operators reaches at large sizes."""

    of_rate: float
    of_bandwidth: float


# Causal attention computes about half of the scores that torch's formula counts.
FAMILIES: dict[str, dict[str, Family]] = {
    "cuda": {
        "matmul": Family(0.70, 0.80),
        "convolution": Family(0.50, 0.75),
        "attention": Family(0.45, 0.75),
        "causal attention": Family(0.80, 0.75),
        "normalization": Family(0.50, 0.65),
        "reduction": Family(0.50, 0.70),
        "gather": Family(0.50, 0.40),
        "pointwise": Family(0.50, 0.80),
    },
    "cpu": {
        "matmul": Family(0.85, 0.80),
        "convolution": Family(0.85, 0.60),
        "attention": Family(0.45, 0.60),
        "causal attention": Family(0.65, 0.60),
        "normalization": Family(0.50, 0.35),
        "reduction": Family(0.50, 0.60),
        "gather": Family(0.50, 0.40),
        "pointwise": Family(0.50, 0.45),
    },
}

RAMP_S = {"cuda": 2e-6, "cpu": 1e-6}


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Predicted seconds of one kernel."""
    family = FAMILIES[device.kind][kernel.family]
    compute_s = kernel.flops / (_rate(device, kernel.dtype) * family.of_rate)
    memory_s = kernel.bytes / (device.memory_bandwidth_bytes_per_s * family.of_bandwidth)
    execution_s = max(compute_s, memory_s) + RAMP_S[device.kind]
    return max(device.launch_s, execution_s) if device.kind == "cuda" else device.launch_s + execution_s


def seconds(steps: Iterable[Kernel | Exchange], device: Device, link: Link) -> float:
    """Predicted seconds of steps one after the other; the link is that between ranks that hold one model together."""
    return sum(step.seconds(link) if isinstance(step, Exchange) else kernel_seconds(step, device) for step in steps)


def _rate(device: Device, dtype: torch.dtype) -> float:
    """Peak rate of a dtype; one without fast units (bfloat16 on a T4, say) runs at float32's."""
    return device.flops_per_s.get(str(dtype).removeprefix("torch."), device.flops_per_s["float32"])
