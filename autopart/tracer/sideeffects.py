"""Python state that forward changes: attributes of modules, and Python's and numpy's random numbers.

Export runs forward once and keeps what the tensors did; a counter, a list or one of Python's random numbers would be
burnt in. The module that changes such state is kept whole, so that its Python runs in every step. A first trace only
tells that something changed; a second one compares around every module call, and stops in the innermost that did it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autopart.tracer.errors import Uncapturable
from autopart.tracer.snapshot import Attributes, attributes_of, changed_attributes, random_states, same_random_state

GENERATORS = {"python": "Python's random numbers", "numpy": "numpy's random numbers"}


@dataclass
class PythonState:
    """What may change: attributes of the given modules, and the generators.

    Attributes:
        changes: Descriptions of what the last watched forward changed.
    """

    model: nn.Module
    changes: list[str] = field(default_factory=list)
    suspects: list[nn.Module] = field(default_factory=list)
    locating: bool = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Compare before and after a whole forward."""
        before = self._now(list(self.model.modules()))
        yield
        self.changes, self.suspects = self._changes(before)

    @contextmanager
    def located(self, whole: set[nn.Module]) -> Iterator[None]:
        """Compare around each module call outside `whole`, and raise in the innermost that changes something.

        Raises:
            Uncapturable: With the path of that module.
        """
        if not self.locating:
            yield
            return
        watched = list(self.suspects)
        stack: list[Any] = []
        handles = []
        for path, module in self.model.named_modules():
            if any(module is m for w in whole for m in w.modules()):
                continue

            def enter(_: nn.Module, args: Any) -> None:
                stack.append(self._now(watched))

            def leave(_: nn.Module, args: Any, result: Any, path: str = path) -> None:
                changes, _suspects = self._changes(stack.pop())
                if changes:
                    raise Uncapturable(path, f"forward changes {', '.join(changes)}")

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _now(self, modules: list[nn.Module]) -> tuple[Attributes, dict[str, Any]]:
        return attributes_of(modules), random_states()

    def _changes(self, before: tuple[Attributes, dict[str, Any]]) -> tuple[list[str], list[nn.Module]]:
        paths = {module: path for path, module in self.model.named_modules()}
        found = changed_attributes(before[0])
        changes = [f"the attribute {name!r} of {paths[module] or type(module).__name__}" for module, name in found]
        states = random_states()
        for name, spoken in GENERATORS.items():
            if name in before[1] and name in states and not same_random_state(before[1][name], states[name]):
                changes.append(spoken)
        return changes, [module for module, _ in found]
