"""YAML without its traps: no aliases (which make a small file huge), no repeated keys (which hide what was meant)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from autopart.errors import InputFileError
from autopart.new_file import write_new

MAX_FILE_BYTES = 1_000_000


class _PlainDumper(yaml.SafeDumper):
    """SafeDumper without aliases, which are not read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader without aliases and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="YAML aliases (*name) are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.MarkedYAMLError(problem=f"key '{key.value}' is there twice", problem_mark=key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, where: str) -> Any:
    """What a file says.

    Args:
        where: How messages name the file.

    Raises:
        InputFileError: It cannot be read, or is not plain YAML.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputFileError(f"{where} is larger than {MAX_FILE_BYTES:,} bytes.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(f"{where} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputFileError(f"{where} is not text in UTF-8.") from None
    except ValueError as error:  # a null character in the path
        raise InputFileError(f"{where} cannot be read: {error}.") from None
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputFileError(f"{where}{line}: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputFileError(
            f"{where} is not YAML: {str(error).splitlines()[0] if str(error) else 'nested too deep'}."
        ) from None


def write_new_yaml(path: Path, data: Mapping[str, Any], comment: str) -> None:
    """Write a file that is not there yet.

    Args:
        comment: Lines that head the file.

    Raises:
        UsageError: There is a file of this name, or none can be written.
    """
    text = yaml.dump(dict(data), Dumper=_PlainDumper, sort_keys=False)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    write_new(path, head + text)
