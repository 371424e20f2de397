"""Profile: times of a model's calls on one device, as a file that can be carried to another machine.

A profile file is read as hostile: whatever is not exactly a profile is refused with `InputFileError`, which names the
key. Each call stands on a line of its own, so that files can be compared by any tool.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, ConfigDict, TypeAdapter

from autopart.errors import UsageError
from autopart.profiler.isolated import Step, Work
from autopart.profiler.kernels import Kernel
from autopart.profiler.measurement import Amount, Count, Measurement
from autopart.profiler.profile_table import format_profile
from autopart.profiler.roofline import DEFAULTS
from autopart.strict_json import STRICT, document, read

SCHEMA = "autopart-profile/1"


@dataclass(frozen=True)
class ProfiledDevice:
    """Where times were taken.

    Attributes:
        name: As clusters call it: the catalogue's name, or the vendor's where the catalogue has none.
        model: As the vendor calls it.
        driver: Versions of what runs its kernels, beside torch.
        threads: Of torch on a CPU; 0 on a GPU.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    kind: Literal["cpu", "cuda"]
    model: str
    driver: str
    torch: str
    threads: Count


def _of_torch(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError("torch has no such dtype")
    return name


def _of_roofline(family: str) -> str:
    if not any(family in families for families in DEFAULTS.values()):
        raise ValueError("there is no such family of operators")
    return family


@dataclass(frozen=True)
class KernelRecord:
    """A `Kernel` in a file."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    family: Annotated[str, AfterValidator(_of_roofline)]
    dtype: Annotated[str, AfterValidator(_of_torch)]
    flops: Amount
    bytes: Amount

    def kernel(self) -> Kernel:
        """The kernel that this describes."""
        return Kernel(self.name, self.family, getattr(torch, self.dtype), self.flops, self.bytes)


@dataclass(frozen=True)
class Entry:
    """One call of a model.

    Attributes:
        count: How often the model makes it for one microbatch.
        time: Of one call.
        forward, backward, backward_input: The kernels that formulas see in it (`isolated.Work`): what efficiency
            curves are fitted to.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    count: Count
    time: Measurement
    forward: tuple[KernelRecord, ...]
    backward: tuple[KernelRecord, ...]
    backward_input: tuple[KernelRecord, ...]

    @staticmethod
    def of(count: int, time: Measurement, work: Work) -> Entry:
        """An entry for a call that does `work`."""
        return Entry(count, time, _records(work.forward), _records(work.backward), _records(work.backward_input))

    @property
    def seconds(self) -> float:
        """Of all calls."""
        return self.count * self.time.seconds


@dataclass(frozen=True)
class Profile:
    """Times of a model's calls on one device.

    Attributes:
        model: Its name, for people.
        source: "measured" on the device, or "analytic", by formula.
        entries: By key (`keys.key_of`).
        notes: What has no entry, for people.
        microbatch_size: Rows that the calls are for; 0 where profiles of several sizes were joined.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: str
    source: Literal["measured", "analytic"]
    device: ProfiledDevice
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()
    microbatch_size: Count = 0

    def joined(self, other: Profile) -> Profile:
        """The entries of both; where both have one, this one's time holds and the counts add up.

        Raises:
            UsageError: They are not from the same device.
        """
        if (self.device, self.source) != (other.device, other.source):
            raise UsageError(f"profiles of {self.device} and {other.device} cannot be joined")
        entries = dict(other.entries)
        for key, entry in self.entries.items():
            again = other.entries[key].count if key in other.entries else 0
            entries[key] = replace(entry, count=entry.count + again)
        return replace(
            self,
            model=f"{self.model}, {other.model}",
            entries=entries,
            notes=(*self.notes, *other.notes),
            microbatch_size=self.microbatch_size if self.microbatch_size == other.microbatch_size else 0,
        )

    def to_json(self) -> str:
        """The file's text."""
        head: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.model,
            "source": self.source,
            "device": asdict(self.device),
        }
        head |= {"microbatch_size": self.microbatch_size, "notes": list(self.notes)}
        lines = (f"  {json.dumps(key)}: {json.dumps(asdict(entry))}" for key, entry in sorted(self.entries.items()))
        return json.dumps(head, indent=1)[:-2] + ',\n "entries": {\n' + ",\n".join(lines) + "\n }\n}\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "profile") -> Profile:
        """Read what `to_json` wrote.

        Args:
            where: How messages name the text (its file).

        Raises:
            InputFileError: It is not a profile of this version; the message names the key.
        """
        hint = "Write the file anew with `autopart profile`."
        return document(_adapter(), text, where, "a profile", SCHEMA, hint)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a file; errors as in `from_json`, and for a file that cannot be read."""
        return Profile.from_json(read(path), where=str(path))

    def __str__(self) -> str:
        return format_profile(self)


@cache
def _adapter() -> TypeAdapter[Profile]:
    return TypeAdapter(Profile)


def _records(steps: tuple[Step, ...]) -> tuple[KernelRecord, ...]:
    """Kernels alone: what is exchanged between ranks is no work of the device."""
    return tuple(
        KernelRecord(step.name, step.family, str(step.dtype).removeprefix("torch."), step.flops, step.bytes)
        for step in steps
        if isinstance(step, Kernel)
    )
