"""Reading and writing safetensors files: a length, a JSON header, then the bytes of every tensor.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length; `{"name": {"dtype", "shape",
"data_offsets"}}`; offsets relative to the end of the header, without holes or overlaps).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from .errors import INPUT_FILE, PackageError

HEADER_LIMIT_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: byte offsets are absolute."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int
    end_bytes: int


class SafetensorsFile:
    """The tensors of one file, read one at a time.

    Raises:
        PackageError: The file is truncated or its header is not one of a safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self.size_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                self.entries = self._parse(file.read(8), file, self.size_bytes)
        except OSError as error:
            raise PackageError(f"{self.path}: {error.strerror}", INPUT_FILE) from error

    def keys(self) -> Iterable[str]:
        return self.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped from the file: what is not looked at is not read."""
        entry = self.entries[name]
        data = self._mapped[entry.start_bytes : entry.end_bytes]
        if entry.start_bytes % entry.dtype.itemsize:
            data = data.clone()
        return data.view(entry.dtype).reshape(entry.shape)

    @cached_property
    def _mapped(self) -> torch.Tensor:
        return torch.from_file(str(self.path), shared=False, size=self.size_bytes, dtype=torch.uint8)

    def _parse(self, length: bytes, file: Any, size_bytes: int) -> dict[str, Entry]:
        header_bytes = int.from_bytes(length, "little")
        if len(length) < 8 or header_bytes > min(HEADER_LIMIT_BYTES, size_bytes - 8):
            raise self._broken("the header is longer than the file")
        try:
            header = json.loads(file.read(header_bytes).decode("utf-8"), object_pairs_hook=self._no_duplicates)
        except (ValueError, RecursionError) as error:
            raise self._broken("the header is not JSON") from error
        if not isinstance(header, dict):
            raise self._broken("the header is not a JSON object")
        header.pop("__metadata__", None)
        first = 8 + header_bytes
        entries = {name: self._entry(name, described, first) for name, described in header.items()}
        position = first
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].end_bytes)):
            if entry.start_bytes != position:
                raise self._broken(f"{name} overlaps another tensor or leaves a hole")
            position = entry.end_bytes
        if position != size_bytes:
            raise self._broken(f"it has {size_bytes} bytes, its header describes {position}")
        return entries

    def _entry(self, name: str, described: Any, first: int) -> Entry:
        try:
            dtype = DTYPES[described["dtype"]]
            shape = tuple(described["shape"])
            start, end = described["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise self._broken(f"the header entry of {name} is not dtype, shape and data_offsets")
        if end - start != prod(shape) * dtype.itemsize:
            raise self._broken(
                f"{name} has {end - start} bytes, {list(shape)} {dtype} needs {prod(shape) * dtype.itemsize}"
            )
        return Entry(dtype, shape, first + start, first + end)

    def _no_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise self._broken("a name stands twice in the header")
        return found

    def _broken(self, reason: str) -> PackageError:
        return PackageError(f"{self.path}: not a valid safetensors file: {reason}", INPUT_FILE)


def write(
    path: Path, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensor: Callable[[str], torch.Tensor]
) -> None:
    """Write a file, one tensor in memory at a time; it appears under its name only when it is whole.

    Args:
        described: Name -> (dtype, shape), in the order of the file.
        tensor: Gives the tensor of a name, on the CPU.

    Raises:
        PackageError: The folder cannot be written, or the disk is full.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in described.items():
        end = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    encoded += b" " * (-len(encoded) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name in described:
                contiguous = tensor(name).contiguous()
                if contiguous.numel():
                    file.write(_bytes_of(contiguous))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PackageError(f"{path}: {error.strerror}", INPUT_FILE) from error


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor (without numpy, which torch can do without)."""
    if sys.byteorder != "little":
        raise PackageError("safetensors files can only be read and written on little-endian machines")
    array = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
