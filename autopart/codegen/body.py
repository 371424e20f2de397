"""The statements of one method: which operations stand alone, which are written inside others, and what values are called.

An operation is written inside the one that reads it when that is its only reader, both come from one line of the user's
source, and nothing in between changes memory or draws random numbers. A name is used again when the value it stood for is
no longer needed by any statement, counting what is written inside that statement.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import torch

from autopart.codegen.forms import ClassKind, Form, Forms, frame_context, frame_mode
from autopart.codegen.frames import Frame
from autopart.codegen.hints import Hints
from autopart.codegen.loops import Loop, find_loops
from autopart.codegen.modules import Module
from autopart.codegen.names import attribute, text
from autopart.codegen.program import SELECT, Context, Op, Switch, Value, is_mutating, is_pure
from autopart.codegen.spelling import Argument, Symbol, spell

WIDTH = 120
# Room for indentation and "  # ".
MARGIN = 20
MAX_INLINED = 6
# How far apart an operation and the one it is written inside may stand.
MAX_SPAN = 200
# Operators whose spelling does not have the arguments in the order of the schema.
REORDERED = ("aten.rsub", "aten.embedding", "aten.batch_norm")

Item = Op | Frame | Loop


@dataclass
class Statement:
    """One statement: the item it ends with, and the items written inside it."""

    item: Item
    uses: list[Value]
    defines: list[Value]
    mode: str
    context: Context
    inlined: set[Op | Frame] = field(default_factory=set)


def item_uses(item: Item) -> list[Value]:
    if isinstance(item, Op):
        return item.values()
    return item.inputs


def item_defines(item: Item) -> list[Value]:
    return item.results if isinstance(item, Op) else item.outputs


def is_pure_item(item: Item) -> bool:
    return isinstance(item, Op) and is_pure(item)


def _keeps_order(items: list[Item]) -> bool:
    """Whether one expression, evaluated from left to right, runs the items in the order they stand in."""
    maker = {v: item for item in items for v in item_defines(item)}
    order: list[Item] = []

    def visit(item: Item) -> None:
        for value in item_uses(item):
            if value in maker and maker[value] not in order:
                visit(maker[value])
        order.append(item)

    visit(items[-1])
    reordered = any(isinstance(i, Op) and str(i.target).startswith(REORDERED) for i in items)
    return order == items and not reordered


def item_mode(item: Item) -> str:
    return item.mode if isinstance(item, Op) else frame_mode(item) if isinstance(item, Frame) else "both"


def item_context(item: Item) -> Context | None:
    """The context that the item must run in; None where any will do."""
    if isinstance(item, Op):
        return None if item.target == SELECT else item.context
    return frame_context(item.frames[0] if isinstance(item, Loop) else item)


class Body:
    """Writes one method of a class, from its example."""

    def __init__(self, forms: Forms, kind: ClassKind, call: Frame, hints: Hints, opaque: Any) -> None:
        self.forms, self.kind, self.call, self.hints, self.opaque = forms, kind, call, hints, opaque
        self.form = kind.example
        self.attributes = {position: kind.names[index] for position, index in kind.arguments.items()}
        self.names: dict[Value, str] = {}
        self.inline: dict[Value, ast.expr] = {}
        self.parameters: list[str] = []

    def lines(self) -> list[str]:
        """The statements, indented by nothing."""
        items = find_loops(self.call, self.form, self.forms)
        statements = self._statements(items)
        self._name_inputs()
        out = _Writer(frame_context(self.call))
        self.last_use = self._liveness(statements)
        self.holder: dict[str, Value] = {name: value for value, name in self.names.items()}
        returned = False
        for index, statement in enumerate(statements):
            final = index == len(statements) - 1
            code, names, comment = self._statement(index, statement, final)
            context = statement.context
            returned = returned or (final and names is None)
            out.write(code, statement.mode, context, comment)
        if not returned and self.call.outputs:
            values = [self._value(v) for v in self.call.outputs]
            value = values[0] if len(values) == 1 and self.call.path else ast.Tuple(values, ast.Load())
            out.write([ast.Return(value)], "both", frame_context(self.call), None)
        return out.finish()

    def _statements(self, items: list[Item]) -> list[Statement]:
        readers: dict[Value, list[int]] = {}
        for i, item in enumerate(items):
            for value in item_uses(item):
                readers.setdefault(value, []).append(i)
        outputs = set(self.call.outputs)
        impure = [0]
        for item in items:
            impure.append(impure[-1] + (not is_pure_item(item)))
        final = list(range(len(items)))
        for i in range(len(items) - 1, -1, -1):
            item = items[i]
            results = [v for v in item_defines(item) if v in readers or v in outputs]
            if len(results) != 1 or results[0] in outputs or len(readers[results[0]]) != 1:
                continue
            reader = readers[results[0]][0]
            target = final[reader]
            if target - i > MAX_SPAN:
                continue
            group = [j for j in range(i + 1, target + 1) if final[j] == target]
            if len(group) > MAX_INLINED or not self._can_inline(item, items[reader], items[target]):
                continue
            crosses = impure[target] - impure[i + 1] > 0 or not is_pure_item(item)
            if not crosses or (
                group == list(range(i + 1, target + 1)) and _keeps_order([items[j] for j in [i, *group]])
            ):
                final[i] = target
        statements = []
        for i, item in enumerate(items):
            if final[i] != i:
                continue
            inside = [items[j] for j in range(max(0, i - MAX_SPAN), i) if final[j] == i]
            hidden = {v for other in inside for v in item_defines(other)}
            uses = [v for other in [*inside, item] for v in item_uses(other) if v not in hidden]
            context = next((c for other in [item, *inside] if (c := item_context(other)) is not None), None)
            if context is None:
                context = frame_context(self.call)
            statements.append(Statement(item, uses, item_defines(item), item_mode(item), context, set(inside)))  # type: ignore[arg-type]
        return statements

    def _can_inline(self, item: Item, reader: Item, target: Item) -> bool:
        """Whether one line of source, one mode and one context hold both; order is checked by the caller."""
        if any(isinstance(i, Loop) for i in (item, reader, target)):
            return False
        if isinstance(item, Op) and (is_mutating(item.target) or isinstance(item.target, str)):
            return False
        mode, reader_mode = item_mode(item), item_mode(reader)
        if isinstance(reader, Op) and reader.target == SELECT:
            branch = next(v for v in item_defines(item) if v in reader.values())
            if mode != ("training" if reader.args["training"] is branch else "evaluation"):
                return False
        elif mode != reader_mode:
            return False
        context, reader_context = item_context(item), item_context(reader)
        if reader_context is not None and context != reader_context:
            return False
        if context is not None and reader_context is None and context != frame_context(self.call):
            return False
        place = self.hints.place(item, self.call)
        return place is not None and place == self.hints.place(reader, self.call)

    def _name_inputs(self) -> None:
        for value, name in zip(self.call.inputs, self.hints.parameters(self.call), strict=True):
            self.names[value] = name
            self.parameters.append(name)

    def _liveness(self, statements: list[Statement]) -> dict[Value, int]:
        last = {}
        for index, statement in enumerate(statements):
            for value in statement.uses:
                last[value] = index
        for value in self.call.outputs:
            last[value] = len(statements)
        return last

    def _assign_name(self, value: Value, index: int, item: Item) -> str:
        base = self.hints.name(value, self.call, item)
        number, name = 1, base
        while name in self.hints.reserved or (name in self.holder and self.last_use.get(self.holder[name], -1) > index):
            number += 1
            name = f"{base}_{number}"
        self.names[value] = name
        self.holder[name] = value
        return name

    def _statement(
        self, index: int, statement: Statement, final: bool
    ) -> tuple[list[ast.stmt], list[str] | None, str | None]:
        for inner in sorted(statement.inlined, key=self._order):
            expression = self._expression(inner)
            for value in item_defines(inner):
                if value in self.last_use or value in statement.uses:
                    self.inline[value] = self._result(inner, value, expression)
            for value in item_defines(inner):
                self.inline.setdefault(value, self._result(inner, value, expression))
        item = statement.item
        if isinstance(item, Loop):
            return self._loop(index, item), [], self.hints.comment(item.outputs)
        expression = self._expression(item)
        wanted = [v for v in statement.defines if v in self.last_use]
        comment = self.hints.comment(wanted)
        if final and self.call.path and wanted == self.call.outputs and len(wanted) == 1 and statement.mode == "both":
            plain = statement.context == frame_context(self.call)
            if plain:
                return [ast.Return(self._result(item, wanted[0], expression))], None, comment
        if not wanted:
            return [ast.Expr(expression)], [], None
        if isinstance(item, Op) and item.multiple:
            if len(wanted) == 1:
                value = wanted[0]
                target: ast.expr = _store(self._assign_name(value, index, item))
                return [ast.Assign([target], self._result(item, value, expression), lineno=0)], [], comment
            names = [self._assign_name(v, index, item) if v in self.last_use else "_" for v in item.results]
        else:
            names = [self._assign_name(v, index, item) if v in self.last_use else "_" for v in item_defines(item)]
        targets = [_store(n) for n in names]
        target = (
            targets[0]
            if len(targets) == 1 and not (isinstance(item, Op) and item.multiple)
            else ast.Tuple(targets, ast.Store())
        )
        return [ast.Assign([target], expression, lineno=0)], names, comment

    def _order(self, item: Op | Frame) -> int:
        if not hasattr(self, "_positions"):
            self._positions = {id(x): i for i, x in enumerate(self.call.body)}
        return self._positions[id(item)]

    def _result(self, item: Op | Frame, value: Value, expression: ast.expr) -> ast.expr:
        if isinstance(item, Op) and item.multiple:
            if isinstance(item.target, str) and self.opaque.is_single(item.target):
                return expression
            return ast.Subscript(expression, ast.Constant(value.index), ast.Load())
        if isinstance(item, Frame) and len(item.outputs) > 1:
            return ast.Subscript(expression, ast.Constant(item.outputs.index(value)), ast.Load())
        return expression

    def _expression(self, item: Op | Frame) -> ast.expr:
        if isinstance(item, Frame):
            return self._call(item, self._module(item))
        if item.target == SELECT:
            training, evaluation = (self._value(item.args[k]) for k in ("training", "evaluation"))
            return ast.IfExp(_training(), training, evaluation)
        if isinstance(item.target, str):
            module = self._at(item.within) if item.within is not None else None
            return self.opaque.expression(item, [self._value(v) for v in item.values()], module)
        position = self.form.op_offsets[item]

        def write(name: str, argument: Any) -> Argument:
            nonlocal position
            found, position = self._argument(argument, position)
            return found

        return spell(item.target, item.args, write)

    def _argument(self, argument: Any, position: int) -> tuple[Argument, int]:
        if isinstance(argument, Value):
            return Argument(Symbol(), self._value(argument)), position
        if isinstance(argument, list):
            parts = []
            for item in argument:
                part, position = self._argument(item, position)
                parts.append(part)
            value: Any = Symbol() if any(isinstance(p.value, Symbol) for p in parts) else [p.value for p in parts]
            return Argument(value, ast.List([p.code for p in parts], ast.Load())), position
        if isinstance(argument, Switch):
            if argument == Switch(True, False):
                return Argument(Symbol(), _training()), position
            first, position = self._argument(argument.training, position)
            second, position = self._argument(argument.evaluation, position)
            return Argument(Symbol(), ast.IfExp(_training(), first.code, second.code)), position
        if type(argument) in (int, float):
            if position in self.attributes:
                code: ast.expr = ast.Attribute(ast.Name("self", ast.Load()), self.attributes[position], ast.Load())
                return Argument(Symbol(), code), position + 1
            return Argument(argument, constant(argument)), position + 1
        if isinstance(argument, torch.device):
            return Argument(Symbol(), self._device()), position
        return Argument(argument, constant(argument)), position

    def _device(self) -> ast.expr:
        """The device of something that is at hand: where the stage runs."""
        if self.parameters:
            source: ast.expr = ast.Name(self.parameters[0], ast.Load())
        elif self.call.state:
            source = self._attributes(next(iter(self.call.state.values())))
        else:
            source = ast.Name(next(iter(self.names.values())), ast.Load()) if self.names else _device_anchor()
        return ast.Attribute(source, "device", ast.Load())

    def _value(self, value: Value) -> ast.expr:
        if value in self.inline:
            return self.inline[value]
        if value in self.names:
            return ast.Name(self.names[value], ast.Load())
        return self._attributes(self.call.state[value.name])

    def _attributes(self, path: str) -> ast.expr:
        """`self.` followed by a path, through lists and dicts of modules by index."""
        here: ast.expr = ast.Name("self", ast.Load())
        module = self.form.module
        parts = path.split(".")
        for part in parts[:-1]:
            here = self._child(here, module, part)
            module = module.children[part]
        return attribute(here, parts[-1])

    def _child(self, owner: ast.expr, module: Module, name: str) -> ast.expr:
        return child_of(owner, self.forms.of[module], name)

    def _module(self, frame: Frame) -> ast.expr:
        return self._at(frame.path)

    def _at(self, path: str) -> ast.expr:
        """The module at a path of the original model, from `self`."""
        here: ast.expr = ast.Name("self", ast.Load())
        module = self.form.module
        relative = path[len(module.path) :].lstrip(".") if module.path else path
        for part in relative.split("."):
            here = self._child(here, module, part)
            module = module.children[part]
        return here

    def _call(self, frame: Frame, module: ast.expr, arguments: list[ast.expr] | None = None) -> ast.expr:
        target = self.form.module
        relative = frame.path[len(target.path) :].lstrip(".") if target.path else frame.path
        for part in relative.split("."):
            target = target.children[part]
        method = self.forms.of[target].method_of.get(frame, 0)
        function = ast.Attribute(module, f"forward_{method}", ast.Load()) if method else module
        arguments = arguments if arguments is not None else [self._value(v) for v in frame.inputs]
        if frame in self.forms.checkpoints:
            keyword = ast.keyword("use_reentrant", ast.Constant(False))
            return ast.Call(ast.Name("checkpoint", ast.Load()), [function, *arguments], [keyword])
        return ast.Call(function, arguments, [])

    def _loop(self, index: int, loop: Loop) -> list[ast.stmt]:
        before: list[ast.stmt] = []
        first = loop.frames[0]
        variables: dict[Value, str] = {}
        for position, output in loop.carried.items():
            start, end = first.inputs[position], loop.outputs[output]
            dead = start in self.names and self.last_use.get(start, -1) <= index and first.inputs.count(start) == 1
            if dead:
                name = self.names[start]
                self.names[end] = name
                self.holder[name] = end
            else:
                value = self._value(start)
                name = self._assign_name(end, index - 1, loop)
                before.append(ast.Assign([_store(name)], value, lineno=0))
            variables[end] = name
        names = [variables[v] for v in loop.outputs]
        arguments: list[ast.expr] = [
            ast.Name(names[loop.carried[p]], ast.Load()) if p in loop.carried else self._value(v)
            for p, v in enumerate(first.inputs)
        ]
        container: ast.expr = ast.Name("self", ast.Load())
        module = self.form.module
        for part in loop.container:
            container = self._child(container, module, part)
            module = module.children[part]
        taken = set(self.holder) | set(names)
        variable = next(n for n in (loop.variable, f"{loop.variable}_", "one_of_them") if n not in taken)
        call = self._call(first, loop.element(variable, container), arguments)
        targets = [_store(n) for n in names]
        target = targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())
        body: list[ast.stmt] = [ast.Assign([target], call, lineno=0)]
        return [*before, ast.For(loop.target(variable), loop.iterable(container), body, [], lineno=0)]


def child_of(owner: ast.expr, form: Form, name: str) -> ast.expr:
    """How code reaches a child of a module that was built in the way `form` says."""
    children = list(form.module.children)
    if form.shape in ("list", "sequential") and children == [str(i) for i in range(len(children))]:
        return ast.Subscript(owner, ast.Constant(int(name)), ast.Load())
    if form.shape == "dict":
        return ast.Subscript(owner, text(name), ast.Load())
    return attribute(owner, name)


class _Writer:
    """Collects statements, with `if self.training:` and `with` blocks round those that need them."""

    def __init__(self, ambient: Context) -> None:
        self.ambient = ambient
        self.blocks: list[tuple[str, Context, list[str]]] = []

    def write(self, code: list[ast.stmt], mode: str, context: Context, comment: str | None) -> None:
        lines = [
            line for statement in code for line in _with_comment(statement, comment if statement is code[-1] else None)
        ]
        if self.blocks and self.blocks[-1][:2] == (mode, context):
            self.blocks[-1][2].extend(lines)
        else:
            self.blocks.append((mode, context, lines))

    def finish(self) -> list[str]:
        out: list[str] = []
        previous = ("both", self.ambient)
        for mode, context, lines in self.blocks:
            head, indent = self._contexts(context)
            if head:
                lines = [head] + [indent + line for line in lines]
            if mode == "training":
                lines = ["if self.training:"] + ["    " + line for line in lines]
            elif mode == "evaluation":
                opener = (
                    "else:"
                    if previous[0] == "training" and previous[1] == context == self.ambient
                    else "if not self.training:"
                )
                lines = [opener] + ["    " + line for line in lines]
            out += lines
            previous = (mode, context)
        return out

    def _contexts(self, context: Context) -> tuple[str, str]:
        if context == self.ambient:
            return "", ""
        grad, autocast = context
        managers = [] if grad or not self.ambient[0] else ["torch.no_grad()"]
        if autocast != self.ambient[1]:
            managers += [f"torch.autocast({device!a}, dtype={dtype})" for device, dtype in autocast]
        if not managers:
            return "", ""
        return f"with {', '.join(managers)}:", "    "


def _with_comment(statement: ast.stmt, comment: str | None) -> list[str]:
    lines = ast.unparse(ast.fix_missing_locations(statement)).split("\n")
    if comment is None:
        return lines
    if isinstance(statement, ast.For):
        *head, last = lines
        return [*head, *(f"    {line}" for line in _commented([last.strip()], comment))]
    return _commented(lines, comment)


def _commented(lines: list[str], comment: str) -> list[str]:
    """The comment at the end of a short line, else above it."""
    if len(lines) == 1 and len(lines[0]) + len(comment) + MARGIN <= WIDTH:
        return [f"{lines[0]}  # {comment}"]
    return [f"# {comment}", *lines]


def constant(value: Any) -> ast.expr:
    """How a constant of a captured graph is written."""
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(str(value))], [])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if value == torch.finfo(dtype).min:
                return ast.parse(f"torch.finfo({dtype}).min", mode="eval").body
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    if isinstance(value, str):
        return text(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return ast.parse(str(value), mode="eval").body
    if isinstance(value, tuple | list):
        parts = [constant(v) for v in value]
        return ast.Tuple(parts, ast.Load()) if isinstance(value, tuple) else ast.List(parts, ast.Load())
    if value is None or isinstance(value, bool | int | float | complex):
        return ast.Constant(value)
    raise TypeError(f"cannot write a {type(value).__name__} as code")


def _store(name: str) -> ast.expr:
    return ast.Name(name, ast.Store())


def _training() -> ast.expr:
    return ast.Attribute(ast.Name("self", ast.Load()), "training", ast.Load())


def _device_anchor() -> ast.expr:
    return ast.parse("torch.empty(0)", mode="eval").body
