"""Hardware in files: devices and links as people write them, read and written here.

efficiency:
  matmul: {of_rate: 0.7, of_bandwidth: 0.8, ramp: 2us}                   # of_cache: optional
intra_node:
  bandwidth: 300GB/s
  latency: 8us
  both_ways: 250GB/s                                                     # optional
  collectives:                                                           # optional
    all_reduce: {algorithm: ring, bandwidth: 230GB/s, latency: 4us}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from autopart.cluster import CollectiveCost, Device, Efficiency, Link
from autopart.units import parse_bandwidth, parse_bytes, parse_rate, parse_seconds

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Rate = Annotated[float, BeforeValidator(parse_rate)]
Share = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
"""Of a peak; a cache may be many times faster than memory."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class EfficiencyFields(Strict):
    """What a family of operators reaches."""

    of_rate: Share
    of_bandwidth: Share
    ramp: Seconds
    of_cache: Share | None = None

    def build(self) -> Efficiency:
        return Efficiency(self.of_rate, self.of_bandwidth, self.ramp, self.of_cache)


class DeviceFields(Strict):
    """A kind of device; what is not given is that of its base."""

    base: str | None = None
    memory: Bytes | None = None
    rates: dict[str, Rate] | None = None
    memory_bandwidth: Bandwidth | None = None
    kind: Literal["cuda", "cpu"] | None = None
    launch: Seconds | None = None
    cache: Bytes | None = None
    efficiency: dict[str, EfficiencyFields] | None = None
    source: str | None = None

    def given(self) -> dict[str, Any]:
        """The attributes of `Device` that the fields name."""
        fitted = {family: fields.build() for family, fields in (self.efficiency or {}).items()}
        own: dict[str, Any] = {
            "memory_bytes": self.memory,
            "flops_per_s": self.rates,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth,
            "kind": self.kind,
            "launch_s": self.launch,
            "cache_bytes": self.cache,
            "efficiency": None if self.efficiency is None else fitted,
            "source": self.source,
        }
        return {key: value for key, value in own.items() if value is not None}


class CollectiveFields(Strict):
    """A collective of a link."""

    algorithm: Literal["ring", "tree"]
    bandwidth: Bandwidth
    latency: Seconds


class LinkFields(Strict):
    """A link, one direction."""

    bandwidth: Bandwidth
    latency: Seconds
    both_ways: Bandwidth | None = None
    collectives: dict[Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"], CollectiveFields] = Field(
        default_factory=dict
    )

    def build(self, name: str) -> Link:
        costs = (
            CollectiveCost(collective, fields.algorithm, fields.latency, fields.bandwidth)
            for collective, fields in self.collectives.items()
        )
        return Link(name, self.latency, self.bandwidth, self.both_ways, tuple(costs))


def efficiency_as_fields(efficiency: Mapping[str, Efficiency]) -> dict[str, Any]:
    """The `efficiency` of a device as `DeviceFields` reads it."""
    return {
        family: {
            "of_rate": _digits(fitted.of_rate),
            "of_bandwidth": _digits(fitted.of_bandwidth),
            "ramp": seconds_text(fitted.ramp_s),
            **({} if fitted.of_cache is None else {"of_cache": _digits(fitted.of_cache)}),
        }
        for family, fitted in efficiency.items()
    }


def fitted_fields(device: Device) -> dict[str, Any]:
    """What a calibration says of a device, as `DeviceFields` reads it."""
    return {
        **({"cache": f"{device.cache_bytes}B"} if device.cache_bytes else {}),
        "efficiency": efficiency_as_fields(device.efficiency),
        "source": device.source,
    }


def device_as_fields(device: Device) -> dict[str, Any]:
    """A whole device as `DeviceFields` reads it."""
    rates = {dtype: f"{_digits(rate / 1e9)}GFLOP/s" for dtype, rate in device.flops_per_s.items()}
    return {
        "memory": f"{device.memory_bytes}B",
        "rates": rates,
        "memory_bandwidth": bandwidth_text(device.memory_bandwidth_bytes_per_s),
        "kind": device.kind,
        "launch": seconds_text(device.launch_s),
        **({"cache": f"{device.cache_bytes}B"} if device.cache_bytes else {}),
        **({"efficiency": efficiency_as_fields(device.efficiency)} if device.efficiency else {}),
        "source": device.source,
    }


def link_as_fields(link: Link) -> dict[str, Any]:
    """A link as `LinkFields` reads it."""
    both_ways = link.both_ways_bytes_per_s
    collectives = {
        cost.collective: {
            "algorithm": cost.algorithm,
            "bandwidth": bandwidth_text(cost.bandwidth_bytes_per_s),
            "latency": seconds_text(cost.latency_s),
        }
        for cost in link.collectives
    }
    return {
        "bandwidth": bandwidth_text(link.bandwidth_bytes_per_s),
        "latency": seconds_text(link.latency_s),
        **({} if both_ways is None else {"both_ways": bandwidth_text(both_ways)}),
        **({"collectives": collectives} if collectives else {}),
    }


def seconds_text(seconds: float) -> str:
    return f"{_plain(seconds * 1e6)}us" if seconds >= 1e-8 else f"{_plain(max(seconds * 1e9, 1e-3))}ns"


def bandwidth_text(bytes_per_s: float) -> str:
    return f"{_plain(bytes_per_s / 1e6)}MB/s"


def _digits(value: float) -> float:
    """Four significant digits: more would be more than a measurement knows."""
    return float(f"{value:.4g}")


def _plain(value: float) -> str:
    """Four significant digits without an exponent, which `units` does not read."""
    return f"{_digits(value):.12f}".rstrip("0").rstrip(".")
