"""The text of one class: its constructor, and its methods in the words of `body`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopart.codegen.body import Body, child_of
from autopart.codegen.forms import ClassKind, Form, Forms, Number, encode_constant
from autopart.codegen.hints import Hints
from autopart.codegen.leaves import leaf_requires_grad
from autopart.codegen.names import attribute, is_identifier
from autopart.codegen.opaque import OpaqueCalls
from autopart.codegen.program import Value
from autopart.codegen.text import constant
from autopart.graph import StateEntry


class ClassWriter:
    """Writes classes of one package.

    Args:
        forms: Of all modules.
        hints: Names for values.
        opaque: Writes calls of the user's own code.
        functions: Name -> import statement, of the functions of the runtime that are called.
    """

    def __init__(self, forms: Forms, hints: Hints, opaque: OpaqueCalls, functions: Mapping[str, str]) -> None:
        self.forms, self.hints, self.opaque, self.functions = forms, hints, opaque, functions

    @property
    def imports(self) -> dict[str, str]:
        """Name in the code -> import statement, of what is neither torch nor a class of the package."""
        return {**self.functions, **self.opaque.imports()}

    def write(self, kind: ClassKind, docstring: str, ties: list[tuple[str, str]], fill: bool) -> list[str]:
        """The lines of a class.

        Args:
            ties: (name, other name) pairs of parameters that are one and the same, for the class of a stage.
            fill: Whether the constructor ends by reading the package's constants.
        """
        form = kind.example
        lines = [f"class {kind.name}(nn.Module):"]
        if docstring:
            lines += _indent(_docstring(docstring))
            lines.append("")
        init = self._init(kind, form)
        for name, first in ties:
            owner, attribute_name = self._owner(form, name)
            source, first_name = self._owner(form, first)
            shared = ast.unparse(attribute(source, first_name))
            plain = is_identifier(attribute_name)
            where = ast.unparse(owner)
            init.append(
                f"{where}.{attribute_name} = {shared}" if plain else f"setattr({where}, {attribute_name!a}, {shared})"
            )
        if fill:
            init.append("fill_constants(self)")
        arguments = "".join(f", {name}" for name in kind.names)
        if init or kind.names:
            lines += [f"    def __init__(self{arguments}):", "        super().__init__()"]
            lines += _indent(_indent(init))
            lines.append("")
        for index, call in enumerate(form.methods):
            self.hints.quiet = bool(kind.arguments) or not kind.same_shapes
            body = Body(self.forms, kind, call, self.hints, self.opaque)
            statements = body.lines() or ["pass"]
            name = f"forward_{index}" if index else "forward"
            lines.append(f"    def {name}(self{''.join(', ' + p for p in body.parameters)}):")
            lines += _indent(_indent(statements))
            lines.append("")
        if not form.methods:
            lines.append("    pass" if not (init or kind.names or docstring) else "")
        return lines

    def _owner(self, form: Form, name: str) -> tuple[ast.expr, str]:
        """The module that holds a name of the state, as code, and the name's last part."""
        here: ast.expr = ast.Name("self", ast.Load())
        module = form.module
        *path, last = name.split(".")
        for part in path:
            here = child_of(here, self.forms.of[module], part)
            module = module.children[part]
        return here, last

    def _init(self, kind: ClassKind, form: Form) -> list[str]:
        lines = []
        used = self._numbers_in_code(form)
        for index, name in enumerate(kind.names):
            if any(position in used for position, argument in kind.arguments.items() if argument == index):
                lines.append(f"self.{name} = {name}")
        for name, child in form.module.children.items():
            lines += self._child(kind, form, "self", name, self.forms.of[child], form.offsets.get(name))
        for name, entry in form.module.state.items():
            lines += self._state(kind, "self", name, entry, form.state_offsets[name])
        return lines

    def _numbers_in_code(self, form: Form) -> set[int]:
        """Positions of numbers that methods use: those that must be kept on `self`."""
        found: set[int] = set()
        for op, start in form.op_offsets.items():
            numbers: list[Number] = []
            for value in op.args.values():
                _count(value, numbers)
            found.update(range(start, start + len(numbers)))
        return found

    def _child(self, kind: ClassKind, form: Form, owner: str, name: str, child: Form, offset: int | None) -> list[str]:
        expression, after = self._built(kind, child, offset)
        lines = _assign(owner, name, expression)
        here = ast.unparse(attribute(ast.Name(owner, ast.Load()), name))
        return lines + [line for make in after for line in make(here)]

    def _built(self, kind: ClassKind, child: Form, offset: int | None) -> tuple[str, list[Any]]:
        """The expression that builds a child, and what makes the statements that must follow it."""
        if child.shape == "leaf":
            assert offset is not None and child.leaf is not None
            position = offset + child.leaf_offset
            parts = []
            for name, value in child.leaf.arguments:
                code, position = self._number_code(kind, value, position)
                parts.append(code if name is None else f"{name}={code}")
            expression = f"{child.leaf.constructor}({', '.join(parts)})"
            flag = leaf_requires_grad(child.module.state)
            if flag is False:
                expression += ".requires_grad_(False)"
            frozen = (
                []
                if flag is not None
                else [n for n, e in child.module.state.items() if e.kind == "parameter" and not e.requires_grad]
            )
            return expression, [lambda here, n=n: [f"{here}.{n}.requires_grad_(False)"] for n in frozen]
        if child.shape == "opaque":
            return f"build_opaque({child.module.path!a})", []
        if child.shape == "class":
            assert child.kind is not None
            arguments = []
            for column in child.kind.columns:
                assert offset is not None
                code, _ = self._number_code(kind, child.vector[column].value, offset + column)
                arguments.append(code)
            return f"{child.kind.name}({', '.join(arguments)})", []
        if child.shape == "namespace":
            return "nn.Module()", [lambda here: self._inside(kind, child, offset, here)]
        children: list[tuple[str, str]] = []
        after: list[Any] = []
        for name, module in child.module.children.items():
            inner = self.forms.of[module]
            place = None if name not in child.offsets or offset is None else offset + child.offsets[name]
            expression, more = self._built(kind, inner, place)
            children.append((name, expression))
            dotted = f"[{name}]" if child.shape in ("list", "sequential") else f"[{name!a}]"
            after += [lambda here, make=make, dotted=dotted: make(here + dotted) for make in more]
        return _container(child.shape, children), after

    def _inside(self, kind: ClassKind, child: Form, offset: int | None, here: str) -> list[str]:
        lines = []
        for name, module in child.module.children.items():
            place = None if name not in child.offsets or offset is None else offset + child.offsets[name]
            lines += self._child(kind, child, here, name, self.forms.of[module], place)
        for name, entry in child.module.state.items():
            start = (offset or 0) + child.state_offsets[name]
            lines += self._state(kind, here, name, entry, start)
        return lines

    def _state(self, kind: ClassKind, owner: str, name: str, entry: StateEntry, position: int) -> list[str]:
        sizes = []
        for size in entry.tensor.shape:
            code, position = self._number_code(kind, size, position)
            sizes.append(code)
        dtype = "" if entry.tensor.dtype == torch.float32 else f", dtype={entry.tensor.dtype}"
        empty = f"torch.empty({', '.join(sizes) or '()'}{dtype})"
        if entry.kind == "parameter":
            flag = "" if entry.requires_grad else ", requires_grad=False"
            value = f"nn.Parameter({empty}{flag})"
            return (
                [f"{owner}.{name} = {value}"]
                if is_identifier(name)
                else [f"{owner}.register_parameter({name!a}, {value})"]
            )
        zeros = empty.replace("torch.empty", "torch.zeros", 1)
        persistent = "" if entry.persistent and entry.kind != "constant" else ", persistent=False"
        return [f"{owner}.register_buffer({name!a}, {zeros}{persistent})"]

    def _number_code(self, kind: ClassKind, value: Any, position: int) -> tuple[str, int]:
        if type(value) in (int, float):
            if position in kind.arguments:
                return kind.names[kind.arguments[position]], position + 1
            return ast.unparse(constant(value)), position + 1
        if isinstance(value, tuple | list):
            parts = []
            for item in value:
                code, position = self._number_code(kind, item, position)
                parts.append(code)
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})", position
        return ast.unparse(constant(value)), position


def _count(value: Any, numbers: list[Number]) -> None:
    if isinstance(value, Value):
        return
    if isinstance(value, list):
        for item in value:
            _count(item, numbers)
    else:
        encode_constant(value, "", numbers)


def _container(shape: str, parts: list[tuple[str, str]]) -> str:
    names, expressions = [n for n, _ in parts], [e for _, e in parts]
    alike = len(set(expressions)) == 1 and len(parts) > 1
    numbers = [int(n) if n.isdecimal() else -1 for n in names]
    run = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] >= 0
    if shape == "list" or (shape == "sequential" and run and numbers[0] == 0):
        if shape == "sequential" and alike and len(parts) > 2:
            return f"nn.Sequential(*[{expressions[0]} for _ in range({len(parts)})])"
        if shape == "sequential":
            return f"nn.Sequential({', '.join(expressions)})"
        if alike:
            return f"nn.ModuleList([{expressions[0]} for _ in range({len(parts)})])"
        return f"nn.ModuleList([{', '.join(expressions)}])"
    pairs = ", ".join(f"{n!a}: {e}" for n, e in parts)
    if shape == "dict" and alike and run:
        pairs = f"str(i): {expressions[0]} for i in range({numbers[0]}, {numbers[-1] + 1})"
    if shape == "dict":
        return f"nn.ModuleDict({{{pairs}}})"
    return f"nn.Sequential(OrderedDict({{{pairs}}}))"


def _assign(owner: str, name: str, expression: str) -> list[str]:
    if is_identifier(name):
        return [f"{owner}.{name} = {expression}"]
    if hasattr(nn.Module, name):
        return [f"setattr({owner}, {name!a}, {expression})"]
    return [f"{owner}.add_module({name!a}, {expression})"]


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line if line else "" for line in lines]


def _docstring(words: str) -> list[str]:
    """A docstring that nothing in `words` can end."""
    safe = words.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    lines = safe.split("\n")
    if len(lines) == 1:
        return [f'"""{lines[0]}"""']
    return [f'"""{lines[0]}', *lines[1:], '"""']
