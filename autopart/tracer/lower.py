"""From an exported program to a graph by the conventions of `autopart.graph`: state as `get_attr`, contexts inlined."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopart.effects import has_effect, mutated
from autopart.tracer.aliases import storage, storage_names
from autopart.tracer.errors import Uncapturable
from autopart.tracer.stamps import STAMP, Stamp
from autopart.tracer.state import StateTable

aten = torch.ops.aten

# Operators that check or describe, and compute nothing that is kept.
DROPPED = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
    "aten::_functional_assert_async",
}
# Operators that give back the very tensor they got when dtype and device already are as asked.
CASTS = {"aten::to", "aten::type_as", "aten::_to_copy"}
# Operators that give the same values as their first argument, made by export around constants.
LIFTS = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::detach_", "aten::alias"}
CONTEXTS = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}


def operator_name(target: Any) -> str:
    """`aten::add` for `torch.ops.aten.add.Tensor`; "" for what is no operator."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else ""


class Lowering:
    """One walk over the exported graph that builds the clean one."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        state: StateTable,
        input_names: Sequence[str],
        reassigned: Sequence[str],
        rewrite_opaque: Callable[[fx.Graph, fx.Node, Callable[[Any], Any]], fx.Node | None],
    ) -> None:
        self.program = program
        self.state = state
        self.input_names = input_names
        self.reassigned = reassigned
        self.rewrite_opaque = rewrite_opaque
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.attributes: dict[str, fx.Node] = {}
        self.copied_inputs: list[str] = []

    def run(self) -> fx.Graph:
        """The clean graph; its output node holds the flat outputs, without the values of reassigned buffers.

        Raises:
            Uncapturable: The graph holds something that depends on data (symbolic sizes, control flow).
        """
        self._placeholders()
        for node in self.program.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._node(node, self.program.graph_module)
        self._output()
        remove_dead_code(self.graph)
        self.copied_inputs = copy_changed_inputs(self.graph)
        return self.graph

    def _placeholders(self) -> None:
        signature = self.program.graph_signature
        sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        constants = signature.inputs_to_lifted_tensor_constants
        users = [n for n in self.program.graph.nodes if n.op == "placeholder" and n.name in signature.user_inputs]
        for node, name in zip(users, self.input_names, strict=True):
            new = self.graph.create_node("placeholder", name, name=name)
            new.meta = self._meta(node)
            self.env[node] = new
        held = []
        for node in self.program.graph.nodes:
            if node.op != "placeholder" or node in self.env:
                continue
            if node.name in sources:
                held.append((self.state.key_of_name[sources[node.name].removeprefix("m.")], node))
            elif node.name in constants:
                held.append((self.state.constant(self.program.constants[constants[node.name]]), node))
            elif node.users:
                raise Uncapturable(None, f"the graph takes {node.name!r}, which is neither a tensor nor state")
        for key, node in sorted(held, key=lambda item: int(item[0][1:])):
            self.env[node] = self._attribute(key, node)

    def _attribute(self, key: str, node: fx.Node) -> fx.Node:
        if key not in self.attributes:
            entry = self.state.entries[key]
            name = entry.name.replace(".", "_") if entry.kind != "constant" else node.name
            new = self.graph.create_node(
                "get_attr", key, name=f"p_{name}" if entry.kind == "parameter" else f"b_{name}"
            )
            new.meta = self._meta(node)
            new.meta["nn_module_stack"] = {}
            self.attributes[key] = new
        return self.attributes[key]

    def _value(self, arg: Any) -> Any:
        return map_arg(arg, lambda n: self.env[n])

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        stamp = node.meta.get(STAMP, Stamp())
        stack = {}
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if path == "m" or path.startswith("m."):
                stack[key] = (path[2:], kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        return {
            "val": node.meta.get("val"),
            "nn_module_stack": stack,
            "stack_trace": node.meta.get("stack_trace"),
            "grad_enabled": stamp.grad_enabled,
            "autocast": stamp.autocast,
            "checkpoint": stamp.checkpoint,
            **({"custom": node.meta["custom"]} if "custom" in node.meta else {}),
        }

    def _node(self, node: fx.Node, owner: torch.nn.Module) -> None:
        if node.op == "get_attr":
            return  # a region's graph; the node that runs it fetches it by its target
        if node.op == "call_module" or operator_name(node.target) in DROPPED:
            return  # guards on the inputs' shapes
        if node.op != "call_function":
            raise at(node, f"export left a {node.op} of {node.target}")
        if node.target.__class__.__module__ == "torch._ops" and getattr(node.target, "namespace", "") == "autopart":
            new = self.rewrite_opaque(self.graph, node, self._value)
            if new is not None:
                self._place(node, new)
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._inline(node, owner)
            return
        if node.target is operator.getitem and isinstance(self.env[node.args[0]], (tuple, list)):  # type: ignore[index]
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        refuse_symbols(node)
        if gives_its_argument(node):
            self.env[node] = self._value(node.args[0])
            return
        if operator_name(node.target) == "aten::histc" and not node.meta["val"].is_floating_point():
            self._count_in_float(node)
            return
        new = self.graph.create_node(
            "call_function", node.target, self._value(node.args), self._value(node.kwargs), node.name
        )
        self._place(node, new)

    def _count_in_float(self, node: fx.Node) -> None:
        """`histc` of whole numbers, which CPUs do not count (a model on meta takes a GPU's way): exact up to 2^24."""
        counts = node.meta["val"]
        numbers = self.graph.call_function(aten.to.dtype, (self._value(node.args[0]), torch.float32))
        numbers.meta.update(self._meta(node), val=node.args[0].meta["val"].to(torch.float32))  # type: ignore[union-attr]
        found = self.graph.create_node(
            "call_function", node.target, (numbers, *self._value(node.args[1:])), self._value(node.kwargs)
        )
        found.meta.update(self._meta(node), val=counts.to(torch.float32))
        self._place(node, self.graph.call_function(aten.to.dtype, (found, counts.dtype)))

    def _place(self, node: fx.Node, new: fx.Node) -> None:
        new.meta.update(self._meta(node))
        self.env[node] = new

    def _inline(self, node: fx.Node, owner: torch.nn.Module) -> None:
        name = node.target._name if hasattr(node.target, "_name") else str(node.target)
        if name not in CONTEXTS:
            raise at(node, f"the higher-order operator {name} cannot be split")
        position = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
        body: Any = getattr(owner, str(node.args[position].target))  # type: ignore[union-attr]
        given = iter(self._value(node.args[position + 1 :]))
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                self.env[inner] = next(given)
            elif inner.op == "output":
                self.env[node] = self._value(inner.args[0])
            else:
                self._node(inner, body)

    def _output(self) -> None:
        (output,) = (n for n in self.program.graph.nodes if n.op == "output")
        values = list(self._value(output.args[0]))
        count = len(values) - len(self.reassigned)
        for name, value in zip(self.reassigned, values[count:], strict=True):
            key = self.state.key_of_name[name]
            target = self.attributes.get(key)
            if target is None:
                raise Uncapturable(name.rpartition(".")[0], f"forward replaces the buffer {name!r} without reading it")
            if not isinstance(value, fx.Node) or value is target:
                continue
            if (
                value.meta["val"].shape != target.meta["val"].shape
                or value.meta["val"].dtype != target.meta["val"].dtype
            ):
                raise Uncapturable(name.rpartition(".")[0], f"forward gives the buffer {name!r} another shape or dtype")
            new = self.graph.call_function(aten.copy_.default, (target, value))
            new.meta = {
                **value.meta,
                "val": target.meta["val"],
                "grad_enabled": False,
                "autocast": (),
                "checkpoint": None,
                "reassigns": True,
            }
        for value in values[:count]:
            if not isinstance(value, fx.Node):
                raise Uncapturable(None, "the model returns a tensor that forward did not make")
        self.graph.output(tuple(values[:count]))


def copy_changed_inputs(graph: fx.Graph) -> list[str]:
    """Let the graph work on copies of inputs that it changes in place: microbatches are parts of the caller's tensors.

    Returns:
        Names of the inputs.
    """
    names = storage_names(graph)
    changed = {storage(t.meta["val"]) for node in graph.nodes for t in mutated(node)}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    found = [n for n in inputs if any(h is n for mark in changed for h in names.get(mark, ()))]
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in found:
        with graph.inserting_before(first):
            copy = graph.call_function(aten.clone.default, (node,))
        copy.meta = {**node.meta, "val": node.meta["val"].clone()}
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    return [n.name for n in found]


def module_of(node: fx.Node) -> str | None:
    """Path of the innermost module that a node of the exported graph was made in; None outside the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return path[2:] if path == "m" or path.startswith("m.") else None


def at(node: fx.Node, reason: str) -> Uncapturable:
    """The error that names a node's module and source line."""
    frames = re.findall(r'File "(.*)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    return Uncapturable(module_of(node), reason, "{}:{}: {}".format(*frames[-1]) if frames else None)


def refuse_symbols(node: fx.Node) -> None:
    """Sizes that depend on the data cannot be planned."""
    values = node.meta.get("val")
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise at(node, "torch.func or torch.vmap is used")
        symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        if symbolic or (isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)):
            raise at(node, f"{node.target} makes a size or number that depends on the data")


def gives_its_argument(node: fx.Node) -> bool:
    """Whether an operator gives back its first argument unchanged (a cast to what it already is, a lifted constant)."""
    name = operator_name(node.target)
    if name not in CASTS and name not in LIFTS:
        return False
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    value = node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if name in CASTS:
        copies = node.kwargs.get("copy") or any(a is True for a in node.args[3:4]) or name == "aten::_to_copy"
        if copies or node.kwargs.get("memory_format") not in (None, torch.preserve_format):
            return False
        return source.dtype == value.dtype and source.device == value.device
    if name == "aten::lift_fresh_copy":
        return not any(mutates_argument(user, node) for user in node.users)
    if name == "aten::detach_":
        return node.args[0].op != "call_function" or operator_name(node.args[0].target) in LIFTS  # type: ignore[union-attr]
    return True


def mutates_argument(user: fx.Node, node: fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    if schema is None or not schema.is_mutable or operator_name(user.target) == "aten::detach_":
        return False
    return bool(user.args) and user.args[0] is node


def remove_dead_code(graph: fx.Graph) -> None:
    """Remove what nobody reads; operators that change a tensor or the random state stay."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr") and not has_effect(node):
            graph.erase_node(node)
