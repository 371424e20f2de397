"""`autopart calibrate`: fit a device's efficiency curves to measured profiles."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopart.cli.options import SETTINGS, Json, app
from autopart.cli.output import say, show, working
from autopart.errors import UsageError

if TYPE_CHECKING:
    from autopart.profiler.calibration import Calibration


@app.command("calibrate", no_args_is_help=True, context_settings=SETTINGS)
def calibrate_command(
    profiles: Annotated[list[Path], typer.Argument(metavar="PROFILE", help="What autopart profile measured.")],
    device: Annotated[
        str | None, typer.Option(help="Whose peaks hold: of the catalogue, or a cluster file. Default: the profile's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the fitted device there, as a cluster file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a device's efficiency curves to measured profiles, and say how far they are off."""
    with working():
        from autopart.catalogue import catalogue
        from autopart.cluster import Cluster
        from autopart.clusterfile import write_cluster_file
        from autopart.hardware import device_as_fields, fitted_fields, link_as_fields
        from autopart.profiler.calibration import calibrate, same_device, samples_of
        from autopart.profiler.calibration_table import format_calibration
        from autopart.profiler.profile_file import Profile

        read = [Profile.load(path) for path in profiles]
        measured_on = same_device(read)
        cluster = Cluster.parse(device or measured_on.name)
        base = cluster.devices[0]
        if base.kind != measured_on.kind:
            reason = f"and {base.name} is {_KINDS[base.kind]}: its peaks say nothing about these times"
            raise UsageError(f"the profiles are of {_KINDS[measured_on.kind]}, {reason}")
        samples = samples_of(read)
        threads = f", {measured_on.threads} threads" if measured_on.threads else ""
        source = (
            f"fitted to {len(samples)} measured parts (forward or backward) of calls of "
            f"{', '.join(profile.model for profile in read)} "
            f"on {measured_on.model}{threads}, torch {measured_on.torch}"
        )
        found = calibrate(samples, base, f"{base.name}-calibrated", source)
        if out is not None:
            known = base.name in catalogue()
            fields = {"base": base.name} if known else device_as_fields(base)
            links = {} if known else {name: link_as_fields(getattr(cluster, name)) for name in _LINKS}
            entry = {found.device.name: {**fields, **fitted_fields(found.device)}}
            write_cluster_file(out, entry, [{"gpus": [found.device.name]}], links, _COMMENT)
            say(
                f"Wrote {out}. It has one machine with one device: under `machines`, name {found.device.name} in "
                "`gpus` as many times as a machine has it, and write `count: N` for N machines alike."
            )
            say(f"Then plan with it: {shlex.join(['autopart', 'partition', 'MODEL', '--gpus', str(out)])}")
    show(json.dumps(_data(found), indent=1) if as_json else format_calibration(found))


_KINDS = {"cpu": "a CPU", "cuda": "a GPU"}
_LINKS = ("intra_node", "inter_node")
_COMMENT = (
    "A device with fitted efficiency curves. `machines` is one of it, for you to edit:\n"
    "name it in `gpus` as many times as a machine has it, and write `count: N` for N machines alike."
)


def _data(found: Calibration) -> dict[str, Any]:
    from autopart.hardware import fitted_fields

    return {
        "schema": "autopart-calibration/1",
        "device": {"name": found.device.name, **fitted_fields(found.device)},
        "before": [dataclasses.asdict(row) for row in found.before],
        "after": [dataclasses.asdict(row) for row in found.after],
    }
