"""What is intercepted while a model is traced, so that nothing of it is lost: one context manager for each hazard."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from autopart.runtime.structure import decode
from autopart.tracer.bypass import Bypass, current
from autopart.tracer.errors import Uncapturable
from autopart.tracer.opaque import (
    Arguments,
    LiveCall,
    LiveHook,
    OpaqueModule,
    Pending,
    TensorLike,
    describe,
    place,
    result_of,
)
from autopart.tracer.sideeffects import PythonState
from autopart.tracer.snapshot import HOOK_TABLES
from autopart.tracer.stamps import stamped_nodes
from autopart.tracer.state import registered

CHECKPOINT_OPTIONS = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "respect_saved_tensors_hooks",
)


@dataclass
class Watch:
    """The patches of one capture.

    Attributes:
        regions: Stack of open checkpoint regions.
        inside: Whether the user's forward is running.
        deny_export: Answer False when code outside torch asks whether it is being exported.
    """

    model: nn.Module
    opaque: dict[str, OpaqueModule]
    python_state: PythonState
    deny_export: bool = False
    regions: list[str] = field(default_factory=list)
    checkpoints: int = 0
    inside: bool = False
    owners: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owners = {id(tensor): (owner, own) for _, owner, own, _, tensor in registered(self.model)}

    @contextmanager
    def around_export(self) -> Iterator[None]:
        """Everything that must be in place before export looks at the model."""
        with ExitStack() as stack:
            stack.enter_context(stamped_nodes(self.regions))
            for module in self.opaque.values():
                stack.enter_context(stubbed(module))
            stack.enter_context(self.python_state.located({o.module for o in self.opaque.values()}))
            yield

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Everything that must be in place while the user's forward runs."""
        with ExitStack() as stack:
            for repair in REPAIRS:
                stack.enter_context(repair(self))
            self.inside = True
            try:
                with self.python_state.watched():
                    yield
            finally:
                self.inside = False


@contextmanager
def stubbed(opaque: OpaqueModule) -> Iterator[None]:
    """Put the stub in the module's place, and silence its hooks, which the real call will run."""
    module = opaque.module
    hooks = {name: module.__dict__[name] for name in HOOK_TABLES}
    opaque.next_call = 0
    for name, table in hooks.items():
        module.__dict__[name] = type(table)()
    had = module.__dict__.get("forward")
    module.__dict__["forward"] = opaque.stub
    try:
        yield
    finally:
        if had is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = had
        module.__dict__.update(hooks)


@contextmanager
def parameters_reached_past_modules(watch: Watch) -> Iterator[None]:
    with Bypass(watch.owners):
        yield


@contextmanager
def custom_functions(watch: Watch) -> Iterator[None]:
    """Calls of `torch.autograd.Function` become opaque: export would keep their forward and differentiate that."""
    original = torch.autograd.Function.__dict__["apply"]

    def patched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(None, cls)
        if not watch.inside or cls.__module__.split(".")[0] == "torch":
            return run(*args, **kwargs)
        return opaque_function(watch, cls, run, args, kwargs)

    torch.autograd.Function.apply = classmethod(patched)  # type: ignore[assignment,method-assign]
    try:
        with bound_applies(watch.model, patched):
            yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def bound_applies(model: nn.Module, patched: Callable[..., Any]) -> Iterator[None]:
    """Patches what is bound to the original: `f = MyFunction.apply`, a module's attribute or a global of its file."""
    spaces: list[dict[str, Any]] = [vars(m) for m in model.modules()]
    files = {type(m).__module__ for m in model.modules()}
    spaces += [vars(sys.modules[f]) for f in files if f in sys.modules and f.split(".")[0] != "torch"]
    replaced = []
    for space in spaces:
        for name, value in list(space.items()):
            owner = getattr(value, "__self__", None)
            if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and value.__name__ == "apply":
                replaced.append((space, name, value))
                space[name] = functools.partial(patched, owner)
    try:
        yield
    finally:
        for space, name, value in replaced:
            space[name] = value


def opaque_function(
    watch: Watch, cls: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    arguments = Arguments.of(args, kwargs)
    given = current(arguments.tensors, watch.owners)
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        stand_ins = [stand_in(t) for t in given]
        versions = [t._version for t in stand_ins]
        rebuilt_args, rebuilt_kwargs = arguments.rebuilt(stand_ins)
        result, outputs = result_of(run(*rebuilt_args, **rebuilt_kwargs), cls.__qualname__)
        mutates = tuple(i for i, (t, v) in enumerate(zip(stand_ins, versions, strict=True)) if t._version != v)
    pending = Pending(
        kind="function",
        call=LiveCall(run, arguments),
        subject=cls,
        path="",
        reason="its backward is its own",
        outputs=tuple(TensorLike.of(t) for t in outputs),
        mutates=mutates,
        structure=describe(arguments, result, mutates),
    )
    return decode(result, place(pending, given))


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like it that the trial call may change in place."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_().mul(1) if tensor.requires_grad else made


@contextmanager
def tensor_hooks(watch: Watch) -> Iterator[None]:
    """`tensor.register_hook(f)` in forward becomes a live registration."""
    original = torch.Tensor.register_hook

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        if not watch.inside:
            return original(self, hook)
        place(Pending("hook", LiveHook(hook), hook, "", "a gradient hook runs on this value"), [self])
        return _Handle()

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


class _Handle:
    """Given back by `register_hook` while tracing."""

    def remove(self) -> None:
        raise Uncapturable(None, "a gradient hook is removed again in forward")


@contextmanager
def checkpoint_regions(watch: Watch) -> Iterator[None]:
    """`torch.utils.checkpoint.checkpoint` runs its function plainly; nodes made inside carry the region's name."""
    original = torch.utils.checkpoint.checkpoint

    def checkpoint(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not watch.inside or function is None:
            return original(function, *args, **kwargs)
        options = {name: kwargs.pop(name) for name in CHECKPOINT_OPTIONS if name in kwargs}
        watch.checkpoints += 1
        watch.regions.append(f"checkpoint_{watch.checkpoints}")
        # The reentrant kind gives no gradients at all when no tensor it is given has any.
        detached = options.get("use_reentrant") and not any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in args
        )
        try:
            with torch.no_grad() if detached else nullcontext():
                return function(*args, **kwargs)
        finally:
            watch.regions.pop()

    spaces = [vars(m) for name, m in list(sys.modules.items()) if m is not None and hasattr(m, "__dict__")]
    spaces += [vars(m) for m in watch.model.modules()]
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for space in spaces:
        for name in [n for n in space if "checkpoint" in n]:
            value = space[name]
            if value is original:
                new: Any = checkpoint
            elif isinstance(value, functools.partial) and value.func is original:
                new = functools.partial(checkpoint, *value.args, **value.keywords)
            else:
                continue
            replaced.append((space, name, value))
            space[name] = new
    try:
        yield
    finally:
        for space, name, value in replaced:
            space[name] = value


@contextmanager
def saved_tensor_hooks(watch: Watch) -> Iterator[None]:
    """Pack and unpack hooks act on what autograd keeps, which no graph shows: the module that uses them stays whole."""
    original = torch.autograd.graph.saved_tensors_hooks.__enter__

    def enter(self: Any) -> None:
        if watch.inside:
            raise Uncapturable(None, "it packs what autograd saves (saved_tensors_hooks)")
        original(self)

    torch.autograd.graph.saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.graph.saved_tensors_hooks.__enter__ = original  # type: ignore[method-assign]


@contextmanager
def export_denied(watch: Watch) -> Iterator[None]:
    """Some models take another road when exported; the retry tells them that they are not."""
    if not watch.deny_export:
        yield
        return
    names = ("is_exporting", "is_compiling", "is_dynamo_compiling")
    originals = {name: getattr(torch.compiler, name) for name in names}

    def answer(original: Callable[[], bool]) -> Callable[[], bool]:
        def patched() -> bool:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return original() if caller.split(".")[0] == "torch" else False

        return patched

    for name, original in originals.items():
        setattr(torch.compiler, name, answer(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.compiler, name, original)


REPAIRS: tuple[Callable[[Watch], Any], ...] = (
    custom_functions,
    tensor_hooks,
    checkpoint_regions,
    saved_tensor_hooks,
    export_denied,
    parameters_reached_past_modules,
)
