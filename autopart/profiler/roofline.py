"""Roofline: seconds of a kernel on a device.

    compute   = flops / (peak rate x of_rate)
    memory    = (bytes - cached) / (memory bandwidth x of_bandwidth) + cached / (memory bandwidth x of_cache)
    execution = max(compute, memory) + ramp,                              cached = min(bytes, the device's cache)
    GPU: time = max(launch, execution)     the host starts kernels ahead of the device; the slower of the two counts
    CPU: time = launch + execution         one thread does both

The fractions are what a family of operators reaches of the peaks at large sizes. The ramp makes efficiency depend on
size: a kernel whose ideal time equals the ramp runs at half of its family's fraction. A device has its own curves where
they were fitted to measurements (`calibration`); else the defaults of its kind hold, which are stated assumptions
(docs/costs.md): they rank operators rather than promise microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.cluster import Device, Efficiency
from autopart.profiler.kernels import Kernel

# Family -> fraction of the peak rate, fraction of the memory bandwidth.
# Causal attention computes about half of the scores that torch's formula counts. Families with equal defaults are told
# apart because devices differ in them: on a CPU a tanh takes many times as long as a sum.
_SHARES: dict[str, dict[str, tuple[float, float]]] = {
    "cuda": {
        "matmul": (0.70, 0.80),
        **dict.fromkeys(("convolution", "grouped convolution"), (0.50, 0.75)),
        "attention": (0.45, 0.75),
        "causal attention": (0.80, 0.75),
        "normalization": (0.50, 0.65),
        "reduction": (0.50, 0.70),
        "gather": (0.50, 0.40),
        **dict.fromkeys(("pointwise", "function", "copy", "pooling", "random"), (0.50, 0.80)),
    },
    "cpu": {
        "matmul": (0.85, 0.80),
        "convolution": (0.85, 0.60),
        "grouped convolution": (0.20, 0.60),
        "attention": (0.45, 0.60),
        "causal attention": (0.65, 0.60),
        "normalization": (0.50, 0.35),
        "reduction": (0.50, 0.60),
        "gather": (0.50, 0.40),
        **dict.fromkeys(("pointwise", "function", "copy", "pooling", "random"), (0.50, 0.45)),
    },
}
_RAMP_S = {"cuda": 2e-6, "cpu": 1e-6}

DEFAULTS: Mapping[str, Mapping[str, Efficiency]] = {
    kind: {family: Efficiency(*shares, _RAMP_S[kind]) for family, shares in families.items()}
    for kind, families in _SHARES.items()
}
"""Kind of device -> family -> what holds where nothing was fitted."""


def efficiency(device: Device, family: str) -> Efficiency:
    """The curve of a family on a device."""
    return device.efficiency.get(family) or DEFAULTS[device.kind][family]


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Predicted seconds of one kernel."""
    curve = efficiency(device, kernel.family)
    compute_s = kernel.flops / (peak_rate(device, kernel.dtype) * curve.of_rate)
    cached = min(kernel.bytes, device.cache_bytes) if curve.of_cache else 0.0
    memory_s = (kernel.bytes - cached) / (device.memory_bandwidth_bytes_per_s * curve.of_bandwidth)
    if curve.of_cache:
        memory_s += cached / (device.memory_bandwidth_bytes_per_s * curve.of_cache)
    execution_s = max(compute_s, memory_s) + curve.ramp_s
    return max(device.launch_s, execution_s) if device.kind == "cuda" else device.launch_s + execution_s


def peak_rate(device: Device, dtype: torch.dtype) -> float:
    """Peak rate of a dtype; one without fast units (bfloat16 on a T4, say) runs at float32's."""
    return device.flops_per_s.get(str(dtype).removeprefix("torch."), device.flops_per_s["float32"])
