"""`autopart profile --links`: latency and bandwidth between the processes of a group.

Under torchrun every process runs the command, on one machine or several; by itself it starts processes of this machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autopart.cli.output import check_new, say, show, working
from autopart.errors import UsageError

if TYPE_CHECKING:
    from autopart.cluster import Link
    from autopart.profiler.links import Fit

LOCAL_PROCESSES = 2
"""Where there are no GPUs to count."""
COMMENT = "Links as measured; `machines` are those that took part. Plan with it: --gpus FILE."


def profile_links(device: str | None, out: Path | None, as_json: bool) -> None:
    """Measure the links, print what was fitted, and write a cluster file.

    Args:
        device: "cuda" or "cpu", where messages come from; None: "cuda" where there are GPUs for all processes.

    Raises:
        UsageError: There are no such devices here.
    """
    with working():
        _check_device(device)
    check_new(out)
    if "WORLD_SIZE" not in os.environ:
        _start_processes(device, out, as_json)
        return
    with working(), _group(device) as place:
        import torch.distributed as dist

        from autopart.profiler.link_times import classes, measure, members
        from autopart.profiler.links import fit_link

        measured = {name: measure(ranks, place, progress=partial(_say_what, name)) for name, ranks in classes().items()}
        machines = members(place)
        if dist.get_rank() != 0:
            return
        if not measured:
            raise UsageError("one process alone has no links", "Start it with torchrun --nproc-per-node 2, or more.")
        found = {name: fit_link(name, timings, _ties(place.type)) for name, timings in measured.items()}
        if out is not None:
            _write(out, {name: link for name, (link, _) in found.items()}, machines)
    fits = {name: fits for name, (_, fits) in found.items()}
    show(json.dumps(_data(fits), indent=1) if as_json else _text(fits))


def _check_device(device: str | None) -> None:
    from autopart.profiler.this_machine import here

    if device is not None and (device.lower() not in ("cuda", "cpu") or here(device) is None):
        raise UsageError(f"links are measured, so --device is cuda or cpu with --links, not {device!r}")


def _say_what(link: str, what: str, ranks: int) -> None:
    say(f"Measuring {link} between {ranks} processes: {what.replace('_', ' ')}.")


def _start_processes(device: str | None, out: Path | None, as_json: bool) -> None:
    """Run the same command in a process for each GPU, or in two on the CPU."""
    import torch

    gpus = 0 if device is not None and device.lower() == "cpu" else torch.cuda.device_count()
    if device is not None and device.lower() == "cuda" and gpus < 2:
        raise UsageError("this machine has one GPU, and a link is between two", "Start it on several under torchrun.")
    count = gpus if gpus > 1 else LOCAL_PROCESSES
    kind = "GPU" if gpus > 1 else "CPU"
    say(f"Measuring between {count} {kind} processes of this machine; for several machines start this under torchrun.")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "autopart.cli", "profile", "--links"]
    command += ["--device", device] if device is not None else []
    command += ["--out", str(out)] if out is not None else []
    command += ["--json"] if as_json else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        raise typer.Exit(status)


@contextmanager
def _group(wanted: str | None) -> Iterator[Any]:
    """This process as one of torchrun's, with the device that its messages come from."""
    import torch
    import torch.distributed as dist

    local, beside = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= beside
    if wanted is not None and wanted.lower() == "cuda" and not enough:
        raise UsageError(f"there are {beside} processes on this machine, and {torch.cuda.device_count()} GPUs")
    on_gpus = enough and (wanted is None or wanted.lower() == "cuda")
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _ties(kind: str) -> Any:
    """gloo sends around rings; NCCL takes trees where latency counts."""
    return "tree" if kind == "cuda" else "ring"


def _write(out: Path, links: dict[str, Link], machines: list[list[str]]) -> None:
    from autopart.clusterfile import write_cluster_file
    from autopart.hardware import link_as_fields

    write_cluster_file(
        out,
        {},
        [{"gpus": names} for names in machines],
        {name: link_as_fields(link) for name, link in links.items()},
        COMMENT,
    )
    say(f"Wrote {out}. Plan with it: {shlex.join(['autopart', 'partition', 'MODEL', '--gpus', str(out)])}")


def _text(fits: dict[str, list[Fit]]) -> str:
    from autopart.report.links import format_links

    return format_links(fits)


def _data(fits: dict[str, list[Fit]]) -> dict[str, Any]:
    links = {name: [dataclasses.asdict(fit) for fit in found] for name, found in fits.items()}
    return {"schema": "autopart-links/1", "links": links}
