"""The body of one method: its statements, and what its values are called.

A name is used again when the value it stood for is no longer needed by any statement, counting what is written inside
that statement.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from autopart.codegen.forms import ClassKind, Form, Forms, frame_context, frame_mode
from autopart.codegen.frames import Frame
from autopart.codegen.functions import is_collective
from autopart.codegen.hints import Hints
from autopart.codegen.loops import Loop, find_loops
from autopart.codegen.modules import Module
from autopart.codegen.names import attribute, text, unique
from autopart.codegen.opaque import OpaqueCalls
from autopart.codegen.program import SELECT, Op, Switch, Value
from autopart.codegen.spelling import Argument, Symbol, spell
from autopart.codegen.statements import Item, Statement, item_defines, item_uses, split
from autopart.codegen.text import Writer, constant


class Body:
    """Writes one method of a class, from its example."""

    def __init__(self, forms: Forms, kind: ClassKind, call: Frame, hints: Hints, opaque: OpaqueCalls) -> None:
        self.forms, self.kind, self.call, self.hints, self.opaque = forms, kind, call, hints, opaque
        self.form = kind.example
        self.attributes = {position: kind.names[index] for position, index in kind.arguments.items()}
        self.names: dict[Value, str] = {}
        self.bases: dict[Value, str] = {}  # what a value would be called if no other were
        self.inline: dict[Value, ast.expr] = {}
        self.parameters: list[str] = []

    def lines(self) -> list[str]:
        """The statements, indented by nothing."""
        items = find_loops(self.call, self.form, self.forms)
        statements = split(items, self.call, self.hints, self.forms.checkpoints)
        self._name_inputs()
        out = Writer(frame_context(self.call))
        self.last_use = self._liveness(statements)
        self.holder: dict[str, Value] = {name: value for value, name in self.names.items()}
        returned = False
        passed_on = self._passed_on(statements)
        absent: list[ast.stmt] = []
        given_in = "both"
        for index, statement in enumerate(statements):
            final = index == len(statements) - 1
            code, names, comment = self._statement(index, statement, final)
            context = statement.context
            returned = returned or (final and names is None)
            if absent and statement.mode != given_in:
                out.write(absent, _OTHER[given_in], frame_context(self.call), None)
                absent = []
            out.write(code, statement.mode, context, comment)
            if statement.mode != "both":
                given_in = statement.mode
                absent += [_no_value(self.names[v]) for v in statement.defines if v in passed_on and v in self.names]
        if absent:
            out.write(absent, _OTHER[given_in], frame_context(self.call), None)
        if not returned and (self.call.outputs or not self.call.path):
            values = [self._value(v) for v in self.call.outputs]
            value = values[0] if len(values) == 1 and self.call.path else ast.Tuple(values, ast.Load())
            out.write([ast.Return(value)], "both", frame_context(self.call), None)
        return out.finish()

    def _name_inputs(self) -> None:
        for value, name in zip(self.call.inputs, self.hints.parameters(self.call), strict=True):
            self.names[value] = self.bases[value] = name
            self.parameters.append(name)

    def _passed_on(self, statements: list[Statement]) -> set[Value]:
        """Values that are handed to calls, or returned, in both modes, whether their own mode made them or not."""
        found = set(self.call.outputs) if frame_mode(self.call) == "both" else set()
        for statement in statements:
            if statement.mode == "both":
                calls = [i for i in (*statement.inlined, statement.item) if not isinstance(i, Op)]
                found.update(v for call in calls for v in item_uses(call))
        return found

    def _liveness(self, statements: list[Statement]) -> dict[Value, int]:
        last = {}
        for index, statement in enumerate(statements):
            for value in statement.uses:
                last[value] = index
        for value in self.call.outputs:
            last[value] = len(statements)
        return last

    def _assign_name(self, value: Value, index: int, item: Item) -> str:
        base = self._base(value, item)
        self.bases[value] = base
        number, name = 1, base
        while name in self.hints.reserved or (name in self.holder and self.last_use.get(self.holder[name], -1) > index):
            number += 1
            name = f"{base}_{number}"
        self.names[value] = name
        self.holder[name] = value
        return name

    def _base(self, value: Value, item: Item) -> str:
        """What a value is called: after a change of layout, as before it."""
        if isinstance(item, Op) and is_collective(item.target) and (self.call.path or value not in self.hints.fixed):
            (source,) = item.values()
            if source in self.bases:
                return self.bases[source]
        return self.hints.name(value, self.call, item)

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
        variable = loop.variable if loop.variable == "_" else unique(loop.variable, taken | self.hints.reserved)
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


# In which mode a value is missing, by the mode that makes it.
_OTHER = {"training": "evaluation", "evaluation": "training"}


def _no_value(name: str) -> ast.stmt:
    return ast.Assign([_store(name)], ast.Constant(None), lineno=0)


def _store(name: str) -> ast.expr:
    return ast.Name(name, ast.Store())


def _training() -> ast.expr:
    return ast.Attribute(ast.Name("self", ast.Load()), "training", ast.Load())


def _device_anchor() -> ast.expr:
    return ast.parse("torch.empty(0)", mode="eval").body
