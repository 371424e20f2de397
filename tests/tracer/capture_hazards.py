"""Small models, each with one thing that a capture loses easily.

`HAZARDS` maps a name to a function giving (model, args, kwargs).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

HAZARDS: dict[str, Callable[[], Any]] = {}
D = 6


def hazard(function: Callable[[], Any]) -> Callable[[], Any]:
    HAZARDS[function.__name__] = function
    return function


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * D).reshape(4, D) ** 3 + 0.1


class Base(nn.Module):
    """Two linear layers; `between` stands between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.between(self.a(x)))


def simple(between: Callable[[Any, torch.Tensor], torch.Tensor], inner: bool = False, **members: Any) -> Any:
    """A Base whose `between` is given; `inner`: it stands in a submodule of its own."""

    class Model(Base):
        pass

    class Inner(nn.Module):
        pass

    def fill(module: nn.Module) -> None:
        for name, value in members.items():
            value = value() if callable(value) and not isinstance(value, (nn.Module, type)) else value
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                module.register_buffer(name, value)
            else:
                setattr(module, name, value)

    model = Model()
    if inner:
        Inner.forward = lambda self, h: between(self, h)  # type: ignore[assignment,method-assign]
        model.inner = Inner()
        fill(model.inner)
        Model.between = lambda self, h: self.inner(h)  # type: ignore[assignment,method-assign]
    else:
        fill(model)
        Model.between = lambda self, h: between(self, h)  # type: ignore[assignment,method-assign]
    return model, (x(),), {}


# ---- custom autograd functions -------------------------------------------------------------------


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, extra: Any) -> Any:
        ctx.factor = factor
        return x * factor, x + 1, None

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor, _: Any) -> Any:
        return g * ctx.factor * 3 + h, None, None


class WithIndices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        values, indices = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(indices)
        return values.expand_as(x).clone(), indices

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> torch.Tensor:
        return g * 0.5


class InPlaceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 7


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w * 0.1, (g * x).sum(0) * 10


@hazard
def function_straight_through() -> Any:
    return simple(lambda self, h: Straight.apply(h))


@hazard
def function_two_outputs_and_none() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        p, q, nothing = TwoOutputs.apply(h, 0.5, None)
        assert nothing is None
        return p + q

    return simple(between)


@hazard
def function_with_an_output_without_gradient() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        values, indices = WithIndices.apply(h)
        return values + indices

    return simple(between)


@hazard
def function_that_changes_its_input() -> Any:
    return simple(lambda self, h: InPlaceDouble.apply(h * 1.0))


@hazard
def function_of_a_parameter() -> Any:
    return simple(lambda self, h: Scaled.apply(h, self.w), w=nn.Parameter(torch.linspace(0.5, 1, D)))


@hazard
def function_bound_in_an_attribute() -> Any:
    model, args, kwargs = simple(lambda self, h: self.act(h))
    model.act = Straight.apply
    return model, args, kwargs


@hazard
def function_inside_no_grad() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            k = Straight.apply(h)
        return h * k

    return simple(between)


# ---- parameters reached past their module --------------------------------------------------------


@hazard
def parameter_in_a_plain_list() -> Any:
    model, args, kwargs = simple(lambda self, h: h @ self.flat[0] + self.flat[1])
    model.w = nn.Parameter(torch.eye(D) * 0.5)
    model.c = nn.Parameter(torch.ones(D))
    model.flat = [model.w, model.c]
    return model, args, kwargs


@hazard
def parameter_in_a_closure() -> Any:
    w = nn.Parameter(torch.linspace(0.5, 1, D))
    return simple(lambda self, h: torch.cat([h * w, h + w], 0)[:4], w=w)


@hazard
def buffer_in_a_dictionary() -> Any:
    model, args, kwargs = simple(lambda self, h: h * self.table["scale"])
    model.register_buffer("scale", torch.linspace(0.5, 1, D))
    model.table = {"scale": model.scale}
    return model, args, kwargs


@hazard
def tensor_that_is_no_buffer() -> Any:
    model, args, kwargs = simple(lambda self, h: h + self.plain)
    model.plain = torch.linspace(0, 1, D)
    return model, args, kwargs


# ---- hooks ---------------------------------------------------------------------------------------


@hazard
def hook_on_a_tensor() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        return h.tanh()

    return simple(between)


@hazard
def hook_on_a_tensor_registered_after_its_use() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        k = h.tanh()
        h.register_hook(lambda g: g + 1)
        return k + h

    return simple(between)


@hazard
def hook_full_backward() -> Any:
    model, args, kwargs = simple(lambda self, h: h.tanh(), inner=True)
    model.inner.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    return model, args, kwargs


@hazard
def hook_full_backward_pre() -> Any:
    model, args, kwargs = simple(lambda self, h: h.tanh(), inner=True)
    model.inner.register_full_backward_pre_hook(lambda m, go: (go[0] * 5,))
    return model, args, kwargs


@hazard
def hook_forward() -> Any:
    model, args, kwargs = simple(lambda self, h: h.tanh(), inner=True)
    model.inner.register_forward_hook(lambda m, i, o: o * 2 + i[0])
    return model, args, kwargs


@hazard
def hook_forward_pre() -> Any:
    model, args, kwargs = simple(lambda self, h: h.tanh(), inner=True)
    model.inner.register_forward_pre_hook(lambda m, i: (i[0] * 3,))
    return model, args, kwargs


@hazard
def hook_forward_on_a_module_kept_whole() -> Any:
    model, args, kwargs = hook_full_backward()
    model.inner.register_forward_hook(lambda m, i, o: o * 2)
    return model, args, kwargs


@hazard
def parametrized_weight() -> Any:
    model, args, kwargs = simple(
        lambda self, h: self.n(h), n=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
    )
    return model, args, kwargs


@hazard
def spectral_norm_updates_buffers() -> Any:
    return simple(lambda self, h: self.n(h), n=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))


@hazard
def weight_norm_by_hooks() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simple(lambda self, h: self.n(h), n=lambda: nn.utils.weight_norm(nn.Linear(D, D)))


# ---- gradient mode and autocast ------------------------------------------------------------------


@hazard
def context_no_grad() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            k = self.b(h).sigmoid()
        return h * k

    return simple(between)


@hazard
def context_no_grad_inside_autocast() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                k = self.b(h)
            h = self.b(h) * k
        return h.float()

    return simple(between)


@hazard
def context_autocast_inside_no_grad() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            k = self.b(h)
        return h * k

    return simple(between)


@hazard
def context_enable_grad_inside_no_grad() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            k = self.b(h)
            with torch.enable_grad():
                m = self.b(h)
        return h * k + m

    return simple(between)


@hazard
def context_autocast_switched_off_inside() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(h)
            with torch.autocast("cpu", enabled=False):
                h = self.b(h.float())
            h = self.b(h)
        return h.float()

    return simple(between)


@hazard
def context_decorator_no_grad() -> Any:
    @torch.no_grad()
    def scale(h: torch.Tensor) -> torch.Tensor:
        return h.abs().mean() + 1

    return simple(lambda self, h: h / scale(h))


@hazard
def context_inference_mode() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            k = h.abs().mean(-1, keepdim=True)
        return h + k.clone()

    return simple(between)


@hazard
def context_set_grad_enabled_by_mode() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.training):
            k = self.b(h)
        return h * k

    return simple(between)


@hazard
def detached_branch() -> Any:
    return simple(lambda self, h: h * h.detach() + h.data)


# ---- checkpoints ---------------------------------------------------------------------------------


@hazard
def checkpoint_without_reentry() -> Any:
    return simple(lambda self, h: checkpoint(lambda t: self.b(t).tanh(), h, use_reentrant=False))


@hazard
def checkpoint_reentrant() -> Any:
    return simple(lambda self, h: checkpoint(lambda t: self.b(t).tanh(), h, use_reentrant=True))


@hazard
def checkpoint_reentrant_without_gradients_in() -> Any:
    return simple(lambda self, h: h + checkpoint(lambda t: self.b(t).tanh(), h.detach(), use_reentrant=True))


@hazard
def checkpoint_in_a_partial() -> Any:
    model, args, kwargs = simple(lambda self, h: self._checkpoint_fn(lambda t: self.b(t).tanh(), h))
    model._checkpoint_fn = functools.partial(checkpoint, use_reentrant=True)
    return model, args, kwargs


@hazard
def checkpoint_with_dropout() -> Any:
    return simple(
        lambda self, h: checkpoint(lambda t: F.dropout(self.b(t), 0.5, self.training), h, use_reentrant=False)
    )


# ---- buffers -------------------------------------------------------------------------------------


@hazard
def buffer_reassigned_in_a_child() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
        return h - self.mean

    return simple(between, inner=True, mean=torch.zeros(D))


@hazard
def buffer_reassigned_in_the_root() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        k = h + self.mean
        self.mean = self.mean * 0.9 + h.detach().mean(0)
        return k

    return simple(between, mean=torch.zeros(D))


@hazard
def buffer_changed_in_place() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        k = h + self.total
        with torch.no_grad():
            self.total.mul_(0.5).add_(h.mean(0))
        self.seen += 1
        return k + self.total.clone() * self.seen

    return simple(between, total=torch.ones(D), seen=torch.zeros((), dtype=torch.long))


@hazard
def buffer_changed_in_training_only() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
        return h - self.mean

    return simple(between, inner=True, mean=torch.zeros(D))


@hazard
def batch_norm_with_cumulative_average() -> Any:
    return simple(lambda self, h: self.n(h), n=lambda: nn.BatchNorm1d(D, momentum=None))


@hazard
def batch_norm_called_twice() -> Any:
    return simple(lambda self, h: self.n(self.n(h) * 2), n=lambda: nn.BatchNorm1d(D))


@hazard
def batch_norm_without_statistics() -> Any:
    return simple(lambda self, h: self.n(h), n=lambda: nn.BatchNorm1d(D, track_running_stats=False))


# ---- models that look whether they are exported --------------------------------------------------


@hazard
def another_value_when_exported() -> Any:
    return simple(lambda self, h: h * 2 if torch.compiler.is_exporting() else h.tanh())


@hazard
def failure_when_compiled() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("not while compiling")
        return h.tanh()

    return simple(between)


# ---- control flow and values that export cannot read ---------------------------------------------


@hazard
def branch_on_a_value() -> Any:
    return simple(lambda self, h: h.tanh() if h.mean() > 0 else h.sigmoid() * 2, inner=True)


@hazard
def loop_until_a_value() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        count = 0
        while float(h.detach().abs().max()) > 0.2 and count < 5:
            h, count = h * 0.5, count + 1
        return h

    return simple(between, inner=True)


@hazard
def item_as_a_factor() -> Any:
    return simple(lambda self, h: h * h.abs().max().item(), inner=True)


@hazard
def list_of_values() -> Any:
    return simple(lambda self, h: h * sum(h.detach()[0].tolist()), inner=True)


@hazard
def numpy_inside() -> Any:
    return simple(lambda self, h: h + torch.from_numpy(numpy.sort(h.detach().numpy(), axis=-1)), inner=True)


@hazard
def rows_found_by_nonzero() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        rows = (h.sum(-1) > 0).nonzero().flatten()
        return h.index_add(0, rows, h[rows].tanh())

    return simple(between, inner=True)


@hazard
def gradient_inside_forward() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            k = h.detach().requires_grad_()
            (g,) = torch.autograd.grad(k.pow(3).sum(), k)
        return h * g

    return simple(between, inner=True)


@hazard
def vmap_inside() -> Any:
    return simple(lambda self, h: torch.vmap(lambda r: r * r.sum())(h), inner=True)


@hazard
def data_assigned() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        k = h.clone()
        k.data = h.detach() * 2
        return k + h

    return simple(between, inner=True)


# ---- Python state --------------------------------------------------------------------------------


@hazard
def python_random() -> Any:
    return simple(lambda self, h: h * random.random(), inner=True)


@hazard
def numpy_random() -> Any:
    return simple(lambda self, h: h * float(numpy.random.rand()), inner=True)


@hazard
def counter_attribute() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return h * self.count

    model, args, kwargs = simple(between, inner=True)
    model.inner.count = 0
    return model, args, kwargs


@hazard
def list_that_grows() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        self.seen.append(h.shape[0])
        return h * len(self.seen)

    model, args, kwargs = simple(between, inner=True)
    model.inner.seen = []
    return model, args, kwargs


@hazard
def cache_made_on_first_use() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = h.detach().mean(0)
        return h - self.cache

    model, args, kwargs = simple(between, inner=True)
    model.inner.cache = None
    return model, args, kwargs


@functools.lru_cache
def remembered(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length)


@hazard
def function_that_remembers_tensors() -> Any:
    remembered.cache_clear()
    return simple(lambda self, h: h * remembered(h.shape[-1]) + remembered(h.shape[-1]), inner=True)


@hazard
def plain_tensor_changed_in_place() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.total.add_(h.mean(0))
        return h - self.total

    model, args, kwargs = simple(between, inner=True)
    model.inner.total = torch.zeros(D)
    return model, args, kwargs


@hazard
def packed_saved_tensors() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return h * h

    return simple(between, inner=True)


# ---- random numbers of torch ---------------------------------------------------------------------


@hazard
def random_number_that_nobody_reads() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return h + torch.randn_like(h)

    return simple(between)


@hazard
def dropouts() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        h = F.dropout(h, 0.3)
        h = F.alpha_dropout(self.d(h), 0.2, self.training)
        return h + torch.bernoulli(h.detach().sigmoid())

    return simple(between, d=lambda: nn.Dropout(0.5))


@hazard
def drop_path_by_mode() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return h
        return h * (torch.rand(h.shape[0], 1) < 0.5) * 2

    return simple(between, inner=True)


# ---- changes in place and views ------------------------------------------------------------------


@hazard
def input_changed_in_place() -> Any:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            x[:, 0] = 1.0
            return self.b(self.a(x))

    return Model(), (x(),), {}


@hazard
def view_changed_in_place() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        k = h * 2
        row = k[0]
        other = k.t()
        row.add_(1)
        k[:, 1] += self.w
        return other.t() + k

    return simple(between, w=nn.Parameter(torch.ones(4)))


@hazard
def chain_of_changes() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        skip = h
        h += 0.1
        h.mul_(2)
        F.relu_(h)
        return skip + h

    return simple(between)


@hazard
def zeros_filled_piece_by_piece() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h)
        for i in range(3):
            out[:, 2 * i : 2 * i + 2] = h[:, 2 * i : 2 * i + 2] * (i + 1)
        return out

    return simple(between)


# ---- ties, frozen and unused state ---------------------------------------------------------------


@hazard
def tied_linear() -> Any:
    model, args, kwargs = simple(lambda self, h: h)
    model.b.weight = model.a.weight
    return model, args, kwargs


@hazard
def module_under_two_names() -> Any:
    model, args, kwargs = simple(lambda self, h: self.again(h).tanh())
    model.again = model.a
    return model, args, kwargs


@hazard
def frozen_and_unused() -> Any:
    model, args, kwargs = simple(
        lambda self, h: h + self.frozen, frozen=nn.Parameter(torch.ones(D), requires_grad=False)
    )
    model.unused = nn.Linear(3, 3)
    model.a.weight.requires_grad_(False)
    return model, args, kwargs


# ---- structure -----------------------------------------------------------------------------------


@dataclass
class Pair:
    first: torch.Tensor
    second: Any = None
    note: str = ""


class Named(NamedTuple):
    logits: torch.Tensor
    count: int
    more: Any


@hazard
def dataclass_in_and_out() -> Any:
    class Model(Base):
        def forward(self, pair: Pair) -> Pair:
            h = self.a(pair.first)
            return Pair(self.b(h), {"h": h, "given": pair.second}, "done")

    return Model(), (Pair(x(), x() + 1, "in"),), {}


@hazard
def named_tuple_out() -> Any:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> Named:
            h = self.a(x)
            return Named(self.b(h), 3, [None, h, (h.mean(-1),)])

    return Model(), (x(),), {}


@hazard
def nested_arguments() -> Any:
    class Model(Base):
        def forward(self, batch: dict[str, Any], *more: torch.Tensor, flag: bool = False, scale: float = 2.0) -> Any:
            h = self.a(batch["x"]) * scale
            for extra in more:
                h = h + extra
            return {"y": self.b(h) if flag else h, "mask": batch["inner"][0]}

    return Model(), ({"x": x(), "inner": [x() > 0]}, x(), x() * 2), {"flag": True, "scale": 0.5}


@hazard
def outputs_that_are_inputs_and_parameters() -> Any:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.b(self.a(x))
            return h, x, h, self.a.bias, x[0]

    return Model(), (x(),), {}


@hazard
def own_loss_in_a_dictionary() -> Any:
    class Model(Base):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.b(self.a(x))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return Model(), (x(),), {"labels": torch.tensor([0, 3, 5, 1])}


# ---- names ---------------------------------------------------------------------------------------


@hazard
def names_that_clash_with_fx() -> Any:
    model, args, kwargs = simple(lambda self, h: self.code(self.graph(h)))
    model.code, model.graph, model.m = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(2, 2)
    return model, args, kwargs


@hazard
def names_that_are_code() -> Any:
    hostile = ('x" if print("INJECTED") else "y', "with space", "quote'", "class", "new\nline")
    model, args, kwargs = simple(lambda self, h: functools.reduce(lambda v, n: getattr(self, n)(v), hostile, h))
    for name in hostile:
        model.add_module(name, nn.Linear(D, D))
    return model, args, kwargs


# ---- recurrences and dtypes ----------------------------------------------------------------------


@hazard
def lstm_with_tied_biases() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r = nn.LSTM(D, D, bidirectional=True, batch_first=True)
            self.r.bias_ih_l0_reverse = self.r.bias_ih_l0

        def forward(self, x: torch.Tensor) -> Any:
            return self.r(x)

    return Model(), (torch.stack([x(), x() * 0.5]),), {}


@hazard
def mixed_dtypes() -> Any:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        h = self.low(h.to(torch.bfloat16)).float()
        return (h.double() * torch.tensor(0.5, dtype=torch.float64)).to(torch.float32)

    return simple(between, low=lambda: nn.Linear(D, D).to(torch.bfloat16))


@hazard
def complex_numbers() -> Any:
    return simple(
        lambda self, h: torch.view_as_real(torch.fft.fft(h) * self.c).flatten(1)[:, :D],
        c=torch.polar(torch.ones(D), torch.ones(D)),
    )
