"""The hardware catalogue as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autopart.catalogue import catalogue
from autopart.text import MISSING, gibibytes, printable, table


def format_devices(here: Sequence[str]) -> str:
    """The catalogue as a table, and this machine's GPUs.

    Args:
        here: Names of this machine's GPUs.
    """
    rows = [
        [
            name,
            gibibytes(entry.device.memory_bytes),
            _rate(entry.device.flops_per_s, "float32"),
            _rate(entry.device.flops_per_s, "bfloat16"),
            f"{entry.device.memory_bandwidth_bytes_per_s / 1e9:,.0f}",
            f"{entry.link.bandwidth_bytes_per_s / 1e9:g}",
            f"{entry.network.bandwidth_bytes_per_s / 1e9:g}",
            entry.device.source,
        ]
        for name, entry in catalogue().items()
    ]
    headers = ["device", "memory", "float32", "bfloat16", "memory", "link", "network", "source"]
    units = ["", "GiB", "TFLOP/s", "TFLOP/s", "GB/s", "GB/s", "GB/s", ""]
    text = table(rows, [f"{name}\n{unit}".rstrip() for name, unit in zip(headers, units, strict=True)], (0, 7))
    return f"{text}\n\nGPUs of this machine: {', '.join(map(printable, here)) or 'none'}"


def devices_as_data(here: Sequence[str]) -> dict[str, Any]:
    """The same as one JSON document."""
    return {
        "schema": "autopart-devices/1",
        "devices": [
            {**asdict(entry.device), "link": asdict(entry.link), "network": asdict(entry.network)}
            for entry in catalogue().values()
        ],
        "here": list(here),
    }


def _rate(rates: Any, dtype: str) -> str:
    return f"{rates[dtype] / 1e12:g}" if dtype in rates else MISSING
