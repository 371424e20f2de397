"""Quantities as people write them: "80GB", "74.5GiB", "300GB/s", "5us". The unit is never guessed."""

from __future__ import annotations

import re

BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
BYTES_PER_SECOND = {f"{unit}/s": float(factor) for unit, factor in BYTES.items()}
BYTES_PER_SECOND |= {"Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
FLOPS_PER_SECOND = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]+)")


def parse_bytes(text: object) -> int:
    """Bytes of "80GB" (10^9 each) or "74.5GiB" (2^30 each).

    Raises:
        ValueError: A bare number, an unknown unit, or a lower-case b (which would be bits).
    """
    return round(_parse(text, BYTES, "80GB or 74.5GiB"))


def parse_bandwidth(text: object) -> float:
    """Bytes per second of "300GB/s" or "400Gbit/s"; ValueError otherwise."""
    return _parse(text, BYTES_PER_SECOND, "300GB/s or 400Gbit/s")


def parse_seconds(text: object) -> float:
    """Seconds of "5us", "0.2ms"; ValueError otherwise."""
    return _parse(text, SECONDS, "5us")


def parse_rate(text: object) -> float:
    """Floating-point operations per second of "312TFLOP/s"; ValueError otherwise."""
    return _parse(text, FLOPS_PER_SECOND, "312TFLOP/s")


def format_bytes(count: float) -> str:
    """GiB with two digits, as autopart prints memory everywhere."""
    return f"{count / 2**30:.2f} GiB"


def _parse(text: object, units: dict[str, float] | dict[str, int], example: str) -> float:
    match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit; write for example {example}")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"unknown unit {unit!r} in {text!r}; one of {', '.join(units)}")
    value = float(number) * units[unit]
    if value <= 0:
        raise ValueError(f"{text!r} must be more than zero")
    return value
