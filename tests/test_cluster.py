"""Clusters are read as people write them, and refused by name where they cannot be."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopart.catalogue import catalogue
from autopart.cluster import Cluster, Device, Link
from autopart.errors import AutopartError, InputFileError, UsageError

GIB = 2**30


@pytest.mark.parametrize(
    ("spec", "names", "nodes"),
    [
        ("8xH100-80G", ["H100-80G"] * 8, [0] * 8),
        ("2x3xA100-80G", ["A100-80G"] * 6, [0, 0, 0, 1, 1, 1]),
        ("h200", ["H200"], [0]),
        ("2 x rtx 4090", ["RTX-4090"] * 2, [0, 0]),
        ("4xNVIDIA A100-SXM4-80GB", ["A100-80G"] * 4, [0] * 4),
        ("2xA100-80G,T4", ["A100-80G", "A100-80G", "T4"], [0, 0, 0]),
        (["A100-80G", "A100-80G", "T4"], ["A100-80G", "A100-80G", "T4"], [0, 0, 0]),
        ("2xCPU", ["CPU", "CPU"], [0, 0]),
    ],
)
def test_a_cluster_is_read_as_written(spec: object, names: list[str], nodes: list[int]) -> None:
    cluster = Cluster.parse(spec)
    assert [device.name for device in cluster.devices] == names
    assert list(cluster.nodes) == nodes


# What torch.cuda.get_device_name() says on real machines.
@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100 80GB PCIe", "A100-80G"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("Tesla V100-SXM2-32GB", "V100-32G"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
    ],
)
def test_names_that_drivers_report_are_known(reported: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: reported)
    cluster = Cluster.parse(2)
    assert [device.name for device in cluster.devices] == [name, name]
    assert reported in cluster.notes[0]


@pytest.mark.parametrize("spec", [4, "4"])
def test_a_number_on_a_machine_without_so_many_gpus_says_what_was_assumed(
    spec: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cluster = Cluster.parse(spec)
    assert str(cluster) == "4xH100-80G"
    assert "has 3 GPUs" in cluster.notes[0] and "4 x H100-80G" in cluster.notes[0]


def test_a_short_name_means_the_smallest_memory_and_says_so() -> None:
    cluster = Cluster.parse("2xA100")
    assert cluster.devices[0].name == "A100-40G"
    assert "A100-40G" in cluster.notes[0]


def test_an_unknown_device_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match=r"Unknown device 'H10O-80G'\. Did you mean H100-80G") as caught:
        Cluster.parse("8xH10O-80G")
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "spec",
    [0, -1, "0", "-3", "0x2xT4", "2x0xT4", "", "x", "8x", "xH100", True, None, 2.5, [], [4], {}, "99999999xT4", 10**9],
)
def test_what_is_not_a_cluster_is_refused(spec: object) -> None:
    with pytest.raises(UsageError):
        Cluster.parse(spec)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20) | st.lists(st.text(max_size=8), max_size=3))
@example("/\x00")
def test_any_text_is_a_cluster_or_a_named_refusal(spec: object) -> None:
    with contextlib.suppress(AutopartError):
        assert len(Cluster.parse(spec)) > 0


def test_ranks_of_one_machine_use_its_link_and_others_the_network() -> None:
    cluster = Cluster.parse("2x2xA100-80G")
    assert cluster.link(0, 1) is cluster.intra_node
    assert cluster.link(1, 2) is cluster.inter_node
    assert cluster.intra_node.bandwidth_bytes_per_s > cluster.inter_node.bandwidth_bytes_per_s


def test_unequal_devices_share_the_slowest_of_their_links() -> None:
    assert Cluster.parse(["H100-80G", "T4"]).intra_node == Cluster.parse("T4").intra_node


@pytest.mark.parametrize("spec", ["8xH100-80G", "2x8xA100-80G", "A100", ["A100-80G", "T4"], "CPU", 3])
def test_a_cluster_survives_json(spec: object) -> None:
    cluster = Cluster.parse(spec)
    assert Cluster.from_data(json.loads(json.dumps(cluster.to_data()))) == cluster


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("nodes", [0], "machine numbers"),
        ("nodes", [0, "0"], "nodes.1"),
        ("nodes", [0, True], "nodes.1"),
        ("devices", [], "devices"),
        ("devices", ["T4", "T5"], "'T5'"),
        ("kinds", {}, "'T4'"),
        ("intra_node", {"name": "x", "latency_s": -1.0, "bandwidth_bytes_per_s": 1.0}, "intra_node.latency_s"),
        ("inter_node", None, "inter_node"),
        ("surprise", 1, "surprise"),
    ],
)
def test_corrupt_cluster_data_names_the_key(key: str, value: object, named: str) -> None:
    data = {**Cluster.parse("2xT4").to_data(), key: value}
    with pytest.raises(InputFileError, match=named) as caught:
        Cluster.from_data(data)
    assert caught.value.exit_status == 7


FILE = """
devices:
  Big:
    base: A100-80G
    memory: 74.5GiB
  Own:
    memory: 80GB
    rates: {float32: 20TFLOP/s, bfloat16: 0.3PFLOP/s}
    memory_bandwidth: 2039GB/s
    kind: cpu
    launch: 7us
machines:
  - gpus: [Big, T4]
    count: 2
  - gpus: [Own]
links:
  inter_node: {bandwidth: 400Gbit/s, latency: 0.01ms}
"""


def write(directory: Path, text: str) -> str:
    path = directory / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_a_cluster_file_describes_hardware_of_ones_own(tmp_path: Path) -> None:
    cluster = Cluster.parse(write(tmp_path, FILE))
    assert [device.name for device in cluster.devices] == ["Big", "T4", "Big", "T4", "Own"]
    assert cluster.nodes == (0, 0, 1, 1, 2)
    big, own, a100 = cluster.devices[0], cluster.devices[-1], catalogue()["A100-80G"].device
    assert big.memory_bytes == int(74.5 * GIB) and big.flops_per_s == a100.flops_per_s
    assert own == Device(
        "Own", 80 * 10**9, {"float32": 20e12, "bfloat16": 0.3e15}, 2039e9, "the user's file", "cpu", pytest.approx(7e-6)
    )
    assert cluster.inter_node == Link("inter_node", pytest.approx(1e-5), 50e9)
    assert cluster.intra_node.bandwidth_bytes_per_s == catalogue()["T4"].link.bandwidth_bytes_per_s
    assert Cluster.parse(tmp_path / "cluster.yaml") == cluster
    assert Cluster.from_data(cluster.to_data()) == cluster


def test_a_cluster_file_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"machines": [{"gpus": ["T4", "T4"]}]}))
    assert str(Cluster.parse(path)) == "2xT4"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "the whole"),
        ("[1, 2]", "the whole"),
        ("machines: []", "machines"),
        ("machines: [{gpus: []}]", "machines.0.gpus"),
        ("machines: [{gpus: [T4], count: 0}]", "machines.0.count"),
        ("machines: [{gpus: [T4], count: '2'}]", "machines.0.count"),
        ("machines: [{gpus: [NO]}]", "machines.0.gpus.0"),
        ("machines: [{gpus: [08]}]", "Unknown device '08'"),
        ("machines: [{gpus: [T5]}]", "Did you mean T4"),
        ("machines: [{gpus: [T4]}]\nmachines: [{gpus: [L4]}]", "'machines' is there twice"),
        ("machines: [{gpus: &a [T4]}, {gpus: *a}]", "aliases"),
        ("machine: [{gpus: [T4]}]", "machines"),
        ("machines: [{gpus: [T4], speed: 1}]", "machines.0.speed"),
        ("machines: [{gpus: [X]}]\ndevices: {X: {base: T4, memory: 16}}", "devices.X.memory"),
        ("machines: [{gpus: [X]}]\ndevices: {X: {base: T4, memory: 16Gb}}", "unknown unit 'Gb'"),
        ("machines: [{gpus: [X]}]\ndevices: {X: {base: T4, memory: 0GB}}", "more than zero"),
        ("machines: [{gpus: [X]}]\ndevices: {X: {base: T4, memory: -1GB}}", "devices.X.memory"),
        ("machines: [{gpus: [X]}]\ndevices: {X: {base: T5}}", "devices.X.base"),
        ("machines: [{gpus: [X]}]\ndevices: {X: {memory: 16GB}}", "rates, memory_bandwidth missing"),
        ("machines: [{gpus: [X]}]\ndevices: {X: {base: T4, rates: {float16: 1TFLOP/s}}}", "float32 is missing"),
        ("machines: [{gpus: [T4]}]\ndevices: {T4: {base: T4, memory: 1GB}}", "choose another"),
        (
            "machines: [{gpus: [T4]}]\nlinks: {intra_node: {bandwidth: 12:30:00, latency: 5us}}",
            "links.intra_node.bandwidth",
        ),
        ("machines: [{gpus: [T4]}]\nlinks: {intra_node: {bandwidth: 1GB/s}}", "links.intra_node.latency"),
        ("{{{", "line 1"),
        ("machines: !!python/object/apply:os.getcwd []", "line 1"),
        ("machines: [{gpus: [T4], count: 100000}]", "machines.0.count"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_a_bad_cluster_file_names_file_and_key(text: str, named: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputFileError) as caught:
        Cluster.parse(path)
    assert named in str(caught.value) and "cluster.yaml" in str(caught.value)
    assert caught.value.exit_status == 7


def test_a_cluster_file_that_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, why in [("binary.yaml", "UTF-8"), ("none.yaml", "cannot be read"), (".", "cannot be read")]:
        with pytest.raises(InputFileError, match=why):
            Cluster.parse(tmp_path / name)


def test_the_catalogue_is_complete_and_consistent() -> None:
    entries = catalogue()
    assert {"V100-16G", "V100-32G", "T4", "A10", "L4", "L40S", "RTX-3090", "RTX-4090", "RTX-5090"} < set(entries)
    assert {"A100-40G", "A100-80G", "H100-80G", "H200", "B200", "CPU"} < set(entries)
    for name, entry in entries.items():
        device = entry.device
        assert device.name == name and device.source
        # A program sees less than the box says, and never more.
        stated = {"V100-16G": 16, "V100-32G": 32, "T4": 16, "A10": 24, "L4": 24, "L40S": 48, "RTX-3090": 24}
        stated |= {"RTX-4090": 24, "RTX-5090": 32, "A100-40G": 40, "A100-80G": 80, "H100-80G": 80, "H200": 141}
        stated |= {"B200": 180, "CPU": 8}
        assert 0.9 * stated[name] * GIB <= device.memory_bytes <= stated[name] * GIB, name
        # Datasheets quote sparse rates as readily as dense ones: twice the dense rate would show here.
        assert device.flops_per_s["float64"] < device.flops_per_s["float32"]
        for half in ("float16", "bfloat16"):
            if device.kind == "cuda" and half in device.flops_per_s:
                assert device.flops_per_s[half] / device.memory_bandwidth_bytes_per_s < 450, (name, half)
        assert entry.link.bandwidth_bytes_per_s <= 900e9  # one direction: NVLink 5 is the fastest


def test_reading_a_cluster_is_quick_because_torch_stays_out() -> None:
    code = "import sys; from autopart.cluster import Cluster; Cluster.parse('2xT4'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
