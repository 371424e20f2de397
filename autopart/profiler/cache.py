"""Cache: measurements kept on disk, one small file for each device and call.

A file is believed only if it says of itself that it is of this device and this call; whatever else is there is measured
again. Files are written beside their place and moved into it, so readers and other writers never see half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from autopart.errors import InputFileError
from autopart.profiler.keys import digest
from autopart.profiler.measurement import Measurement
from autopart.profiler.profile_file import ProfiledDevice
from autopart.strict_json import of_schema, parse, read, validated

SCHEMA = "autopart-measurement/2"


def cache_directory() -> Path:
    """`$AUTOPART_CACHE`, else `autopart` in the user's folder of caches (`$XDG_CACHE_HOME`, or `~/.cache`)."""
    if own := os.environ.get("AUTOPART_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopart"


class MeasurementCache:
    """Measurements on one device.

    Attributes:
        problem: Why measurements could not be written, if they could not.
    """

    def __init__(self, device: ProfiledDevice, directory: Path | None = None) -> None:
        self._device = asdict(device)
        self._directory = (directory or cache_directory()) / "measurements"
        self.problem: str | None = None

    def get(self, key: str) -> Measurement | None:
        """What was measured of a call, if anything was."""
        path = self._path(key)
        try:
            data = of_schema(parse(read(path), str(path), "a measurement"), SCHEMA, str(path), "")
            time = validated(_adapter(), data.pop("time", None), str(path))
        except InputFileError:
            return None
        return time if data == {"device": self._device, "key": key} else None

    def put(self, key: str, time: Measurement) -> None:
        """Keep a measurement."""
        path = self._path(key)
        text = json.dumps({"schema": SCHEMA, "device": self._device, "key": key, "time": asdict(time)}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text + "\n")
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            self.problem = f"{error.strerror}: {path.parent}"

    def _path(self, key: str) -> Path:
        name = digest(json.dumps(self._device, sort_keys=True) + "\n" + key)
        return self._directory / name[:2] / f"{name}.json"


@cache
def _adapter() -> TypeAdapter[Measurement]:
    return TypeAdapter(Measurement)
