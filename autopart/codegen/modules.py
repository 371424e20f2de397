"""The modules of a stage: the original hierarchy, as far as the stage holds parameters or calls of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopart.codegen.frames import Frame
from autopart.graph import Graph, StateEntry


@dataclass(eq=False)
class Module:
    """One module of a stage.

    Attributes:
        path: Its path in the original model, which is its path in the stage.
        kind: Class name in the original model.
        calls: Every call of it in this stage.
        state: Attribute name -> parameter, buffer or constant that it holds itself.
        children: Attribute name -> module.
        opaque: Whether it is the user's own module, kept whole.
    """

    stage: int
    path: str
    kind: str
    calls: list[Frame] = field(default_factory=list)
    state: dict[str, StateEntry] = field(default_factory=dict)
    children: dict[str, Module] = field(default_factory=dict)
    opaque: bool = False

    def walk(self) -> Iterator[Module]:
        """Every module below this one, then itself."""
        for child in self.children.values():
            yield from child.walk()
        yield self


@dataclass(frozen=True)
class Holding:
    """Which stage holds which name of which entry of the state.

    Attributes:
        names: For each stage, full name -> entry, in the order of the original `state_dict`.
    """

    names: tuple[dict[str, StateEntry], ...]

    def copies(self) -> dict[str, dict[int, str]]:
        """State key -> stage -> the first name there."""
        found: dict[str, dict[int, str]] = {}
        for stage, names in enumerate(self.names):
            for name, entry in names.items():
                found.setdefault(entry.key, {}).setdefault(stage, name)
        return found


def hold_state(roots: Sequence[Frame], graph: Graph) -> Holding:
    """Give every name of the original `state_dict` to a stage: where it is used, else beside its neighbours."""
    used: list[dict[str, str]] = [{} for _ in roots]
    for stage, root in enumerate(roots):
        for frame in root.frames():
            for key, name in frame.state.items():
                used[stage][f"{frame.path}.{name}" if frame.path else name] = key
        for path in opaque_paths(root):
            used[stage] |= {n: e.key for e in graph.state.values() for n in e.names if n.startswith(path + ".")}
    homes = {name for names in used for name in names}
    for entry in graph.state.values():
        if entry.kind == "constant":
            continue
        holders = [s for s, names in enumerate(used) if entry.key in names.values()]
        for name in entry.names:
            if name not in homes:
                stage = holders[0] if holders else _nearest_stage(name, used)
                used[stage][name] = entry.key
                holders = holders or [stage]
    order = {name: i for i, name in enumerate(n for e in graph.state.values() for n in e.names)}
    return Holding(
        tuple(
            {n: graph.state[names[n]] for n in sorted(names, key=lambda n: (order.get(n, len(order)), n))}
            for names in used
        )
    )


def opaque_paths(root: Frame) -> list[str]:
    """Paths of the opaque modules that a stage calls."""
    return list(dict.fromkeys(op.within for op in root.operations() if op.within is not None))


def _nearest_stage(name: str, used: Sequence[Mapping[str, str]]) -> int:
    """The first stage that holds something of the innermost module around `name`."""
    owner = name.rpartition(".")[0]
    while owner:
        for stage, names in enumerate(used):
            if any(other.startswith(owner + ".") for other in names):
                return stage
        owner = owner.rpartition(".")[0]
    return 0


def build_modules(stage: int, root: Frame, names: Mapping[str, StateEntry], graph: Graph) -> Module:
    """The tree of modules of one stage."""
    top = Module(stage, "", f"Stage{stage}")

    def find(path: str) -> Module:
        here = top
        for part in path.split(".") if path else ():
            below = f"{here.path}.{part}" if here.path else part
            kind = graph.modules.get(below)
            here = here.children.setdefault(part, Module(stage, below, kind.__name__ if kind else "Module"))
        return here

    for frame in _outer_first(root):
        module = find(frame.path)
        module.calls.append(frame)
        if frame is not root:
            module.kind = frame.kind
    for path in opaque_paths(root):
        find(path).opaque = True
    for name, entry in names.items():
        owner, _, attribute = name.rpartition(".")
        find(owner).state[attribute] = entry
    return top


def _outer_first(frame: Frame) -> Iterator[Frame]:
    yield frame
    for item in frame.body:
        if isinstance(item, Frame):
            yield from _outer_first(item)
