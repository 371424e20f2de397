"""Devices by the names that users give: this machine's CPU and GPU, and the catalogue's."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from autopart.catalogue import find
from autopart.cluster import Device
from autopart.errors import UsageError
from autopart.profiler.profile_file import ProfiledDevice

CPU = "CPU"
"""The catalogue's name of a CPU thread."""


def here(name: str) -> ProfiledDevice | None:
    """The device of this machine that is meant by "cpu", "cuda" or a name; None where it is another's.

    Raises:
        UsageError: "cuda" where there is no GPU.
    """
    if name.lower() == "cpu":
        return _cpu()
    if torch.cuda.is_available():
        device = _gpu()
        if name.lower() == "cuda" or device.name == _catalogue_name(name):
            return device
    elif name.lower() == "cuda":
        hint = "Name a GPU of the catalogue for a profile by formula, such as H100-80G; or measure on 'cpu'."
        raise UsageError("this machine has no GPU that torch can use", hint)
    return None


def check_device(name: str) -> None:
    """Refuse a name that means no device.

    Raises:
        UsageError: Neither this machine nor the catalogue has it.
    """
    if here(name) is None:
        find(name)


def by_formula(name: str) -> tuple[Device, ProfiledDevice]:
    """The figures of a device, and how a profile by formula names it.

    Raises:
        UsageError: The catalogue does not have it.
    """
    found = here(name)
    device = find(found.name if found is not None else name)[0].device
    if found is None:
        found = ProfiledDevice(device.name, device.kind, device.name, "", torch.__version__, 0)
    return device, found


def _cpu() -> ProfiledDevice:
    threads = torch.get_num_threads()
    return ProfiledDevice(CPU, "cpu", _cpu_model(), platform.machine(), torch.__version__, threads)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _gpu() -> ProfiledDevice:
    model = torch.cuda.get_device_name()
    # Private: torch tells the driver's version nowhere else.
    driver = f"CUDA {torch.version.cuda}, driver {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]
    return ProfiledDevice(_catalogue_name(model) or model, "cuda", model, driver, torch.__version__, 0)


def _catalogue_name(name: str) -> str | None:
    try:
        return find(name)[0].device.name
    except UsageError:
        return None
