"""Known: what was measured on the devices of a cluster, and is used before formulas, or corrects them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopart.cluster import Cluster, Device
from autopart.corrections import Corrections, corrections
from autopart.errors import UsageError
from autopart.profiler.profile_file import Entry, KernelRecord, Profile
from autopart.profiler.roofline import kernel_seconds
from autopart.records import Record
from autopart.text import counted


@dataclass(frozen=True)
class Known:
    """By name of a device, as clusters call it.

    Attributes:
        calls: Times of calls, by key (`keys.key_of`).
        corrections: What to multiply formulas with, for what was not measured.
        source: What `Costs.source` says of such costs.
        what: Where it comes from, for people.
        rows: Of the microbatches that were measured; 0 where they had several numbers.
    """

    calls: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    corrections: Mapping[str, Corrections] = field(default_factory=dict)
    source: Literal["analytic", "measured", "corrected"] = "analytic"
    what: Literal["profile", "record"] = "profile"
    rows: int = 0

    def other_rows(self, rows: int, batch: int) -> tuple[str, ...]:
        """What to say of a plan whose microbatches have `rows` rows of `batch`, if those measured had others."""
        if self.rows in (0, rows):
            return ()
        if batch % self.rows:
            advice = f"{counted(batch, 'row')} cannot be cut into such"
        else:
            advice = f"--microbatches {batch // self.rows} takes as many"
        return (
            f"times are extrapolated from microbatches of {counted(self.rows, 'row')}, which the {self.what} has, to "
            f"this plan's of {rows}; {advice}",
        )


def known_of(found: Profile | Record, cluster: Cluster) -> Known:
    """What a profile, or a record, tells of a cluster's devices.

    Calls of a profile have its times. All others (those of a model whose tensors are split, say) have their formula's,
    corrected kernel by kernel as the profile's calls are in the mean, or as the record's operators are.

    Raises:
        UsageError: It is of a device that the cluster does not have, or of a plan whose own times were no formulas:
            those are what a record corrects.
    """
    devices = {device.name: device for device in cluster.devices}
    names = {found.device.name} if isinstance(found, Profile) else {d.name for d in _devices_of(found)}
    if not names & set(devices):
        what = "profile" if isinstance(found, Profile) else "record"
        raise UsageError(
            f"the {what} is of {', '.join(sorted(names))}, and the plan is for {', '.join(devices)}",
            "Give the cluster the device that was measured, or a profile of the cluster's device.",
        )
    if isinstance(found, Record):
        if found.plan.times_from != "analytic":
            raise UsageError(
                f"the record is of a plan whose times were {found.plan.times_from}: it can only correct formulas",
                "Record a package that was planned without a profile, or plan with a profile of the operators.",
            )
        size = found.plan.strategy.microbatch_size
        return Known(corrections=corrections(found), source="corrected", what="record", rows=size)
    name = found.device.name
    factors = {name: _corrections(found, devices[name])}
    return Known({name: found.entries}, factors, found.source, rows=found.microbatch_size)


def _devices_of(record: Record) -> tuple[Device, ...]:
    return Cluster.from_data(record.plan.cluster).devices


def _corrections(profile: Profile, device: Device) -> Corrections:
    """Kernel by kernel, measured over predicted; a call's seconds are shared out over its kernels as formulas do."""
    predicted: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)

    def share(kernels: tuple[KernelRecord, ...], seconds: float) -> None:
        own = [(kernel.name, kernel_seconds(kernel.kernel(), device)) for kernel in kernels]
        whole = sum(time for _, time in own)
        for name, time in own:
            predicted[name] += time
            measured[name] += seconds * time / whole

    for entry in profile.entries.values():
        share(entry.forward, entry.time.forward_s)
        share(entry.backward, entry.time.backward_input_s + entry.time.backward_weight_s)
    return Corrections({name: measured[name] / predicted[name] for name in predicted if predicted[name]}, 1.0)
