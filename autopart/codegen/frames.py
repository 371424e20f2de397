"""Frames: the calls of modules that a stage's operations came from, as a tree.

Every operation carries the stack of module calls it was captured in. Read in order, these stacks give a tree of calls;
its root is the stage itself. A call belongs to the tree only if its module is registered below its caller's module
and its operations stand together; otherwise its operations move up into the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autopart.codegen.names import unique
from autopart.codegen.placement import StageProgram
from autopart.codegen.program import Op, Value
from autopart.graph import StateEntry


@dataclass(eq=False)
class Frame:
    """One call of one module in one stage.

    Attributes:
        body: Operations and further calls, in order.
        inputs: Values from outside, in order of first use; parameters that are not below the module come as values too.
        outputs: Values made here and used outside.
        state: State key -> its name relative to the module, for what the frame's own operations and calls reach.
    """

    key: str
    path: str
    kind: str
    body: list[Op | Frame] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What `autopart.blocks` calls a block that is this call."""
        return self.path + (f"@{self.key.rpartition('@')[2]}" if "@" in self.key else "")

    def operations(self) -> Iterator[Op]:
        for item in self.body:
            if isinstance(item, Frame):
                yield from item.operations()
            else:
                yield item

    def frames(self) -> Iterator[Frame]:
        """This frame and every one below it, inner ones first."""
        for item in self.body:
            if isinstance(item, Frame):
                yield from item.frames()
        yield self


# Path of a module -> constant of the code in its call -> attribute that holds it. One name is one tensor in all stages:
# they read their values from one file.
ConstantNames = dict[str, dict[str, str]]


def build_frames(
    stage: StageProgram,
    state: Mapping[str, StateEntry],
    root_kind: str,
    recomputed: Collection[str] = (),
    constants: ConstantNames | None = None,
) -> Frame:
    """The tree of calls of one stage.

    Args:
        recomputed: Labels of calls that are checkpointed: whoever calls them is no `nn.Sequential`.
        constants: The names that earlier stages gave; those of this one are added.
    """
    earlier = {} if constants is None else constants
    dissolved: set[str] = set()
    while True:
        root = Frame("", "", root_kind)
        again = _scan(stage.ops, root, dissolved)
        if not again:
            named = {path: dict(names) for path, names in earlier.items()}
            _Interfaces(stage, state, named).fill(root)
            chains = (f for f in root.frames() if f.kind == "Sequential" and f is not root)
            again = {f.key for f in chains if not passes_on(f) or any(_label(i) in recomputed for i in f.body)}
        if not again:
            break
        dissolved |= again
    earlier.update(named)
    # The stage's own interface is what the table says, state that the model returns included.
    assert set(root.inputs) == set(stage.takes) and set(root.outputs) <= set(stage.gives)
    root.inputs, root.outputs = stage.takes, stage.gives
    return root


def _label(item: Op | Frame) -> str | None:
    return item.label if isinstance(item, Frame) else None


def passes_on(frame: Frame) -> bool:
    """Whether the call hands one tensor from module to module, as `nn.Sequential` does."""
    current = frame.inputs
    if len(current) != 1 or len({f.path for f in frame.body if isinstance(f, Frame)}) != len(frame.body):
        return False
    for item in frame.body:
        if not isinstance(item, Frame) or item.inputs != current or len(item.outputs) != 1:
            return False
        if item.path.rpartition(".")[0] != frame.path:
            return False
        current = item.outputs
    return frame.outputs == current


def _scan(ops: list[Op], root: Frame, dissolved: set[str]) -> set[str]:
    """Fill `root`; returns the keys of calls that were met again after they had ended."""
    open_frames = [root]
    closed: set[str] = set()
    torn: set[str] = set()
    for op in ops:
        wanted = _stack(op, dissolved)
        depth = 0
        while depth < len(wanted) and depth + 1 < len(open_frames) and open_frames[depth + 1].key == wanted[depth][0]:
            depth += 1
        closed.update(f.key for f in open_frames[depth + 1 :])
        del open_frames[depth + 1 :]
        for key, path, kind in wanted[depth:]:
            if key in closed:
                torn.add(key)
            frame = Frame(key, path, kind)
            open_frames[-1].body.append(frame)
            open_frames.append(frame)
        open_frames[-1].body.append(op)
    return torn


def _stack(op: Op, dissolved: set[str]) -> list[tuple[str, str, str]]:
    """The calls that an operation lies in, as far as each is registered below the one before."""
    kept: list[tuple[str, str, str]] = []
    above = ""
    for key, path, kind in op.module_calls:
        if path and key not in dissolved and (above == "" or path.startswith(above + ".")):
            kept.append((key, path, kind))
            above = path
    return kept


class _Interfaces:
    """Fills in what goes into and out of each frame."""

    def __init__(self, stage: StageProgram, state: Mapping[str, StateEntry], constants: ConstantNames) -> None:
        self.state = state
        self.given = set(stage.gives)
        self.anchor = next((v for v in stage.takes), None)
        self.constants = constants
        self.users: dict[Value, list[Op]] = {}
        for op in stage.ops:
            for value in op.values():
                self.users.setdefault(value, []).append(op)

    def fill(self, frame: Frame) -> set[Op]:
        inside: set[Op] = set()
        made: dict[Value, None] = {}
        used: dict[Value, None] = {}
        for item in frame.body:
            if isinstance(item, Frame):
                inside |= self.fill(item)
                used.update(dict.fromkeys(item.inputs))
                made.update(dict.fromkeys(item.outputs))
            else:
                inside.add(item)
                used.update(dict.fromkeys(item.values()))
                made.update(dict.fromkeys(item.results))
        if frame.path == "":
            used.update(dict.fromkeys(v for v in self.given if v.kind == "state"))
        for value in used:
            if value in made:
                continue
            name = self._local_name(frame, value) if value.kind == "state" else None
            if name is None:
                frame.inputs.append(value)
            else:
                frame.state[value.name] = name
        frame.outputs = [v for v in made if v in self.given or any(u not in inside for u in self.users.get(v, ()))]
        if (
            not frame.inputs
            and not frame.state
            and self.anchor is not None
            and any(map(needs_device, frame.operations()))
        ):
            frame.inputs.append(self.anchor)
        return inside

    def _local_name(self, frame: Frame, value: Value) -> str | None:
        """How the frame's module reaches an entry of the state: the shortest of its names below the module."""
        entry = self.state[value.name]
        prefix = frame.path + "." if frame.path else ""
        if entry.kind == "constant":
            # It belongs to the code that made it, so it lives in the module whose call that is.
            known = self.constants.setdefault(frame.path, {})
            taken = {
                n.removeprefix(prefix).split(".")[0]
                for e in self.state.values()
                for n in e.names
                if n.startswith(prefix)
            }
            if value.name not in known:
                known[value.name] = unique("constant", taken | set(known.values()))
            return known[value.name]
        below = [name.removeprefix(prefix) for name in entry.names if name.startswith(prefix)]
        return min(below, key=lambda name: name.count(".") if prefix else 0, default=None)


def needs_device(op: Op) -> bool:
    """Whether the operation makes a tensor on a device that it must be told."""
    return isinstance(op.args.get("device"), torch.device)
