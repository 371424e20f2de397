"""Canonical forms: what a module is and does, without its numbers, so that equal kinds of block become one class.

The numbers of a module are its vector, in a fixed order: shapes of its own state, then the vectors of its children,
then the numbers in its code. Modules of equal form differ at most in their vectors; those entries become arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopart.codegen.frames import Frame, passes_on
from autopart.codegen.leaves import Leaf, leaf_requires_grad, match_leaf
from autopart.codegen.modules import Module
from autopart.codegen.names import RESERVED, identifier, unique
from autopart.codegen.program import SELECT, Context, Op, Switch, Value
from autopart.graph import StateEntry

DEFAULT_CONTEXT: Context = (True, ())
MAX_ARGUMENTS = 8


@dataclass(frozen=True)
class Number:
    """One entry of a vector: its value and what to call it as an argument."""

    value: int | float
    hint: str


@dataclass(eq=False)
class Form:
    """The form of one module.

    Attributes:
        token: Nested tuples of strings; equal tokens mean equal code up to numbers.
        vector: The numbers.
        shape: How it is built: "leaf", "opaque", "sequential", "list", "dict", "namespace" or "class".
        offsets: Child name -> where its vector starts in this one; only for children whose numbers are arguments.
        methods: The distinct calls of the module, as its class's methods.
        method_of: Call -> index into `methods`.
        op_offsets: Operation of a method -> where its numbers start in the vector.
        state_offsets: Own state -> where its shape starts.
    """

    module: Module
    token: Any = None
    vector: list[Number] = field(default_factory=list)
    shape: str = "class"
    leaf: Leaf | None = None
    leaf_offset: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    methods: list[Frame] = field(default_factory=list)
    method_of: dict[Frame, int] = field(default_factory=dict)
    op_offsets: dict[Op, int] = field(default_factory=dict)
    state_offsets: dict[str, int] = field(default_factory=dict)
    kind: ClassKind | None = None

    @property
    def shapes(self) -> str:
        """The shapes of everything its calls compute."""
        ops = (op for call in self.module.calls for op in call.operations())
        return repr(sorted({tuple(v.tensor.shape) for op in ops for v in op.results if op.target != SELECT}))


@dataclass(eq=False)
class ClassKind:
    """One class of the package: the modules that share it.

    Attributes:
        arguments: Position in the vector -> index of the constructor argument that holds it.
        columns: For each constructor argument, the first position that it stands for.
        names: Of the constructor arguments.
    """

    forms: list[Form]
    arguments: dict[int, int]
    columns: list[int]
    names: list[str]
    name: str = ""

    @property
    def example(self) -> Form:
        return self.forms[0]

    @property
    def same_shapes(self) -> bool:
        """Whether every module of the class sees tensors of the same shapes."""
        return len({f.shapes for f in self.forms}) == 1

    @property
    def stages(self) -> set[int]:
        return {f.module.stage for f in self.forms}


def frame_context(frame: Frame) -> Context:
    """The context that all operations of a call share, in which it is then called; else the default."""
    if frame.path == "":
        return DEFAULT_CONTEXT
    contexts = {op.context for op in frame.operations() if op.target != SELECT}
    return contexts.pop() if len(contexts) == 1 else DEFAULT_CONTEXT


def frame_mode(frame: Frame) -> str:
    """The mode that all operations of a call share, or "both"."""
    modes = {op.mode for op in frame.operations()}
    return modes.pop() if len(modes) == 1 else "both"


class Forms:
    """The forms of all modules of a package, inner ones first, and the classes that they share."""

    def __init__(self, roots: list[Module], checkpoints: set[Frame]) -> None:
        self.of: dict[Module, Form] = {}
        self.kinds: list[ClassKind] = []
        self.checkpoints = checkpoints
        modules = [m for root in roots for m in root.walk()]
        height = {m: 0 for m in modules}
        for m in modules:  # children come before their parents
            height[m] = 1 + max((height[c] for c in m.children.values()), default=-1)
        for level in range(max(height.values(), default=0) + 1):
            same = [self._form(m) for m in modules if height[m] == level]
            self._share([f for f in same if f.shape == "class"])

    def _form(self, module: Module) -> Form:
        form = self.of[module] = Form(module)
        if module.opaque:
            form.shape, form.token = "opaque", ("opaque", module.path)
            return form
        leaf = match_leaf(module) if module.path else None
        if leaf is not None:
            _encode_leaf(form, leaf)
            return form
        children = tuple(self._child(form, name, child) for name, child in module.children.items())
        own = tuple(_encode_state(form, name, entry) for name, entry in module.state.items())
        if not module.calls and module.path:
            form.shape = _container(module)
            form.token = (form.shape, own, children)
            return form
        if _is_chain(module, self.checkpoints) and not own:
            form.shape = "sequential"
            form.token = ("sequential", children)
            return form
        known: dict[Any, int] = {}
        for call in module.calls:
            body = _Body(self, form, call, scratch=True)
            index = known.setdefault((body.token, repr([n.value for n in body.numbers])), len(form.methods))
            form.method_of[call] = index
            if index == len(form.methods):
                form.methods.append(call)
        bodies = tuple(_Body(self, form, call).token for call in form.methods)
        form.token = ("class", module.kind if module.path else f"stage {module.stage}", own, children, bodies)
        return form

    def _child(self, form: Form, name: str, child: Module) -> Any:
        inner = self.of[child]
        if inner.kind is not None and inner.kind.arguments == {}:
            return (name, id(inner.kind))
        form.offsets[name] = len(form.vector)
        form.vector += inner.vector
        return (name, id(inner.kind) if inner.kind is not None else inner.token)

    def _share(self, forms: list[Form]) -> None:
        groups: dict[Any, list[Form]] = {}
        for form in forms:
            groups.setdefault(form.token, []).append(form)
        for group in groups.values():
            kind = _class_kind(group)
            if len(kind.columns) <= MAX_ARGUMENTS:
                self._add(kind)
                continue
            exact: dict[Any, list[Form]] = {}
            for form in group:
                exact.setdefault(tuple(repr(n.value) for n in form.vector), []).append(form)
            for same in exact.values():
                self._add(_class_kind(same))

    def _add(self, kind: ClassKind) -> None:
        self.kinds.append(kind)
        for form in kind.forms:
            form.kind = kind


def _class_kind(forms: list[Form]) -> ClassKind:
    """Positions that differ become arguments; positions that always agree with one another share one."""
    groups: dict[tuple[str, ...], int] = {}
    arguments: dict[int, int] = {}
    columns: list[int] = []
    for position, column in enumerate(zip(*(f.vector for f in forms), strict=True)):
        values = tuple(repr(n.value) for n in column)
        if len(set(values)) > 1:
            if values not in groups:
                groups[values] = len(columns)
                columns.append(position)
            arguments[position] = groups[values]
    taken = set(dir(nn.Module())) | set(forms[0].module.children) | set(forms[0].module.state) | RESERVED
    names: list[str] = []
    for position in columns:
        names.append(unique(identifier(forms[0].vector[position].hint, "size"), taken | set(names)))
    return ClassKind(forms, arguments, columns, names)


def _container(module: Module) -> str:
    names = list(module.children)
    if module.state or not names:
        return "namespace"
    if names == [str(i) for i in range(len(names))]:
        return "list"
    digits = all(n.isdecimal() for n in names)
    valid = all(n and not hasattr(torch.nn.ModuleDict, n) for n in names)
    return "dict" if valid and (digits or module.kind == "ModuleDict") else "namespace"


def _is_chain(module: Module, checkpoints: set[Frame]) -> bool:
    """Whether every call passes one tensor through the children in order, as `nn.Sequential` does."""
    if not module.children or module.state or module.kind != "Sequential":
        return False
    order = [m.path for m in module.children.values()]
    for call in module.calls:
        frames = [item for item in call.body if isinstance(item, Frame)]
        if not passes_on(call) or [f.path for f in frames] != order:
            return False
        if any(frame_mode(f) != "both" or frame_context(f) != frame_context(call) for f in frames):
            return False
        if any(f in checkpoints for f in frames):
            return False
    return all(len(m.calls) == len(module.calls) for m in module.children.values())


def _encode_state(form: Form, name: str, entry: StateEntry) -> Any:
    form.state_offsets[name] = len(form.vector)
    form.vector += [Number(n, f"{name}_size" if name.isidentifier() else "size") for n in entry.tensor.shape]
    tensor = entry.tensor
    return name, entry.kind, tensor.dim(), str(tensor.dtype), entry.requires_grad, entry.persistent


def _encode_leaf(form: Form, leaf: Leaf) -> None:
    form.shape, form.leaf, form.leaf_offset = "leaf", leaf, len(form.vector)
    encoded = tuple(
        (name, encode_constant(value, name or _POSITIONAL.get(leaf.constructor, "size"), form.vector))
        for name, value in leaf.arguments
    )
    frozen = leaf_requires_grad(form.module.state)
    flags = frozen if frozen is not None else tuple(sorted((n, e.requires_grad) for n, e in form.module.state.items()))
    form.token = ("leaf", leaf.constructor, encoded, flags)
    for call in form.module.calls:
        form.method_of[call] = 0


_POSITIONAL = {
    "nn.Linear": "features",
    "nn.Conv1d": "channels",
    "nn.Conv2d": "channels",
    "nn.Conv3d": "channels",
    "nn.BatchNorm2d": "channels",
    "nn.Dropout": "p",
}


def encode_constant(value: Any, hint: str, vector: list[Number]) -> Any:
    """The token of a constant; its numbers go to `vector`."""
    if type(value) in (int, float):
        vector.append(Number(value, hint))
        return type(value).__name__
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(encode_constant(v, hint, vector) for v in value))
    if isinstance(value, Switch):
        if value == Switch(True, False):
            return "training"
        return (
            "switch",
            encode_constant(value.training, hint, vector),
            encode_constant(value.evaluation, hint, vector),
        )
    if isinstance(value, torch.device):
        return "device"
    return repr(value)


class _Body:
    """The token of one method: values by number, state by name, calls by child and method."""

    def __init__(self, forms: Forms, form: Form, call: Frame, scratch: bool = False) -> None:
        self.forms, self.form, self.call = forms, form, call
        self.numbers: list[Number] = [] if scratch else form.vector
        self.scratch = scratch
        self.known: dict[Value, int] = {}
        for value in call.inputs:
            self._number(value)
        self.ambient = frame_context(call)
        items = tuple(self._op(item) if isinstance(item, Op) else self._frame(item) for item in call.body)
        outputs = tuple(self._argument(v, "") for v in call.outputs)
        self.token = (len(call.inputs), items, outputs)

    def _number(self, value: Value) -> int:
        return self.known.setdefault(value, len(self.known))

    def _op(self, op: Op) -> Any:
        if not self.scratch:
            self.form.op_offsets[op] = len(self.numbers)
        arguments = tuple((k, self._argument(v, k)) for k, v in op.args.items())
        results = tuple(self._number(v) for v in op.results)
        context = op.context if op.context != self.ambient and op.target != SELECT else None
        # A slice is written from whichever end of the shape is nearer, so the number of dimensions is part of the form.
        rank = (
            [v.tensor.dim() for v in op.values()] if str(op.target).startswith(("aten.slice", "aten.select")) else None
        )
        return str(op.target), op.mode, repr(context), arguments, results, repr(rank)

    def _frame(self, frame: Frame) -> Any:
        inputs = tuple(self._argument(v, "") for v in frame.inputs)
        results = tuple(self._number(v) for v in frame.outputs)
        child = self._module(frame)
        context = frame_context(frame)
        return (
            frame.path[len(self.call.path) :],
            self.forms.of[child].method_of.get(frame, 0),
            frame_mode(frame),
            repr(context if context != self.ambient else None),
            frame in self.forms.checkpoints,
            inputs,
            results,
        )

    def _module(self, frame: Frame) -> Module:
        module = self.form.module
        relative = frame.path[len(module.path) :].lstrip(".") if module.path else frame.path
        for part in relative.split("."):
            module = module.children[part]
        return module

    def _argument(self, value: Any, hint: str) -> Any:
        if isinstance(value, Value):
            if value in self.known:
                return self.known[value]
            if value.kind == "state":
                return ("state", self.call.state[value.name])
            return self._number(value)
        if isinstance(value, list):
            return ("list", *(self._argument(v, hint) for v in value))
        return encode_constant(value, hint, self.numbers)
