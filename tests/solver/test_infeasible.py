"""What the error proposes where nothing fits is tried out, one change at a time: each is enough by itself."""

import dataclasses
import re

import pytest
import torch
from torch import nn

import autopart
from autopart.cluster import Cluster
from autopart.errors import InfeasibleError
from autopart.units import parse_bytes

ROWS, MICROBATCHES = 4096, 4


class Blocks(nn.Module):
    """Residual blocks that keep four times what they pass on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def _planned(memory_bytes, devices=2, **options):
    cluster = Cluster.parse(f"{devices}xT4")
    devices = tuple(dataclasses.replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    with torch.device("meta"):
        model, rows = Blocks(), torch.empty(ROWS, 256)
    given = {"microbatches": MICROBATCHES, "tensor": 1, "stages": 2, "time_limit_s": 10.0} | options
    return autopart.partition(model, dataclasses.replace(cluster, devices=devices), example_inputs=(rows,), **given)


@pytest.mark.parametrize("memory", [60_000_000, 85_000_000])
@pytest.mark.parametrize("options", [("1f1b", "auto"), ("1f1b", "none"), ("gpipe", "auto"), ("gpipe", "none")])
def test_every_proposed_change_is_enough(options, memory):
    schedule, recompute = options
    asked = {"schedule": schedule, "recompute": recompute}
    try:
        _planned(memory, **asked)
    except InfeasibleError as error:
        refusal = error
    else:
        assert recompute == "auto" and memory > 60_000_000
        return
    more = re.search(r"([\d.]+ GiB) of memory on each", refusal.hint)
    assert _planned(parse_bytes(more.group(1)), **asked).status
    needed = float(re.search(r"needs ([\d.]+) GiB", refusal.message).group(1))
    assert needed <= float(more.group(1).removesuffix(" GiB"))
    if devices := re.search(r"(\d+) devices of this kind, in (\d+) stages", refusal.hint):
        count, stages = map(int, devices.groups())
        assert _planned(memory, devices=count, **(asked | {"stages": stages})).strategy.stages == stages
    if fewer := re.search(r"microbatches of (\d+) rows", refusal.hint):
        assert _planned(memory, **asked, microbatches=ROWS // int(fewer.group(1))).status
    assert devices or fewer or memory < 85_000_000
