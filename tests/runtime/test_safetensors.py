"""Our safetensors files are those of the library, and what is not one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from autopart.runtime.errors import PackageError
from autopart.runtime.safetensors import DTYPES, SafetensorsFile, write

STATE = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items() if not dtype.is_complex} | {
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8) if tensor.numel() else tensor


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {n: (t.dtype, tuple(t.shape)) for n, t in STATE.items()}, STATE.__getitem__)
    found = safetensors.torch.load_file(path)
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert as_bytes(found[name]).equal(as_bytes(tensor))
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(STATE, path)
    file = SafetensorsFile(path)
    assert set(file.keys()) == STATE.keys()
    for name, tensor in STATE.items():
        assert file.shape(name) == tuple(tensor.shape)
        assert as_bytes(file.read(name)).equal(as_bytes(tensor))


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def described(start: int = 0, end: int = 8, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


BROKEN = {
    "empty file": b"",
    "header longer than the file": raw({}, length=1 << 40),
    "header too long for anybody": raw({}, length=(1 << 64) - 1),
    "header is not JSON": raw(b"{", b""),
    "header is not UTF-8": raw(b'{"\xff": 1}'),
    "header is a list": raw([]),
    "deep header": raw(b"[" * 100_000),
    "name twice": raw(
        b'{"a":' + json.dumps(described()).encode() + b',"a":' + json.dumps(described()).encode() + b"}", bytes(8)
    ),
    "overlap": raw({"a": described(), "b": described(4, 12)}, bytes(12)),
    "hole": raw({"a": described(), "b": described(12, 20)}, bytes(20)),
    "truncated": raw({"a": described()}, bytes(7)),
    "bytes left over": raw({"a": described()}, bytes(9)),
    "wrong size": raw({"a": described(shape=(3,))}, bytes(8)),
    "negative size": raw({"a": described(shape=(-2, -1))}, bytes(8)),
    "float offset": raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}}, bytes(8)),
    "backwards": raw({"a": described(8, 0)}, bytes(8)),
    "unknown dtype": raw({"a": described(dtype="F33")}, bytes(8)),
    "no shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "entry is a number": raw({"a": 1}),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(BROKEN[fault])
    with pytest.raises(PackageError, match="not a valid safetensors file") as caught:
        SafetensorsFile(path)
    assert caught.value.exit_status == 7


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PackageError, match="No space left"):
        write(path, {"a": (torch.float32, (2,))}, lambda name: torch.zeros(2))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
