"""Opaque calls: code of the user's that was not captured, and runs in the package as it is.

A function or class is imported from where the user has it when that is an installed module; a file of the user's own is
copied into the package's `user_code/`. A module is not pickled: its class is imported and its plain attributes are
written down as data, child by child, so that loading a package runs nothing but the code one can read.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart.codegen.names import is_identifier, unique
from autopart.codegen.program import Op
from autopart.codegen.user_code import UserCode, is_installed
from autopart.errors import CaptureError
from autopart.graph import Graph, OpaqueCall

OPAQUE_MODULE = '''# Written by autopart; see README.md.
"""Modules of the original model that were not captured: built from their classes and the attributes in opaque.json."""

import importlib
import json
from pathlib import Path

import torch
from torch import nn


def build_opaque(path: str) -> nn.Module:
    """The module at a path of the original model, with empty weights."""
    return _module(json.loads(Path(__file__).with_name("opaque.json").read_text(encoding="utf-8"))[path])


def _module(data: dict) -> nn.Module:
    kind = _import(data["class"])
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in data["attributes"]:
        setattr(module, name, _value(value))
    for name, spec in data["parameters"]:
        parameter = None if spec is None else nn.Parameter(_empty(spec), requires_grad=spec["requires_grad"])
        module.register_parameter(name, parameter)
    for name, spec in data["buffers"]:
        buffer = None if spec is None else _empty(spec)
        module.register_buffer(name, buffer, persistent=spec is None or spec["persistent"])
    for name, child in data["children"]:
        module.add_module(name, None if child is None else _module(child))
    return module


def _empty(spec: dict) -> torch.Tensor:
    return torch.zeros(spec["shape"], dtype=getattr(torch, spec["dtype"]))


def _value(data):
    (kind, value), = data.items()
    if kind in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[kind](_value(item) for item in value)
    if kind == "dict":
        return {_value(key): _value(item) for key, item in value}
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "import":
        return _import(value)
    return float(value) if kind == "float" else value


def _import(path: str):
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
'''


class OpaqueCalls:
    """Writes opaque calls and collects what a package must hold for them.

    Args:
        reserved: Names that mean something else in the code.

    Attributes:
        user_code: The user's files that are copied into `user_code/`.
        libraries: Installed packages that code is imported from.
        modules: Path -> description of an opaque module, for `opaque.json`.
    """

    def __init__(self, graph: Graph, reserved: Set[str] = frozenset()) -> None:
        self.graph = graph
        self.reserved = reserved
        self.user_code = UserCode()
        self.modules: dict[str, Any] = {}
        self.libraries: set[str] = set()
        self._imports: dict[str, str] = {}
        for call in graph.opaque.values():
            if call.kind == "module":
                if not call.path:
                    raise CaptureError(
                        f"{graph.name} could not be captured, only kept whole, and so cannot be split: {call.reason}"
                    )
                self.modules[call.path] = self._describe(call.subject, call.path)
            else:
                self._imported(call)

    def imports(self) -> dict[str, str]:
        """Name in the code -> import statement, of the functions and classes written so far."""
        return {name: statement for name, statement in self._imports.items()}

    def expression(self, op: Op, arguments: list[ast.expr], module: ast.expr | None) -> ast.expr:
        """The call, giving its one result, a tuple of results, or a list."""
        call = self.graph.opaque[op.target]
        if call.kind == "hook":
            hook = ast.Name(self._imported(call), ast.Load())
            return ast.Call(ast.Attribute(arguments[0], "register_hook", ast.Load()), [hook], [])
        if call.structure is None:
            raise CaptureError(
                f"{_where(call)} is called with an object that cannot be written into a package",
                "Pass tensors, numbers, strings, and lists, tuples or dicts of them.",
            )
        positional, keywords = self._arguments(call, arguments)
        if call.kind == "function":
            function: ast.expr = ast.Attribute(ast.Name(self._imported(call), ast.Load()), "apply", ast.Load())
        else:
            assert module is not None
            function = module
        found: ast.expr = ast.Call(function, positional, keywords)
        if _is_plain(call.structure["result"]):
            return found
        self._imports["encode"] = "from runtime.structure import encode"
        return ast.Subscript(ast.Call(ast.Name("encode", ast.Load()), [found], []), ast.Constant(1), ast.Load())

    def is_single(self, key: str) -> bool:
        """Whether the call gives one tensor, not several."""
        structure = self.graph.opaque[key].structure
        return structure is not None and "tensor" in structure["result"]

    def _arguments(self, call: OpaqueCall, tensors: list[ast.expr]) -> tuple[list[ast.expr], list[ast.keyword]]:
        args, kwargs = call.structure["call"]["tuple"]
        positional = [self._code(item, tensors, call) for item in args["tuple"]]
        keywords = [ast.keyword(name, self._code(item, tensors, call)) for name, item in kwargs["dict"]]
        return positional, keywords

    def _code(self, structure: Mapping[str, Any], tensors: list[ast.expr], call: OpaqueCall) -> ast.expr:
        if "tensor" in structure:
            return tensors[structure["tensor"]]
        if "constant" in structure:
            value = structure["constant"]
            return ast.Name(ascii(value), ast.Load())
        if "float" in structure:
            return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(structure["float"])], [])
        for kind, node in (("list", ast.List), ("tuple", ast.Tuple)):
            if kind in structure:
                return node([self._code(item, tensors, call) for item in structure[kind]], ast.Load())
        if "dict" in structure:
            keys: list[ast.expr | None] = [ast.Name(ascii(k), ast.Load()) for k, _ in structure["dict"]]
            return ast.Dict(keys, [self._code(item, tensors, call) for _, item in structure["dict"]])
        raise CaptureError(
            f"{_where(call)} is called with a {structure['object']}, which cannot be written into a package",
            "Pass tensors, numbers, strings, and lists, tuples or dicts of them.",
        )

    def _imported(self, call: OpaqueCall) -> str:
        module, qualified = self._location(call.subject, _where(call))
        root, _, rest = qualified.partition(".")
        statement = f"from {module} import {root}"
        name = root
        taken = self.reserved | {n for n, s in self._imports.items() if s.partition(" as ")[0] != statement}
        if name in taken:
            name = unique(name, set(taken))
            statement += f" as {name}"
        self._imports[name] = statement
        return f"{name}.{rest}" if rest else name

    def _location(self, subject: Any, where: str) -> tuple[str, str]:
        """(module to import in the package, qualified name) of a class or function."""
        module, name = getattr(subject, "__module__", None), getattr(subject, "__qualname__", None)
        if not module or not name or not all(is_identifier(part) for part in name.split(".")):
            raise CaptureError(
                f"{where}: {name or type(subject).__name__} cannot be imported by name, so no package can use it",
                "Define it at the top level of a file.",
            )
        if module != "__main__" and all(is_identifier(part) for part in module.split(".")) and is_installed(module):
            root = module.partition(".")[0]
            self.libraries |= {root} - set(sys.stdlib_module_names) - {"torch"}
            return module, name
        try:
            source = inspect.getsourcefile(subject)
        except TypeError:
            source = None
        if source is None or not Path(source).is_file():
            raise CaptureError(f"{where}: the source of {name} is not in a file", "Put it into a file.")
        file = self.user_code.add(Path(source).resolve())
        self.libraries |= self.user_code.libraries
        return f"user_code.{file}", name

    def _describe(self, module: nn.Module, path: str) -> dict[str, Any]:
        """A module as data: its class, its plain attributes, the shapes of its state, and its children."""
        kind, name = self._location(type(module), f"module {path}")
        own = nn.Module()
        attributes = [
            [key, self._attribute(value, f"{path}.{key}")]
            for key, value in vars(module).items()
            if key not in vars(own) and key != "forward"
        ]
        attributes.append(["training", {"constant": module.training}])
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if getattr(module, hooks):
                raise CaptureError(
                    f"module {path} has hooks, which a package cannot take over",
                    "Remove the hooks, or do their work in the module's forward.",
                )
        return {
            "class": f"{kind}:{name}",
            "attributes": attributes,
            "parameters": [[n, _tensor(p)] for n, p in module._parameters.items()],
            "buffers": [
                [n, None if b is None else _tensor(b) | {"persistent": n not in module._non_persistent_buffers_set}]
                for n, b in module._buffers.items()
            ],
            "children": [
                [n, None if child is None else self._describe(child, f"{path}.{n}")]
                for n, child in module._modules.items()
            ],
        }

    def _attribute(self, value: Any, where: str) -> dict[str, Any]:
        if value is None or type(value) in (bool, int, str):
            return {"constant": value}
        if type(value) is float:
            return {"float": repr(value)}
        if type(value) in (list, tuple, set):
            items = sorted(value, key=repr) if type(value) is set else value
            return {type(value).__name__: [self._attribute(item, where) for item in items]}
        if type(value) is dict:
            return {"dict": [[self._attribute(k, where), self._attribute(v, where)] for k, v in value.items()]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, type) or inspect.isfunction(value) or inspect.isbuiltin(value):
            module, name = self._location(value, where)
            return {"import": f"{module}:{name}"}
        raise CaptureError(
            f"{where} is a {type(value).__name__}: the module is kept whole, and this attribute cannot be written down",
            "Keep numbers, strings and containers of them as attributes of such a module.",
        )

    def description(self) -> str:
        """The text of `opaque.json`."""
        return json.dumps(self.modules, indent=1) + "\n"


def _tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }


def _is_plain(result: Mapping[str, Any]) -> bool:
    """Whether the result is a tensor, or a list or tuple of all results in order."""
    if "tensor" in result:
        return True
    items = result.get("tuple", result.get("list"))
    return items is not None and all(item == {"tensor": i} for i, item in enumerate(items))


def _where(call: OpaqueCall) -> str:
    name = getattr(call.subject, "__qualname__", type(call.subject).__qualname__)
    return f"{name} (called in {call.path or 'the model itself'})"
