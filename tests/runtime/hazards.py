"""Hand-written four-stage packages, one for each thing that can go wrong at a boundary.

Microbatches of 2 rows, width 8. `HAZARDS` maps a name to a function that builds the package's table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopart.runtime.interface import Input, Output, Pipeline, Stage, Tie, Value

ROWS, WIDTH, MICROBATCHES = 2, 8, 4
FLOAT = torch.float64

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (WIDTH, WIDTH),
    "vector": (WIDTH,),
    "table": (11, WIDTH),
}


def drawn(name: str, shape: Sequence[int]) -> torch.Tensor:
    """The same numbers for the same name in every process."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
    return torch.randn(*shape, dtype=FLOAT, generator=torch.Generator().manual_seed(seed)) * 0.4


def stage(
    takes: str,
    gives: str,
    function: Callable[..., Any],
    frozen: bool = False,
    build: Callable[[nn.Module], None] | None = None,
    whole_backward: bool = False,
    **parameters: str,
) -> Stage:
    """A stage whose forward is `function(self, *takes)`; parameters are name="matrix" and the like."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, kind in parameters.items():
                value = nn.Parameter(drawn(name, SHAPES[kind]), requires_grad=not frozen)
                self.register_parameter(name, value)
            if build is not None:
                build(self)

        def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = function(self, *values)
            return result if isinstance(result, tuple) else (result,)

    return Stage(Written, tuple(takes.split()), tuple(gives.split()), whole_backward)


def value(name: str, *shape: int, dtype: torch.dtype = FLOAT, grad: bool = True) -> Value:
    return Value(name, shape or (ROWS, WIDTH), dtype, grad)


X = Input("x", "args[0]", (ROWS, WIDTH), FLOAT, 0)
IDS = Input("ids", "args[0]", (ROWS,), torch.int64, 0, maximum=11)
LABELS = Input("labels", "kwargs['labels']", (ROWS,), torch.int64, 0, maximum=WIDTH)
SCALE = Input("scale", "kwargs['scale']", (WIDTH,), FLOAT, None)


def package(
    stages: Sequence[Stage],
    values: Sequence[Value] = (),
    inputs: Sequence[Input] = (X,),
    outputs: Sequence[str] = (),
    ties: Sequence[Tie] = (),
) -> Pipeline:
    """The table of a package; a value crosses every boundary between its producer and its last reader."""
    made = {name: s for s, part in enumerate(stages) for name in part.gives}
    table = {v.name: v for v in values}
    readers = {name: [s for s, part in enumerate(stages) if name in part.takes] for name in made}
    for name in outputs:
        readers[name].append(len(stages) - 1)
    boundaries = tuple(
        tuple(
            table.get(name, value(name))
            for name in made
            if made[name] <= s < max(readers[name], default=-1)
            or (name in table and made[name] == s and not readers[name])
        )
        for s in range(len(stages) - 1)
    )
    names = {}
    for s, part in enumerate(stages):
        for key in part.module().state_dict():
            names[f"s{s}.{key}"] = (s, key)
    return Pipeline(
        model="Hand",
        mode="training",
        dtype=FLOAT,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        microbatch_size=ROWS,
        inputs=tuple(inputs),
        call={"constant": None},
        outputs=tuple(Output(name, name, 0) for name in outputs),
        result={"list": [{"tensor": i} for i in range(len(outputs))]},
        loss="loss",
        loss_name="loss",
        stages=tuple(stages),
        boundaries=boundaries,
        ties=tuple(ties),
        names=names,
    )


def layer(takes: str, gives: str, weight: str, **options: Any) -> Stage:
    return stage(takes, gives, lambda self, x: torch.tanh(x @ getattr(self, weight)), **{weight: "matrix"}, **options)


def head(takes: str = "c", weight: str = "w3") -> Stage:
    return stage(takes, "loss", lambda self, x, *_: (x @ getattr(self, weight)).square().mean(), **{weight: "matrix"})


A, B, C = layer("x", "a", "w0"), layer("a", "b", "w1"), layer("b", "c", "w2")


def plain() -> Pipeline:
    return package([A, B, C, head()])


def untouched_relay() -> Pipeline:
    last = stage("c a", "loss", lambda self, c, a: ((c + a) @ self.w3).square().mean(), w3="matrix")
    return package([A, B, C, last])


def pass_through_stage() -> Pipeline:
    return package([A, stage("", "", lambda self: ()), layer("a", "c", "w2"), head()])


def several_consumers() -> Pipeline:
    third = stage("a b", "c", lambda self, a, b: torch.tanh(a * 0.5 + b @ self.w2), w2="matrix")
    last = stage("a b c", "loss", lambda self, a, b, c: ((a * b + c) @ self.w3).square().mean(), w3="matrix")
    return package([A, B, third, last])


def duplicate_output() -> Pipeline:
    def twice(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ self.w1
        return y, y

    return package(
        [
            A,
            stage("a", "b1 b2", twice, w1="matrix"),
            stage("b1 b2", "c", lambda self, p, q: p * self.v2 + q.sin(), v2="vector"),
            head(),
        ]
    )


def parameter_crossing() -> Pipeline:
    first = stage("x", "a w", lambda self, x: (torch.tanh(x @ self.w0), self.w0), w0="matrix")
    third = stage("b w", "c", lambda self, b, w: torch.tanh(b @ w.t() + self.v2), v2="vector")
    return package([first, B, third, head()], [value("w", WIDTH, WIDTH)])


def scalar_crossing() -> Pipeline:
    first = stage("x", "a s", lambda self, x: (x @ self.w0, self.w0.square().sum()), w0="matrix")
    last = stage("c s", "loss", lambda self, c, s: (c @ self.w3).square().mean() + s * 0.1, w3="matrix")
    return package([first, B, C, last], [Value("s", (), FLOAT, True)])


def no_parameter_stage() -> Pipeline:
    return package([A, stage("a", "b", lambda self, x: x.sin()), C, head()])


def no_parameter_ends() -> Pipeline:
    return package(
        [
            stage("x", "a", lambda self, x: x.sin()),
            layer("a", "b", "w1"),
            C,
            stage("c", "loss", lambda self, c: c.square().mean()),
        ],
        [value("a", grad=False)],
    )


def frozen_middle_stage() -> Pipeline:
    return package([A, layer("a", "b", "w1", frozen=True), C, head()])


def weight_used_twice() -> Pipeline:
    second = stage("a", "b", lambda self, x: torch.tanh(x @ self.w1) @ self.w1 + self.v1, w1="matrix", v1="vector")
    third = stage("b", "c", lambda self, x: torch.tanh(x @ self.w2) @ self.w2.t(), w2="matrix")
    return package([A, second, third, head()])


def tied_weight() -> Pipeline:
    last = stage("c", "loss", lambda self, c: (c @ self.w0.t() + self.v3).square().mean(), w0="matrix", v3="vector")
    return package([A, B, C, last], ties=[Tie(((0, "w0"), (3, "w0")))])


def tied_in_three_stages() -> Pipeline:
    third = stage("b", "c", lambda self, b: torch.tanh(b @ self.w0), w0="matrix")
    last = stage("c", "loss", lambda self, c: (c @ self.w0.t()).square().mean(), w0="matrix")
    return package([A, B, third, last], ties=[Tie(((0, "w0"), (2, "w0"), (3, "w0")))])


def bool_crossing() -> Pipeline:
    first = stage("x", "a m", lambda self, x: (torch.tanh(x @ self.w0), x > 0), w0="matrix")
    third = stage("b m", "c", lambda self, b, m: torch.where(m, b @ self.w2, b), w2="matrix")
    return package([first, B, third, head()], [value("m", dtype=torch.bool, grad=False)])


def int_crossing() -> Pipeline:
    first = stage("x", "a i", lambda self, x: (torch.tanh(x @ self.w0), x.argmax(1)), w0="matrix")
    last = stage("c i", "loss", lambda self, c, i: F.cross_entropy(c @ self.w3, i), w3="matrix")
    return package([first, B, C, last], [value("i", ROWS, dtype=torch.int64, grad=False)])


def int_into_later_embedding() -> Pipeline:
    first = stage("ids", "a i", lambda self, i: (self.t0[i], (i * 7) % 11), t0="table")
    third = stage("b i", "c", lambda self, b, i: b + self.t2[i], t2="table")
    return package([first, B, third, head()], [value("i", ROWS, dtype=torch.int64, grad=False)], [IDS])


def branch_from_parameters_and_ids() -> Pipeline:
    third = stage("ids", "c", lambda self, i: torch.tanh(self.t2[i] @ self.w2), t2="table", w2="matrix")
    last = stage("b c", "loss", lambda self, b, c: ((b + c) @ self.w3).square().mean(), w3="matrix")
    return package([stage("ids", "a", lambda self, i: self.t0[i], t0="table"), B, third, last], (), [IDS])


def float_mask() -> Pipeline:
    first = stage("x", "a m", lambda self, x: (torch.tanh(x @ self.w0), (x > 0).to(FLOAT)), w0="matrix")
    last = stage("c m", "loss", lambda self, c, m: (c @ self.w3 * m).square().mean(), w3="matrix")
    return package([first, B, C, last], [value("m", grad=False)])


def early_output() -> Pipeline:
    first = stage(
        "x", "a e", lambda self, x: (torch.tanh(x @ self.w0), x @ self.w0 @ self.u0), w0="matrix", u0="matrix"
    )
    return package([first, B, C, head()], [value("e", grad=False)], outputs=["e"])


def output_is_the_main_value() -> Pipeline:
    last = stage("c", "y loss", lambda self, c: ((y := c @ self.w3), y.square().mean()), w3="matrix")
    return package([A, B, C, last], [value("b", grad=True)], outputs=["b", "y"])


def unused_value() -> Pipeline:
    second = stage("a", "b u", lambda self, a: (torch.tanh(a @ self.w1), a * 3), w1="matrix")
    return package([A, second, C, head()], [value("u", grad=True)])


def loss_is_a_view() -> Pipeline:
    last = stage("c", "loss", lambda self, c: (c @ self.w3).square().mean().reshape(1, 1)[0, 0], w3="matrix")
    return package([A, B, C, last])


def views_and_strides() -> Pipeline:
    first = stage("x", "a", lambda self, x: torch.tanh(x @ self.w0).t(), w0="matrix")
    second = stage("a", "b", lambda self, a: (a.t() @ self.w1)[:, ::2].expand(3, ROWS, 4), w1="matrix")
    third = stage(
        "b", "c", lambda self, b: (b.sum(0).repeat(1, 2) @ self.w2).view(2, 2, 4).permute(2, 0, 1), w2="matrix"
    )
    last = stage(
        "c", "loss", lambda self, c: (c.permute(1, 2, 0).reshape(ROWS, 8) @ self.w3).square().mean(), w3="matrix"
    )
    return package([first, second, third, last], [value("a", WIDTH, ROWS), value("b", 3, ROWS, 4), value("c", 4, 2, 2)])


def inplace_on_received() -> Pipeline:
    first = stage("x", "a", lambda self, x: x @ self.w0, w0="matrix")
    second = stage("a", "b", lambda self, a: (a.mul_(2.0) @ self.w1).add_(1.0), w1="matrix")
    third = stage("b", "c", lambda self, b: b.relu_() @ self.w2, w2="matrix")
    return package([first, second, third, head()])


def inplace_on_received_mask() -> Pipeline:
    first = stage("x", "a m", lambda self, x: (torch.tanh(x @ self.w0), (x > 0).to(FLOAT)), w0="matrix")
    third = stage("b m", "c", lambda self, b, m: b @ self.w2 * m.add_(1.0), w2="matrix")
    return package([first, B, third, head()], [value("m", grad=False)])


def inplace_on_input() -> Pipeline:
    first = stage("x scale", "a", lambda self, x, s: torch.tanh(x.mul_(2.0) @ self.w0) * s.add_(1.0), w0="matrix")
    return package(
        [first, B, stage("b x", "c", lambda self, b, x: b @ self.w2 + x, w2="matrix"), head()], (), [X, SCALE]
    )


def labels_and_shared_input() -> Pipeline:
    third = stage("b scale", "c", lambda self, b, s: torch.tanh(b @ self.w2) * s, w2="matrix")
    last = stage("c labels", "loss", lambda self, c, y: F.cross_entropy(c @ self.w3, y), w3="matrix")
    return package([A, B, third, last], (), [X, LABELS, SCALE])


def frozen_prefix() -> Pipeline:
    return package(
        [layer("x", "a", "w0", frozen=True), layer("a", "b", "w1", frozen=True), C, head()],
        [value("a", grad=False), value("b", grad=False)],
    )


def independent_output() -> Pipeline:
    third = stage("ids", "c", lambda self, i: self.t2[i] @ self.w2, t2="table", w2="matrix")
    last = stage("c", "loss", lambda self, c: (c @ self.w3).square().mean(), w3="matrix")
    first = stage("ids", "a", lambda self, i: self.t0[i], t0="table", frozen=True)
    return package(
        [first, layer("a", "b", "w1", frozen=True), third, last],
        [value("a", grad=False), value("b", grad=False)],
        [IDS],
    )


def no_grad_stage() -> Pipeline:
    def without(self: Any, a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.tanh(a @ self.w1)

    last = stage("c a", "loss", lambda self, c, a: ((c + a) @ self.w3).square().mean(), w3="matrix")
    return package([A, stage("a", "b", without, w1="matrix"), C, last], [value("b", grad=False)])


def complex_crossing() -> Pipeline:
    first = stage("x", "a z", lambda self, x: (x @ self.w0, torch.polar(x.abs() + 1, x @ self.w0)), w0="matrix")
    last = stage("c z", "loss", lambda self, c, z: (c @ self.w3 * z.real + z.imag).square().mean(), w3="matrix")
    return package([first, B, C, last], [value("z", dtype=torch.complex128)])


def batch_norm_statistics() -> Pipeline:
    def norm(module: nn.Module) -> None:
        module.norm = nn.BatchNorm1d(WIDTH, dtype=FLOAT)

    second = stage("a", "b", lambda self, a: self.norm(a @ self.w1), build=norm, w1="matrix")
    third = stage("b", "c", lambda self, b: self.norm(b @ self.w2), build=norm, w2="matrix")
    return package([A, second, third, head()])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w, x * 2

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return first @ w.t() + 2 * second, x.t() @ first


def custom_function() -> Pipeline:
    def call(self: Any, a: torch.Tensor) -> torch.Tensor:
        p, q = Doubled.apply(a, self.w1)
        return p + q.sin()

    return package([A, stage("a", "b", call, w1="matrix", whole_backward=True), C, head()])


def gradient_hook() -> Pipeline:
    def call(self: Any, a: torch.Tensor) -> torch.Tensor:
        h = a @ self.w1
        if h.requires_grad:
            h.register_hook(lambda g: g * 1.5)
        return torch.tanh(h)

    return package([A, stage("a", "b", call, w1="matrix", whole_backward=True), C, head()])


HAZARDS: dict[str, Callable[[], Pipeline]] = {
    f.__name__: f
    for f in (
        plain,
        untouched_relay,
        pass_through_stage,
        several_consumers,
        duplicate_output,
        parameter_crossing,
        scalar_crossing,
        no_parameter_stage,
        no_parameter_ends,
        frozen_middle_stage,
        weight_used_twice,
        tied_weight,
        tied_in_three_stages,
        bool_crossing,
        int_crossing,
        int_into_later_embedding,
        branch_from_parameters_and_ids,
        float_mask,
        early_output,
        output_is_the_main_value,
        unused_value,
        loss_is_a_view,
        views_and_strides,
        inplace_on_received,
        inplace_on_received_mask,
        inplace_on_input,
        labels_and_shared_input,
        frozen_prefix,
        independent_output,
        no_grad_stage,
        complex_crossing,
        batch_norm_statistics,
        custom_function,
        gradient_hook,
    )
}
