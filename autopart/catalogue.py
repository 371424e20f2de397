"""The hardware catalogue: `catalogue.yaml` as data, and finding an entry by the name a person types."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from autopart.cluster import Device, Link
from autopart.errors import UsageError
from autopart.hardware import EfficiencyFields
from autopart.units import parse_bytes

DEFAULT_GPU = "H100-80G"
"""What a bare number of GPUs stands for on a machine that has not as many."""

# A short name that fits several entries means the one with least memory: a plan made for it fits on all of them.
ALIASES = {
    "V100": "V100-16G",
    "A100": "A100-40G",
    "H100": "H100-80G",
    "H200-141G": "H200",
    "B200-180G": "B200",
    "B200-192G": "B200",
    "T4-16G": "T4",
    "A10-24G": "A10",
    "L4-24G": "L4",
    "L40S-48G": "L40S",
    "3090": "RTX-3090",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
}
AMBIGUOUS = {"V100", "A100"}

_RATE_UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
_NOISE = re.compile(r"nvidia|geforce|tesla|sxm\d?|pcie|hbm\d?e?|graphics|gpu")


@dataclass(frozen=True)
class Entry:
    """A device with the links it usually comes with."""

    device: Device
    link: Link
    network: Link


@cache
def catalogue() -> dict[str, Entry]:
    """Every device that autopart knows, by name, in the order of the file."""
    data = yaml.safe_load(resources.files("autopart").joinpath("catalogue.yaml").read_text(encoding="utf-8"))
    links = {
        name: Link(name, latency_s=link["latency_us"] * 1e-6, bandwidth_bytes_per_s=link["bandwidth"] * 1e9)
        for name, link in data["links"].items()
    }
    return {name: _entry(name, fields, links) for name, fields in data["devices"].items()}


def find(name: str) -> tuple[Entry, str | None]:
    """The entry that `name` means, and a note for the user if the name left a choice.

    Case, spaces and vendor words do not matter: "a100 80gb" and "NVIDIA A100-SXM4-80GB" are both A100-80G.

    Raises:
        UsageError: No such device; the message names the nearest ones.
    """
    known = {_normal(entry): entry for entry in catalogue()}
    aliases = {_normal(alias): alias for alias in ALIASES}
    wanted = _normal(name)
    if wanted in known:
        return catalogue()[known[wanted]], None
    if wanted in aliases:
        alias = aliases[wanted]
        target = ALIASES[alias]
        note = f"'{name}' was read as {target}, the one with least memory of that name." if alias in AMBIGUOUS else None
        return catalogue()[target], note
    spellings = {**known, **{normal: ALIASES[alias] for normal, alias in aliases.items()}}
    near = [spellings[match] for match in difflib.get_close_matches(wanted, spellings, n=3, cutoff=0.5)]
    raise UsageError(
        f"Unknown device '{name}'." + (f" Did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""),
        f"Known devices: {', '.join(catalogue())}. For another one write a cluster file (docs/costs.md).",
    )


def _normal(name: str) -> str:
    """A name without case, vendor words, form factor and separators; "80GB" and "80G" are one."""
    bare = _NOISE.sub("", name.lower())
    return re.sub(r"(\d)gb?$", r"\1g", re.sub(r"[\s_\-]+", "", bare))


def _entry(name: str, fields: dict[str, Any], links: dict[str, Link]) -> Entry:
    unit = _RATE_UNITS[fields.get("rate_unit", "TFLOP/s")]
    device = Device(
        name=name,
        memory_bytes=parse_bytes(fields["memory"]),
        flops_per_s={dtype: rate * unit for dtype, rate in fields["rates"].items()},
        memory_bandwidth_bytes_per_s=fields["bandwidth"] * 1e9,
        source=fields["source"],
        kind=fields.get("kind", "cuda"),
        launch_s=fields["launch_us"] * 1e-6,
        cache_bytes=parse_bytes(fields["cache"]) if "cache" in fields else 0,
        efficiency={
            family: EfficiencyFields.model_validate(fitted).build()
            for family, fitted in fields.get("efficiency", {}).items()
        },
    )
    return Entry(device, links[fields["link"]], links[fields["network"]])
