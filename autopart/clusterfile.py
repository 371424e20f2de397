"""Cluster files: a cluster in YAML (or JSON), for hardware that the catalogue does not know.

    devices:                          # optional: kinds of device by name
      MyGPU:
        base: A100-80G                # optional: a catalogue entry whose figures hold where none is given
        memory: 60GiB                 # what a program sees; GB is 10^9, GiB is 2^30
        rates: {float32: 19.5TFLOP/s, bfloat16: 312TFLOP/s}
        memory_bandwidth: 2039GB/s
        kind: cuda                    # or cpu
        launch: 5us                   # time to start one kernel
        cache: 32MiB                  # optional: last-level cache of a CPU
        efficiency:                   # optional: what was fitted (autopart calibrate writes it)
          matmul: {of_rate: 0.7, of_bandwidth: 0.8, ramp: 2us}
        source: "measured here"
    machines:                         # in rank order
      - gpus: [MyGPU, MyGPU, T4]      # names of this file or of the catalogue
        count: 2                      # optional: as many machines alike
    links:                            # optional: one direction; else the slowest of the catalogue's
      intra_node: {bandwidth: 300GB/s, latency: 8us}
      inter_node: {bandwidth: 400Gbit/s, latency: 10us}        # also both_ways and collectives (see `hardware`)

Types are strict: quantities are text with a unit, names are text, unknown keys are refused. YAML aliases and repeated
keys are refused too, because the one can make a small file huge and the other hides what was meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from autopart.catalogue import catalogue, find
from autopart.cluster import MAX_DEVICES, Cluster, CollectiveCost, Device, Efficiency, Link
from autopart.errors import InputFileError, UsageError
from autopart.hardware import DeviceFields, LinkFields, Strict
from autopart.plain_yaml import read_yaml, write_new_yaml

_Positive = Annotated[float, Field(ge=1e-40, le=1e40, allow_inf_nan=False)]
_Latency = Annotated[float, Field(ge=0, le=1e40, allow_inf_nan=False)]


class MachineFields(Strict):
    """One machine, or several alike."""

    gpus: Annotated[list[str], Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1


class LinksFields(Strict):
    """The two links of a cluster file."""

    intra_node: LinkFields | None = None
    inter_node: LinkFields | None = None


class ClusterFields(Strict):
    """A cluster file."""

    devices: dict[str, DeviceFields] = Field(default_factory=dict)
    machines: Annotated[list[MachineFields], Field(min_length=1)]
    links: LinksFields = Field(default_factory=LinksFields)


class _EfficiencyData(Strict):
    of_rate: _Positive
    of_bandwidth: _Positive
    ramp_s: _Latency
    of_cache: _Positive | None = None


class _DeviceData(Strict):
    name: str
    memory_bytes: Annotated[int, Field(gt=0)]
    flops_per_s: dict[str, _Positive]
    memory_bandwidth_bytes_per_s: _Positive
    source: str
    kind: Literal["cuda", "cpu"]
    launch_s: _Latency
    cache_bytes: Annotated[int, Field(ge=0)] = 0
    efficiency: dict[str, _EfficiencyData] = Field(default_factory=dict)

    def build(self) -> Device:
        fitted = {family: Efficiency(**data.model_dump()) for family, data in self.efficiency.items()}
        return Device(**{**self.model_dump(), "efficiency": fitted})


class _CollectiveData(Strict):
    collective: str
    algorithm: Literal["ring", "tree"]
    latency_s: _Latency
    bandwidth_bytes_per_s: _Positive


class _LinkData(Strict):
    name: str
    latency_s: _Latency
    bandwidth_bytes_per_s: _Positive
    both_ways_bytes_per_s: _Positive | None = None
    collectives: list[_CollectiveData] = Field(default_factory=list)

    def build(self) -> Link:
        costs = tuple(CollectiveCost(**data.model_dump()) for data in self.collectives)
        return Link(**{**self.model_dump(), "collectives": costs})


class _ClusterData(Strict):
    devices: Annotated[list[str], Field(min_length=1, max_length=MAX_DEVICES)]
    nodes: list[int]
    kinds: dict[str, _DeviceData]
    intra_node: _LinkData
    inter_node: _LinkData
    notes: list[str] = Field(default_factory=list)


def read_cluster_file(path: str | os.PathLike[str]) -> Cluster:
    """The cluster in a YAML or JSON file (see the module's docstring for what it says).

    Raises:
        InputFileError: No such file, or not a cluster; the message names file and key.
    """
    where = f"Cluster file '{os.fspath(path)}'"
    data = read_yaml(Path(path), where)
    fields = _validate(ClusterFields, data, where)
    devices = {name: _device(name, kind, where) for name, kind in fields.devices.items()}
    names = [gpu for machine in fields.machines for gpu in dict.fromkeys(machine.gpus)]
    bases = {name: (fields.devices[name].base if name in fields.devices else name) for name in names}
    entries = [_find(base, f"{where}, machines") for base in bases.values() if base is not None]
    if sum(len(machine.gpus) * machine.count for machine in fields.machines) > MAX_DEVICES:
        raise InputFileError(f"{where}, machines: more than {MAX_DEVICES:,} devices.")

    groups = [machine.gpus for machine in fields.machines for _ in range(machine.count)]
    return _guard(
        lambda: Cluster(
            devices=tuple(devices[gpu] if gpu in devices else find(gpu)[0].device for group in groups for gpu in group),
            nodes=tuple(number for number, group in enumerate(groups) for _ in group),
            intra_node=_link("intra_node", fields.links.intra_node, [entry.link for entry in entries], where),
            inter_node=_link("inter_node", fields.links.inter_node, [entry.network for entry in entries], where),
        ),
        where,
    )


def write_cluster_file(
    path: str | os.PathLike[str],
    devices: Mapping[str, Mapping[str, Any]],
    machines: Sequence[Mapping[str, Any]],
    links: Mapping[str, Mapping[str, Any]],
    comment: str,
) -> None:
    """Write a file that `read_cluster_file` reads (fields as in `hardware`).

    Args:
        comment: Lines that head the file.

    Raises:
        UsageError: There is a file of this name, or none can be written.
    """
    data = {"devices": devices, "machines": machines, "links": links}
    write_new_yaml(Path(path), {key: value for key, value in data.items() if value}, comment)


def cluster_from_data(data: Any) -> Cluster:
    """The inverse of `Cluster.to_data`; InputFileError names the key that is wrong."""
    fields = _validate(_ClusterData, data, "cluster")
    unknown = [name for name in fields.devices if name not in fields.kinds]
    if unknown:
        raise InputFileError(f"cluster, devices: '{unknown[0]}' is not described under kinds.")
    kinds = {name: kind.build() for name, kind in fields.kinds.items()}
    return _guard(
        lambda: Cluster(
            devices=tuple(kinds[name] for name in fields.devices),
            nodes=tuple(fields.nodes),
            intra_node=fields.intra_node.build(),
            inter_node=fields.inter_node.build(),
            notes=tuple(fields.notes),
        ),
        "cluster",
    )


def _device(name: str, fields: DeviceFields, where: str) -> Device:
    """A device of the file: its own figures, else those of its base."""
    where = f"{where}, devices.{name}"
    base = _find(fields.base, f"{where}.base").device if fields.base is not None else None
    source = f"the user's file, based on {base.name}" if base else "the user's file"
    given = {"source": source, **fields.given()}
    if base is None:
        needed = {"memory": fields.memory, "rates": fields.rates, "memory_bandwidth": fields.memory_bandwidth}
        missing = [key for key, value in needed.items() if value is None]
        if missing:
            raise InputFileError(f"{where}: {', '.join(missing)} missing; give it, or a base from the catalogue.")
        device = Device(name=name, **given)
    else:
        device = Device(**{**vars(base), **given, "name": name})
    if "float32" not in device.flops_per_s:
        raise InputFileError(f"{where}.rates: float32 is missing; it stands in for every dtype that is not given.")
    if name in catalogue():
        raise InputFileError(
            f"{where}: the catalogue has a device of this name; choose another and use 'base: {name}'."
        )
    return device


def _link(name: str, fields: LinkFields | None, fallbacks: list[Link], where: str) -> Link:
    if fields is not None:
        return fields.build(name)
    if not fallbacks:
        raise InputFileError(
            f"{where}, links.{name}: missing, and no device has a base in the catalogue to take it from."
        )
    return min(fallbacks, key=lambda link: link.bandwidth_bytes_per_s)


_Model = TypeVar("_Model", bound=BaseModel)
_Result = TypeVar("_Result")


def _validate(model: type[_Model], data: Any, where: str) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the whole"
        count = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        message = first["msg"].removeprefix("Value error, ")
        raise InputFileError(f"{where}, {key}: {message}{count}.") from None


def _find(name: str, where: str) -> Any:
    return _guard(lambda: find(name)[0], where)


def _guard(build: Callable[[], _Result], where: str) -> _Result:
    """Errors of usage found inside a file are errors of the file."""
    try:
        return build()
    except UsageError as error:
        raise InputFileError(f"{where}: {error.message}", error.hint) from None
