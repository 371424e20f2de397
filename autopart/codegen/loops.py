"""Loops: a run of calls of equal blocks, each fed by the one before, is written once, in a `for`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from autopart.codegen.forms import Form, Forms, frame_context, frame_mode
from autopart.codegen.frames import Frame
from autopart.codegen.modules import Module
from autopart.codegen.program import Op, Value


@dataclass(eq=False)
class Loop:
    """A run of calls.

    Attributes:
        container: Path of the modules' parent, relative to the module whose code this is.
        carried: Position of an input -> position of the output of the call before that it comes from.
        children: Names of the called modules in the container; one name where a module is called again and again.
    """

    frames: list[Frame]
    container: list[str]
    carried: dict[int, int]
    children: list[str]
    available: list[str]
    shape: str

    @property
    def inputs(self) -> list[Value]:
        return self.frames[0].inputs

    @property
    def outputs(self) -> list[Value]:
        return self.frames[-1].outputs

    @property
    def variable(self) -> str:
        name = self.container[-1] if self.container else "layer"
        if len(self.children) == 1:
            return "_"
        if self._by_number:
            return "i"
        return name[:-1] if name.endswith("s") and len(name) > 2 and name.isidentifier() else "layer"

    def target(self, variable: str) -> ast.expr:
        return ast.Name(variable, ast.Store())

    def iterable(self, container: ast.expr) -> ast.expr:
        """What the loop runs over."""
        if len(self.children) == 1:
            return _call("range", ast.Constant(len(self.frames)))
        if self._by_number:
            return _call("range", ast.Constant(int(self.children[0])), ast.Constant(int(self.children[-1]) + 1))
        if self.shape == "dict":
            return ast.Call(ast.Attribute(container, "values", ast.Load()), [], [])
        if self.children == self.available:
            return container
        start, end = self.available.index(self.children[0]), self.available.index(self.children[-1]) + 1
        lower = ast.Constant(start) if start else None
        upper = ast.Constant(end) if end < len(self.available) else None
        return ast.Subscript(container, ast.Slice(lower, upper, None), ast.Load())

    def element(self, variable: str, container: ast.expr) -> ast.expr:
        """The module that one turn calls."""
        if len(self.children) == 1:
            return _element(container, self.shape, self.children[0])
        if self._by_number:
            return ast.Subscript(container, _call("str", ast.Name(variable, ast.Load())), ast.Load())
        return ast.Name(variable, ast.Load())

    @property
    def _by_number(self) -> bool:
        return self.shape == "dict" and len(self.children) > 1 and self.children != self.available


def _call(function: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _element(container: ast.expr, shape: str, name: str) -> ast.expr:
    if shape == "list":
        return ast.Subscript(container, ast.Constant(int(name)), ast.Load())
    if shape == "dict":
        return ast.Subscript(container, ast.Name(ascii(name), ast.Load()), ast.Load())
    return ast.Attribute(container, name, ast.Load())


def find_loops(call: Frame, form: Form, forms: Forms) -> list[Any]:
    """The body of `call` with every run of two or more calls that can be a loop replaced by it."""
    readers: dict[Value, set[int]] = {}
    for i, item in enumerate(call.body):
        for value in item.values() if isinstance(item, Op) else item.inputs:
            readers.setdefault(value, set()).add(i)
    for value in call.outputs:
        readers.setdefault(value, set()).add(-1)
    found: list[Any] = []
    at = 0
    while at < len(call.body):
        run = _run(call, at, form, forms, readers)
        if run is None:
            found.append(call.body[at])
            at += 1
        else:
            found.append(run)
            at += len(run.frames)
    return found


def _run(call: Frame, at: int, form: Form, forms: Forms, readers: dict[Value, set[int]]) -> Loop | None:
    first = call.body[at]
    if not isinstance(first, Frame) or frame_mode(first) != "both" or not first.outputs:
        return None
    parents, _ = _locate(form.module, first)
    container = parents[-1]
    shape = forms.of[container].shape
    again = at + 1 < len(call.body) and isinstance(call.body[at + 1], Frame) and call.body[at + 1].path == first.path  # type: ignore[union-attr]
    if not again and shape not in ("list", "dict"):
        return None
    frames, carried = [first], None
    for i in range(at + 1, len(call.body)):
        item = call.body[i]
        if not isinstance(item, Frame) or not _alike(forms, form, frames[-1], item, again):
            break
        links = _links(frames[-1], item, first)
        if links is None or (carried is not None and links != carried):
            break
        if sorted(links.values()) != list(range(len(first.outputs))) or any(
            readers[v] != {i} for v in frames[-1].outputs
        ):
            break
        carried = links
        frames.append(item)
    if carried is None or len(frames) < 2:
        return None
    names = list(dict.fromkeys(f.path.rsplit(".", 1)[-1] for f in frames))
    available = list(container.children)
    start = available.index(names[0])
    if available[start : start + len(names)] != names or (not again and len(names) != len(frames)):
        return None
    if shape == "dict" and len(names) > 1 and names != available:
        numbers = [int(n) if n.isdecimal() else -1 for n in names]
        if numbers != list(range(numbers[0], numbers[0] + len(names))) or numbers[0] < 0:
            return None
    relative = container.path[len(form.module.path) :].lstrip(".") if form.module.path else container.path
    return Loop(frames, relative.split(".") if relative else [], carried, names, available, shape)


def _locate(module: Module, frame: Frame) -> tuple[list[Module], Module]:
    relative = frame.path[len(module.path) :].lstrip(".") if module.path else frame.path
    parents = []
    for part in relative.split("."):
        parents.append(module)
        module = module.children[part]
    return parents, module


def _alike(forms: Forms, form: Form, one: Frame, other: Frame, again: bool) -> bool:
    if again != (one.path == other.path) or one.path.rpartition(".")[0] != other.path.rpartition(".")[0]:
        return False
    first, second = (forms.of[_locate(form.module, f)[1]] for f in (one, other))
    if first.kind is not second.kind or (first.kind is None and first.token != second.token):
        return False
    if first.method_of.get(one, 0) != second.method_of.get(other, 0):
        return False
    checkpointed = (one in forms.checkpoints) == (other in forms.checkpoints)
    return checkpointed and frame_context(one) == frame_context(other) and frame_mode(other) == "both"


def _links(before: Frame, after: Frame, first: Frame) -> dict[int, int] | None:
    """Which inputs of `after` are outputs of `before`; None unless all others are those of the first call."""
    if len(before.inputs) != len(after.inputs) or len(before.outputs) != len(after.outputs):
        return None
    links = {}
    for position, value in enumerate(after.inputs):
        if value in before.outputs:
            links[position] = before.outputs.index(value)
        elif value is not first.inputs[position]:
            return None
    return links
