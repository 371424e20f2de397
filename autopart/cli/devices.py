"""`autopart devices`: the hardware that plans can be made for."""

from __future__ import annotations

import json

from autopart.cli.options import SETTINGS, Json, app
from autopart.cli.output import show, working


@app.command("devices", context_settings=SETTINGS)
def devices_command(as_json: Json = False) -> None:
    """The hardware that plans can be made for, and the GPUs of this machine."""
    with working():
        import torch

        from autopart.report.devices import devices_as_data, format_devices

        here = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    show(json.dumps(devices_as_data(here), indent=1) if as_json else format_devices(here))
