"""Files of the user's that a package holds copies of, with the files beside them that they import.

A copy is a module of the package's `user_code`, so imports of one another are rewritten to `from user_code...`; nothing
else in them changes.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import site
import sys
import sysconfig
from pathlib import Path

from autopart.codegen.names import identifier, unique
from autopart.errors import CaptureError

Import = ast.Import | ast.ImportFrom


class UserCode:
    """Collects the files.

    Attributes:
        sources: Name in `user_code/` -> the file it is a copy of.
        libraries: Installed packages that the files import.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Path] = {}
        self.libraries: set[str] = set()

    def add(self, path: Path) -> str:
        """Take a file and all that it imports from its own folder; gives its name in `user_code`.

        Raises:
            CaptureError: It imports something that is neither installed nor a file beside it.
        """
        for name, known in self.sources.items():
            if known == path:
                return name
        name = unique(identifier(path.stem, "code"), set(self.sources))
        self.sources[name] = path
        for statement in _imports(path):
            for module, level in _modules(statement, path.parent):
                beside = _beside(module, level, path.parent)
                if beside is not None:
                    self.add(beside)
                    continue
                root = module.partition(".")[0]
                if level == 0 and is_installed(root):
                    self.libraries |= {root} - set(sys.stdlib_module_names) - {"torch"}
                elif level or _is_found(root):
                    raise CaptureError(
                        f"{path}, line {statement.lineno}: imports {'.' * level}{module}, which is neither installed "
                        "nor a file in the same folder, so a package cannot take it along",
                        "Install it, or put what is needed into a file beside this one.",
                    )
        return name

    def text(self, name: str) -> str:
        """The text of a copy."""
        path = self.sources[name]
        lines = path.read_bytes().splitlines(keepends=True)
        for statement in sorted(_imports(path), key=lambda s: s.lineno, reverse=True):
            new = self._rewritten(statement, path.parent)
            if new is None:
                continue
            first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
            head, tail = lines[first][: statement.col_offset], lines[last][statement.end_col_offset :]
            lines[first : last + 1] = [head + new.encode() + tail]
        return b"".join(lines).decode("utf-8")

    def _rewritten(self, statement: Import, folder: Path) -> str | None:
        names = {path: name for name, path in self.sources.items()}
        parts: list[Import] = []
        changed = False
        if isinstance(statement, ast.ImportFrom) and statement.module:
            beside = _beside(statement.module, statement.level, folder)
            if beside is None:
                return None
            return ast.unparse(ast.ImportFrom(f"user_code.{names[beside]}", statement.names, 0))
        for alias in statement.names:
            level = statement.level if isinstance(statement, ast.ImportFrom) else 0
            beside = _beside(alias.name, level, folder)
            if beside is None:
                parts.append(ast.Import([alias]))
                continue
            changed = True
            if "." in alias.name and alias.asname is None:
                raise CaptureError(
                    f"{folder}: 'import {alias.name}' cannot be written into a package",
                    f"Write 'import {alias.name} as {alias.name.rpartition('.')[2]}'.",
                )
            bound = alias.asname or alias.name
            parts.append(ast.ImportFrom("user_code", [ast.alias(names[beside], bound)], 0))
        return "; ".join(map(ast.unparse, parts)) if changed else None


def _imports(path: Path) -> list[Import]:
    return [n for n in ast.walk(ast.parse(path.read_bytes(), str(path))) if isinstance(n, (ast.Import, ast.ImportFrom))]


def _modules(statement: Import, folder: Path) -> list[tuple[str, int]]:
    """(module, dots before it) of everything that a statement imports."""
    if isinstance(statement, ast.Import):
        return [(alias.name, 0) for alias in statement.names]
    if statement.module:
        return [(statement.module, statement.level)]
    return [(alias.name, statement.level) for alias in statement.names]


def _beside(module: str, level: int, folder: Path) -> Path | None:
    """The file in the same folder that a module is; None if it is none."""
    *above, last = module.split(".")
    if level > 1 or (above and (level or above[-1] != folder.name)) or (not level and is_installed(module)):
        return None
    path = folder / f"{last}.py"
    return path.resolve() if path.is_file() else None


def _is_found(root: str) -> bool:
    """Whether the module is there now, but may not be where the package runs; autopart is for people to install."""
    if root == "autopart" or root in importlib.metadata.packages_distributions():
        return False
    try:
        return importlib.util.find_spec(root) is not None
    except (ImportError, ValueError):
        return False


def is_installed(module: str) -> bool:
    """Whether the module comes with Python or was installed, so that it is there where the package runs."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return True
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return False
    origin = spec.origin if spec is not None else None
    if origin is None:
        return False
    places = [
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    ]
    return any(Path(place).resolve() in Path(origin).resolve().parents for place in places)
