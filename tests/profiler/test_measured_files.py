"""Profiles and the cache as files: what is written is read back; anything else is refused, or measured again."""

from __future__ import annotations

import json
import multiprocessing
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopart.cli import main
from autopart.cli.profile import plan_with
from autopart.errors import InputFileError, UsageError
from autopart.graph import Graph
from autopart.profiler.cache import MeasurementCache, cache_directory
from autopart.profiler.measure import Meter
from autopart.profiler.measurement import Measurement
from autopart.profiler.operators import profile
from autopart.profiler.profile_file import Entry, KernelRecord, Profile, ProfiledDevice
from autopart.profiler.profile_table import format_diff
from autopart.tracer import trace

HERE = ProfiledDevice("CPU", "cpu", "a processor", "x86_64", "2.14.1", 1)
TIME = Measurement(1.25e-5, 2.5e-5, 1e-7, 0.031, 40, 4096)
KERNEL = KernelRecord("mm", "matmul", "float32", 1024.0, 768.0)
KEY = 'aten.mm.default(float32[8, 8]:g, float32[8, 8]:gw, "quoted\\") grad'
PROFILE = Profile("a model", "measured", HERE, {KEY: Entry(3, TIME, (KERNEL,), (KERNEL, KERNEL), ())}, ("a note",), 8)


def perceptron() -> Graph:
    return trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(6, 8),), check=False)


# ---------------------------------------------------------------------------------------------- profile files


def test_a_file_holds_a_profile(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    empty = replace(PROFILE, entries={})
    assert Profile.from_json(empty.to_json()) == empty


def test_each_call_stands_on_a_line(tmp_path: Path) -> None:
    other = replace(PROFILE, entries={**PROFILE.entries, "aten.relu.default(float32[8])": PROFILE.entries[KEY]})
    lines = other.to_json().splitlines()
    assert len(lines) == len(PROFILE.to_json().splitlines()) + 1


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another schema": (lambda d: d.update(schema="autopart-plan/3"), "schema"),
    "no device": (lambda d: d.pop("device"), "device"),
    "an unknown key": (lambda d: d.update(command="rm"), "command"),
    "an unknown key of an entry": (lambda d: d["entries"][KEY].update(extra=1), "extra"),
    "negative seconds": (lambda d: d["entries"][KEY]["time"].update(forward_s=-1e-6), "forward_s"),
    "seconds in words": (lambda d: d["entries"][KEY]["time"].update(forward_s="1e-6"), "forward_s"),
    "a count that is no number": (lambda d: d["entries"][KEY].update(count=True), "count"),
    "a dtype that is a function": (lambda d: d["entries"][KEY]["forward"][0].update(dtype="load"), "dtype"),
    "a family that is none": (lambda d: d["entries"][KEY]["forward"][0].update(family="spells"), "family"),
    "a count beyond all numbers": (lambda d: d["entries"][KEY].update(count=10**400), "count"),
    "seconds beyond all times": (lambda d: d["entries"][KEY]["time"].update(forward_s=1e308), "forward_s"),
    "an unknown kind": (lambda d: d["device"].update(kind="tpu"), "kind"),
    "entries that are a list": (lambda d: d.update(entries=[]), "entries"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_profile_is_refused_by_its_key(name: str) -> None:
    damage, key = HOSTILE[name]
    data = json.loads(PROFILE.to_json())
    damage(data)
    with pytest.raises(InputFileError, match=key):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ("[]", "one JSON object"),
        (b"\xff", "UTF-8"),
        ("[" * 100_000, "nested|not valid"),
        (PROFILE.to_json().replace("1.25e-05", "NaN"), "finite"),
        (PROFILE.to_json().replace("1.25e-05", "1e999"), "finite"),
        (PROFILE.to_json().replace('"model"', '"source": "measured", "model"'), "twice"),
    ],
)
def test_what_is_no_json_is_refused(text: str | bytes, says: str) -> None:
    with pytest.raises(InputFileError, match=says):
        Profile.from_json(text)


def test_what_a_file_says_cannot_steer_a_terminal() -> None:
    odd = replace(PROFILE, model="\x1b[31m", notes=("\x1b[2J",), entries={"\x1b[5m(": PROFILE.entries[KEY]})
    for text in (str(odd), format_diff(PROFILE, odd), format_diff(odd, odd)):
        assert "\x1b" not in text and "\\x1b[31m" in text


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=re.escape("none.json")):
        Profile.load(tmp_path / "none.json")


def test_profiles_of_one_device_are_joined() -> None:
    other = replace(PROFILE, model="b", entries={**PROFILE.entries, "x()": PROFILE.entries[KEY]}, microbatch_size=4)
    both = PROFILE.joined(other)
    assert {key: entry.count for key, entry in both.entries.items()} == {KEY: 6, "x()": 3}
    assert both.microbatch_size == 0
    with pytest.raises(UsageError, match="cannot be joined"):
        PROFILE.joined(replace(other, device=replace(HERE, torch="2.11.0")))


def test_a_difference_shows_what_moved_and_what_is_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(TIME, forward_s=1.0)
    entries = {**PROFILE.entries, "slower()": Entry(2, TIME, (), (), ())}
    before = replace(PROFILE, entries=entries)
    after = replace(PROFILE, entries={"slower()": Entry(2, slow, (), (), ()), "new()": Entry(1, slow, (), (), ())})
    after = replace(after, entries={**after.entries, KEY: PROFILE.entries[KEY]})
    lines = format_diff(before, after).splitlines()
    rows = [line for line in lines if line.startswith(("slower", "aten"))]
    assert rows[0].startswith("slower") and rows[1].rstrip().endswith("1")
    assert any("1 calls are in 'after' alone" in line for line in lines)
    for name, one in (("a.json", before), ("b.json", after)):
        one.save(tmp_path / name)
    assert main(["profile", "--diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["only_after"] == ["new()"]


def test_calls_that_are_not_known_well_are_counted_below_the_table() -> None:
    assert "--again" not in str(PROFILE)
    entry = PROFILE.entries[KEY]
    badly = {f"aten.relu.default(float32[{n}])": replace(entry, time=replace(TIME, error=0.02 * n)) for n in (1, 4)}
    text = str(replace(PROFILE, entries={**PROFILE.entries, **badly}))
    assert "2 of 3 distinct calls" in text and "the worst to 8%" in text and "--again" in text
    assert "spread: the middle half" in text


# ------------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOPART_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "autopart"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "autopart"
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"


def test_a_second_run_takes_nothing_from_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = perceptron()
    first = profile(graph, "cpu", budget_s=0.0)
    assert len(files(folder)) == len(first.entries)
    monkeypatch.setattr(Meter, "__init__", never)
    assert profile(graph, "cpu", budget_s=0.0) == first


def test_measured_again_the_cache_has_the_new_times(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = perceptron()
    profile(graph, "cpu", budget_s=0.0)
    monkeypatch.setattr(Meter, "measure", lambda self, call, ranks: TIME)
    again = profile(graph, "cpu", again=True, budget_s=0.0)
    assert {entry.time.repeats for entry in again.entries.values()} == {TIME.repeats}
    monkeypatch.setattr(Meter, "__init__", never)
    assert profile(graph, "cpu", budget_s=0.0) == again


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the device was asked")


def test_an_interrupted_run_goes_on_where_it_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, true, calls = perceptron(), Meter.measure, []

    def stopping(self: Meter, call: Any, ranks: int = 1) -> Measurement:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(call)
        return true(self, call, ranks)

    monkeypatch.setattr(Meter, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        profile(graph, "cpu", budget_s=0.0)
    assert len(files(folder)) == 3
    calls.clear()
    calls.append(None)  # a stop after two more
    with pytest.raises(KeyboardInterrupt):
        profile(graph, "cpu", budget_s=0.0)
    assert len(files(folder)) == 5


def test_other_devices_drivers_and_versions_have_their_own(tmp_path: Path) -> None:
    MeasurementCache(HERE, tmp_path).put(KEY, TIME)
    assert MeasurementCache(HERE, tmp_path).get(KEY) == TIME
    assert MeasurementCache(HERE, tmp_path).get(KEY + " autocast(cpu, bfloat16)") is None
    for changed in ({"model": "another"}, {"driver": "2"}, {"torch": "2.11.0"}, {"threads": 2}):
        assert MeasurementCache(replace(HERE, **changed), tmp_path).get(KEY) is None  # type: ignore[arg-type]


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: "\x00" * len(text),
    "of another call": lambda text: text.replace("aten.mm", "aten.bmm"),
    "of another device": lambda text: text.replace("a processor", "another processor"),
    "of another version": lambda text: text.replace("autopart-measurement/2", "autopart-measurement/1"),
    "negative": lambda text: text.replace("1.25e-05", "-1.25e-05"),
    "infinite": lambda text: text.replace("1.25e-05", "Infinity"),
    "with more": lambda text: text.replace('"schema"', '"more": 1, "schema"'),
    "without a time": lambda text: text.replace('"time"', '"tame"'),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_not_believed_and_is_replaced(tmp_path: Path, name: str) -> None:
    cache = MeasurementCache(HERE, tmp_path)
    cache.put(KEY, TIME)
    (path,) = files(tmp_path)
    path.write_text(DAMAGE[name](path.read_text()))
    assert cache.get(KEY) is None
    cache.put(KEY, TIME)
    assert cache.get(KEY) == TIME and files(tmp_path) == [path]


def test_a_corrupt_entry_is_measured_again(folder: Path) -> None:
    graph = perceptron()
    profile(graph, "cpu", budget_s=0.0)
    path = files(folder)[0]
    good = path.read_text()
    path.write_text(good.replace('"forward_s": ', '"forward_s": 1e9, "was": '))
    found = profile(graph, "cpu", budget_s=0.0)
    assert max(entry.time.forward_s for entry in found.entries.values()) < 1e6
    assert json.loads(path.read_text())["key"] == json.loads(good)["key"]


def test_without_a_place_to_write_the_profile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "file"))
    found = profile(perceptron(), "cpu", budget_s=0.0)
    assert found.entries and any("could not be kept" in note for note in found.notes)


def write_often(folder: Path, seconds: float, rounds: int) -> None:
    """What one of several processes does."""
    cache = MeasurementCache(HERE, folder)
    for _ in range(rounds):
        for n in range(5):
            cache.put(f"call {n}", replace(TIME, forward_s=seconds))


def test_writers_at_the_same_time_never_leave_half_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    written = (1.0, 2.0)
    writers = [context.Process(target=write_often, args=(tmp_path, seconds, 40)) for seconds in written]
    for writer in writers:
        writer.start()
    cache, read = MeasurementCache(HERE, tmp_path), 0
    while any(writer.is_alive() for writer in writers):
        for n in range(5):
            path = cache._path(f"call {n}")
            if path.exists():
                found = cache.get(f"call {n}")
                assert found is not None and found.forward_s in written
                read += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert read and len(files(tmp_path)) == 5


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_profiles_and_writes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import torch\n\n\ndef make():\n"
        "    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(8, 8),)\n"
    )
    out = tmp_path / "p.json"
    command = ["profile", f"{source}:make", "--device", "A100-80G", "--microbatches", "2", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert Profile.from_json(printed.out) == Profile.load(out)
    assert Profile.load(out).microbatch_size == 4
    assert "A100-80G" in Profile.load(out).device.name and "Captured" in printed.err
    written = out.read_bytes()
    for place in (out, tmp_path / "no folder" / "p.json"):
        assert main([*command[:-1], str(place)]) == UsageError.exit_status
        assert "Captured" not in capsys.readouterr().err
    assert out.read_bytes() == written


def test_the_command_that_is_shown_can_be_pasted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "my model.py"
    source.write_text(
        "import torch\n\n\ndef make(width=8, depth=2):\n"
        "    layers = [torch.nn.Linear(width, width) for _ in range(depth)]\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(8, width),)\n"
    )
    out = tmp_path / "p (1).json"
    command = ["profile", f"{source}:make?width=16&depth=4", "--device", "A100-80G", "--out", str(out)]
    assert main([*command, "--dtype", "bfloat16", "--global-batch", "16"]) == 0
    _, _, shown = capsys.readouterr().err.partition("Plan with it: ")
    words = shlex.split(shown.rpartition(" (")[0])
    assert words[:2] == ["autopart", "partition"] and words[2] == command[1]
    assert main([*words[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["dtype"] == "bfloat16" and plan["strategy"]["microbatches"] * plan["strategy"]["microbatch_size"] == 16


def test_for_a_device_that_no_catalogue_has_a_cluster_file_is_asked_for(tmp_path: Path) -> None:
    shown = plan_with(replace(PROFILE, device=replace(HERE, name="Some GPU")), tmp_path / "p.json", {})
    assert "--gpus CLUSTER.yaml" in shown and "devices named 'Some GPU'" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "zoo:unet", "--device", "A100-80G", "--again"],
        ["profile", "--links", "--again"],
        ["profile", "--links", "--device", "A100-80G"],
        pytest.param(
            ["profile", "--links", "--device", "cuda"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
    ],
)
def test_an_option_that_could_not_be_followed_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == UsageError.exit_status
    printed = capsys.readouterr()
    assert printed.out == "" and "Measuring" not in printed.err


def test_an_interrupted_command_keeps_what_it_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "mine.py"
    source.write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(8, 4), (torch.randn(8, 8),)\n")
    true, calls = Meter.measure, []

    def stopping(self: Meter, call: Any, ranks: int = 1) -> Measurement:
        if calls:
            raise KeyboardInterrupt
        calls.append(call)
        return true(self, call, ranks)

    monkeypatch.setattr(Meter, "measure", stopping)
    assert main(["profile", f"{source}:make", "--device", "cpu", "--json"]) == 130
    assert len(files(folder)) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["code"] == "interrupted" and "error: interrupted" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [["profile", "zoo:unet", "--links"], ["profile", "--json"], ["profile", "--diff", "a", "b", "--out", "c"]],
)
def test_one_thing_is_profiled(arguments: list[str]) -> None:
    assert main(arguments) == UsageError.exit_status
