"""Curves fitted to times that known curves made predict those times again; files from elsewhere are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from autopart.cli import main
from autopart.cluster import Cluster, Device, Efficiency
from autopart.errors import InputFileError, UsageError
from autopart.profiler.calibration import Calibration, Sample, calibrate, residuals, samples_of
from autopart.profiler.calibration_table import format_calibration
from autopart.profiler.isolated import Work
from autopart.profiler.kernels import Kernel
from autopart.profiler.measurement import Measurement
from autopart.profiler.profile_file import Entry, Profile, ProfiledDevice

FAMILIES = ("matmul", "convolution", "pointwise", "normalization", "gather")
COMPUTING = ("matmul", "convolution")


def true_seconds(kernel: Kernel, device: Device) -> float:
    """The roofline, written down a second time."""
    curve = device.efficiency[kernel.family]
    bandwidth = device.memory_bandwidth_bytes_per_s
    inside = min(kernel.bytes, device.cache_bytes)
    memory = (kernel.bytes - inside) / (bandwidth * curve.of_bandwidth)
    memory += inside / (bandwidth * (curve.of_cache or 1))
    busy = max(kernel.flops / (device.flops_per_s["float32"] * curve.of_rate), memory) + curve.ramp_s
    return busy + device.launch_s if device.kind == "cpu" else max(busy, device.launch_s)


def random_device(name: str, rng: random.Random) -> Device:
    base = Cluster.parse(name).devices[0]
    on_cpu = base.kind == "cpu"
    curves = {
        family: Efficiency(
            rng.uniform(0.3, 1), rng.uniform(0.2, 1), 10 ** rng.uniform(-6, -5), rng.uniform(2, 8) if on_cpu else None
        )
        for family in FAMILIES
    }
    return dataclasses.replace(base, efficiency=curves, cache_bytes=8 << 20 if on_cpu else 0)


def random_kernel(rng: random.Random) -> Kernel:
    family, size = rng.choice(FAMILIES), 10 ** rng.uniform(4, 9)
    flops = size * 10 ** rng.uniform(-1, 4) if family in COMPUTING else 0.0
    return Kernel("some", family, torch.float32, flops, size)


def random_samples(device: Device, rng: random.Random, noise: float = 0.0, wrong: float = 0.0) -> list[Sample]:
    """Calls of one to three kernels, with noise of a log-normal law, some of them far too slow."""
    found = []
    for _ in range(400):
        kernels = tuple(random_kernel(rng) for _ in range(rng.choice((1, 1, 2, 3))))
        seconds = sum(true_seconds(kernel, device) for kernel in kernels) * rng.lognormvariate(0, noise)
        seconds *= rng.uniform(3, 20) if rng.random() < wrong else 1
        found.append(Sample(kernels, seconds, rng.randint(1, 40)))
    return found


@pytest.mark.parametrize("name", ["CPU", "A100-80G"])
@pytest.mark.parametrize("seed", range(3))
def test_fitted_curves_predict_what_known_curves_made(name: str, seed: int) -> None:
    rng = random.Random(seed)
    truth = random_device(name, rng)
    fitted = calibrate(random_samples(truth, rng, noise=0.05), Cluster.parse(name).devices[0], "mine", "test").device
    fresh = random_samples(truth, rng)
    errors = [abs(math.log(sample.predicted(fitted) / sample.seconds)) for sample in fresh]
    assert sorted(errors)[len(errors) // 2] < 0.05
    assert sorted(errors)[len(errors) * 9 // 10] < 0.15
    assert fitted.name == "mine" and fitted.source == "test"


def test_a_tenth_of_disturbed_measurements_moves_little() -> None:
    rng = random.Random(5)
    truth = random_device("CPU", rng)
    fitted = calibrate(random_samples(truth, rng, 0.05, wrong=0.1), Cluster.parse("CPU").devices[0], "mine", "").device
    errors = [abs(math.log(sample.predicted(fitted) / sample.seconds)) for sample in random_samples(truth, rng)]
    assert sorted(errors)[len(errors) // 2] < 0.1


def test_a_fit_is_the_same_every_time() -> None:
    rng = random.Random(6)
    samples = random_samples(random_device("CPU", rng), rng, noise=0.3)
    base = Cluster.parse("CPU").devices[0]
    assert calibrate(samples, base, "mine", "") == calibrate(samples, base, "mine", "")


def test_families_without_measurements_stay_as_they_are() -> None:
    base = Cluster.parse("A100-80G").devices[0]
    sample = Sample((Kernel("add", "pointwise", torch.float32, 0.0, 1e8),), 1e-3, 1)
    assert set(calibrate([sample], base, "mine", "").device.efficiency) == {"pointwise"}


def test_residuals_are_those_of_the_table() -> None:
    device = dataclasses.replace(
        Cluster.parse("A100-80G").devices[0],
        launch_s=0.0,
        memory_bandwidth_bytes_per_s=1e12,
        efficiency={"pointwise": Efficiency(1.0, 1.0, 1e-12)},
    )
    times = [(1e9, 1e-3, 1), (2e9, 1e-3, 3), (1e9, 2e-3, 1)]  # predicted 1, 2 and 1 ms
    samples = [Sample((Kernel("add", "pointwise", torch.float32, 0.0, size),), s, n) for size, s, n in times]
    family, everything = residuals(samples, device, device)
    assert family.family == "pointwise" and everything.family == "all" and family.parts == 3
    assert family.median == pytest.approx(0.5, rel=1e-6)
    assert family.ninety == pytest.approx(0.9, rel=1e-6)
    assert family.total == pytest.approx((1 + 3 * 2 + 1) / (1 + 3 * 1 + 2), rel=1e-6)


def test_every_fitted_family_has_a_row_although_another_takes_longest() -> None:
    base = Cluster.parse("CPU").devices[0]
    dropped = Kernel("bernoulli_", "random", torch.float32, 0.0, 1e3)
    product = Kernel("mm", "matmul", torch.float32, 1e9, 1e7)
    samples = [Sample((product, dropped), 0.2, 1), Sample((product,), 0.1, 2), Sample((product, dropped), 0.3, 1)]
    found = calibrate(samples, base, "mine", "")
    for rows in (found.before, found.after):
        assert {row.family: (row.parts, row.longest) for row in rows} == {
            "matmul": (3, True),
            "random": (2, False),
            "all": (3, True),
        }
    assert {"matmul", "random"} <= found.device.efficiency.keys()
    text = format_calibration(found)
    assert "random" in text and "shown by every part that has it: random." in text
    assert "parts" in text.splitlines()[0] + text.splitlines()[1] and "calls" not in text.splitlines()[0]


@pytest.mark.parametrize(
    ("curve", "says"),
    [
        (Efficiency(1.5, 0.5, 1e-6), ["peak rate (matmul 1.5 times"]),
        (Efficiency(0.5, 2.5, 1e-6), ["peak bandwidth (matmul 2.5 times", "lay in the cache"]),
        (Efficiency(1.0, 0.9, 1e-6, 4.0), []),
    ],
)
def test_more_than_a_peak_is_remarked_on(curve: Efficiency, says: list[str]) -> None:
    device = dataclasses.replace(
        Cluster.parse("CPU").devices[0], efficiency={"matmul": curve, "copy": Efficiency(9, 9, 1)}
    )
    rows = residuals([Sample((Kernel("mm", "matmul", torch.float32, 1e9, 1e7),), 1e-3, 1)], device, device)
    text = format_calibration(Calibration(device, rows, rows))
    assert all(words in text for words in says) and ("More than" in text) == bool(says)
    assert "copy" not in text  # its curve is not of this fit


def a_profile(seed: int = 0, **changed: Any) -> Profile:
    rng = random.Random(seed)
    truth = random_device("CPU", rng)
    entries = {}
    for number in range(150):
        kernels = [random_kernel(rng) for _ in range(3)]
        forward, both, only = tuple(kernels[:1]), tuple(kernels[1:]), tuple(kernels[1:2])
        times = [sum(true_seconds(kernel, truth) for kernel in part) for part in (forward, only, both)]
        time = Measurement(times[0], times[1], times[2] - times[1], spread=0.01, repeats=5)
        entries[f"call {number}"] = Entry.of(1, time, Work(forward, both, only))
    device = ProfiledDevice("CPU", "cpu", "a processor", "none", "2.14", 1)
    return dataclasses.replace(Profile("a model", "measured", device, entries), **changed)


def test_the_command_writes_a_device_that_plans_can_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_profile().save(tmp_path / "profile.json")
    out = tmp_path / "mine.yaml"
    assert main(["calibrate", str(tmp_path / "profile.json"), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "matmul" in printed.out and "all" in printed.out
    assert f"autopart partition MODEL --gpus {out}" in printed.err and "`count: N`" in printed.err
    (device,) = Cluster.parse(str(out)).devices
    samples = samples_of([a_profile()])
    errors = [abs(sample.predicted(device) / sample.seconds - 1) for sample in samples]
    assert sorted(errors)[len(errors) // 2] < 0.05
    assert device.name == "CPU-calibrated" and "a processor" in device.source
    assert f"{len(samples)} measured parts" in device.source
    out.write_text(out.read_text().replace("- gpus:", "- count: 3\n  gpus:"))
    assert Cluster.parse(str(out)).devices == (device,) * 3
    assert Cluster.from_data(json.loads(json.dumps(Cluster.parse(str(out)).to_data()))) == Cluster.parse(str(out))


def test_the_command_never_overwrites(tmp_path: Path) -> None:
    a_profile().save(tmp_path / "profile.json")
    (tmp_path / "mine.yaml").write_text("precious")
    assert main(["calibrate", str(tmp_path / "profile.json"), "--out", str(tmp_path / "mine.yaml")]) == 2
    assert (tmp_path / "mine.yaml").read_text() == "precious"


def test_the_command_tells_residuals_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_profile().save(tmp_path / "profile.json")
    assert main(["calibrate", str(tmp_path / "profile.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["after"][-1]["family"] == "all" and data["after"][-1]["median"] < data["before"][-1]["median"]


def test_formulas_are_nothing_to_fit_to() -> None:
    with pytest.raises(UsageError, match="formulas"):
        samples_of([a_profile(source="analytic")])
    with pytest.raises(UsageError, match="no measured call"):
        calibrate([], Cluster.parse("CPU").devices[0], "mine", "")


def test_profiles_of_two_devices_are_not_mixed(tmp_path: Path) -> None:
    other = dataclasses.replace(a_profile().device, threads=8)
    a_profile().save(tmp_path / "a.json")
    a_profile(device=other).save(tmp_path / "b.json")
    assert main(["calibrate", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"family": "matmul"', '"family": "__class__"'),
        ('"dtype": "float32"', '"dtype": "load"'),
        ('"flops": 0.0', '"flops": Infinity'),
        ('"flops": 0.0', '"flops": -1'),
        ('"count": 1', '"count": -1'),
        ('"schema"', '"scheme"'),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "hostile.json"
    path.write_text(a_profile().to_json().replace(old, new))
    with pytest.raises(InputFileError):
        samples_of([Profile.load(path)])


@pytest.mark.parametrize(
    "curve",
    [
        "{of_rate: 0, of_bandwidth: 0.5, ramp: 1us}",
        "{of_rate: .inf, of_bandwidth: 0.5, ramp: 1us}",
        "{of_rate: 0.5, of_bandwidth: 0.5, ramp: 1}",
        "{of_rate: 0.5, of_bandwidth: 0.5}",
        "{of_rate: 0.5, of_bandwidth: 0.5, ramp: 1us, surprise: 1}",
        "0.5",
    ],
)
def test_a_curve_that_is_none_is_refused(tmp_path: Path, curve: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"devices: {{D: {{base: T4, efficiency: {{matmul: {curve}}}}}}}\nmachines: [{{gpus: [D]}}]")
    with pytest.raises(InputFileError, match=r"devices\.D\.efficiency\.matmul"):
        Cluster.parse(str(path))


def test_the_peaks_of_a_gpu_are_not_fitted_to_times_of_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_profile().save(tmp_path / "p.json")
    assert main(["calibrate", str(tmp_path / "p.json"), "--device", "A100-80G"]) == UsageError.exit_status
    assert "peaks say nothing" in capsys.readouterr().err
