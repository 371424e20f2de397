"""Links fitted to times that known links made are those links; a real group of processes gives a file that is read."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from autopart.cli import main
from autopart.cluster import Cluster, CollectiveCost, Link
from autopart.errors import InputFileError, UsageError
from autopart.profiler.links import Timing, fit_link
from autopart.sharding.conversions import collective_seconds

STEPS = {
    ("all_reduce", "ring"): lambda t: 2 * (t - 1),
    ("all_gather", "ring"): lambda t: t - 1,
    ("all_reduce", "tree"): lambda t: 2 * math.ceil(math.log2(t)),
    ("all_gather", "tree"): lambda t: math.ceil(math.log2(t)),
}
SIZES = [2**power for power in range(10, 27, 2)]


def timings(truth: dict[tuple[str, str], tuple[float, float]], noise: float, seed: int = 0) -> list[Timing]:
    """Messages of 2 us and 5 GB/s (3 GB/s both ways), and the collectives of `truth`: latency and bandwidth."""
    rng = random.Random(seed)
    found = []
    for size in SIZES:
        found.append(Timing("send", 2, size, (2e-6 + size / 5e9) * rng.lognormvariate(0, noise)))
        found.append(Timing("both_ways", 2, size, (2e-6 + size / 3e9) * rng.lognormvariate(0, noise)))
        for (collective, algorithm), (latency, bandwidth) in truth.items():
            for ranks in (2, 4, 8):
                seconds = STEPS[collective, algorithm](ranks) * latency + size / bandwidth
                found.append(Timing(collective, ranks, size, seconds * rng.lognormvariate(0, noise)))
    return found


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("ties", ["ring", "tree"])
def test_a_fit_finds_the_link_and_the_algorithm(algorithm: str, ties: str) -> None:
    truth = {("all_reduce", algorithm): (4e-6, 2e9), ("all_gather", algorithm): (3e-6, 4e9)}
    link, fits = fit_link("intra_node", timings(truth, noise=0.02), ties)
    assert link.latency_s == pytest.approx(2e-6, rel=0.05)
    assert link.bandwidth_bytes_per_s == pytest.approx(5e9, rel=0.05)
    assert link.both_ways_bytes_per_s == pytest.approx(3e9, rel=0.05)
    for (collective, _), (latency, bandwidth) in truth.items():
        cost = link.measured(collective)
        assert cost is not None and cost.algorithm == algorithm
        assert cost.latency_s == pytest.approx(latency, rel=0.05)
        assert cost.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.05)
    assert all(0 < fit.median < 0.05 for fit in fits)


def test_one_disturbed_timing_moves_little() -> None:
    found = timings({}, noise=0.0)
    found[-2] = Timing("send", 2, found[-2].bytes, found[-2].seconds * 30)
    link, _ = fit_link("intra_node", found, "ring")
    assert link.bandwidth_bytes_per_s == pytest.approx(5e9, rel=0.2)
    assert link.latency_s == pytest.approx(2e-6, rel=0.2)


def test_groups_of_two_leave_the_algorithm_open() -> None:
    pairs = [timing for timing in timings({("all_reduce", "ring"): (4e-6, 2e9)}, 0.0) if timing.ranks == 2]
    for ties in ("ring", "tree"):
        cost = fit_link("intra_node", pairs, ties)[0].measured("all_reduce")
        assert cost is not None and cost.algorithm == ties


def test_without_messages_there_is_no_link() -> None:
    with pytest.raises(UsageError, match="no message"):
        fit_link("intra_node", [Timing("all_reduce", 2, 1024, 1e-3)], "ring")


def test_a_measured_collective_is_priced_by_its_own_figures() -> None:
    plain = Link("plain", 1e-6, 1e9)
    fitted = Link("fitted", 1e-6, 1e9, collectives=(CollectiveCost("all_reduce", "ring", 3e-6, 2e9),))
    assert collective_seconds("all_reduce", 4e6, 8, fitted) == pytest.approx(2 * 7 * 3e-6 + 2e-3)
    assert collective_seconds("all_reduce", 4e6, 8, plain) == pytest.approx(2 * 3 * 1e-6 + 4e-3)
    assert collective_seconds("all_gather", 4e6, 8, fitted) == collective_seconds("all_gather", 4e6, 8, plain)
    assert collective_seconds(None, 4e6, 8, fitted) == 0


def test_a_real_group_gives_a_cluster_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "links.yaml"
    assert main(["profile", "--links", "--device", "cpu", "--out", str(out)]) == 0
    printed = capfd.readouterr()
    assert "all reduce" in printed.out
    for what in ("send", "both ways", "all reduce", "all to all"):
        assert f"Measuring intra_node between 2 processes: {what}." in printed.err
    cluster = Cluster.parse(str(out))
    assert str(cluster) == "2xCPU"
    link = cluster.intra_node
    assert {cost.collective for cost in link.collectives} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    figures = [link.latency_s, link.bandwidth_bytes_per_s, link.both_ways_bytes_per_s]
    figures += [figure for cost in link.collectives for figure in (cost.latency_s, cost.bandwidth_bytes_per_s)]
    assert all(figure is not None and 0 < figure < math.inf for figure in figures)
    assert main(["profile", "--links", "--out", str(out)]) == 2  # it is there already
    assert Cluster.from_data(cluster.to_data()) == cluster


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ("both_ways: 5", "both_ways"),
        ("collectives: {broadcast: {algorithm: ring, bandwidth: 1GB/s, latency: 1us}}", "broadcast"),
        ("collectives: {all_reduce: {algorithm: magic, bandwidth: 1GB/s, latency: 1us}}", "algorithm"),
        ("collectives: {all_reduce: {algorithm: ring, latency: 1us}}", "bandwidth"),
    ],
)
def test_a_link_that_is_none_is_refused(tmp_path: Path, fields: str, key: str) -> None:
    path = tmp_path / "cluster.yaml"
    link = f"{{bandwidth: 1GB/s, latency: 1us, {fields}}}"
    path.write_text(f"machines: [{{gpus: [T4]}}]\nlinks: {{intra_node: {link}}}")
    with pytest.raises(InputFileError, match=key):
        Cluster.parse(str(path))
