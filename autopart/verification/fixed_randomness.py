"""Randomness taken out of a run, in the same way in model and package: dropout set to zero, draws made constant.

Torch only: worker processes load this file by its path.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

# Function -> (position, name) of the probability that is set to zero.
DROPOUT: dict[Callable[..., Any], tuple[int, str]] = {
    F.dropout: (1, "p"),
    F.dropout1d: (1, "p"),
    F.dropout2d: (1, "p"),
    F.dropout3d: (1, "p"),
    F.alpha_dropout: (1, "p"),
    F.feature_alpha_dropout: (1, "p"),
    torch.dropout: (1, "p"),
    torch.dropout_: (1, "p"),
    torch.feature_dropout: (1, "p"),
    torch.feature_dropout_: (1, "p"),
    torch.alpha_dropout: (1, "p"),
    torch.alpha_dropout_: (1, "p"),
    torch.feature_alpha_dropout: (1, "p"),
    torch.feature_alpha_dropout_: (1, "p"),
    torch.native_dropout: (1, "p"),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
}

# Their dropout follows the list of weights, whose place depends on whether sequences are packed.
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
AFTER_WEIGHTS = 3


def _pattern(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Numbers between low and high that depend on the position alone."""
    count = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return (low + (high - low) * ((count * 0.618033988749895) % 1.0)).reshape(like.shape).to(like.dtype)


def _fill(low: float, high: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.detach().copy_(_pattern(t, low, high))


# Function -> what it draws instead; the draw is made first, for its shape, dtype and device.
DRAWS: dict[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor]] = {
    # A mask that keeps: drop path then only scales.
    torch.Tensor.bernoulli_: lambda t: t.detach().fill_(1),
    torch.Tensor.bernoulli: lambda t: t.fill_(1),
    torch.bernoulli: lambda t: t.fill_(1),
    torch.rand: _fill(0.0, 1.0),
    torch.rand_like: _fill(0.0, 1.0),
    torch.Tensor.uniform_: _fill(0.0, 1.0),
    torch.randn: _fill(-1.5, 1.5),
    torch.randn_like: _fill(-1.5, 1.5),
    torch.normal: _fill(-1.5, 1.5),
    torch.Tensor.normal_: _fill(-1.5, 1.5),
}


# Functions whose draws are those of one seed every time: what they give depends on shapes and arguments alone.
SEEDED = {
    "rrelu",
    "rrelu_",
    "rrelu_with_noise",
    "gumbel_softmax",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "random_",
    "multinomial",
    "poisson",
    "binomial",
    "randperm",
    "randint",
    "randint_like",
    "_standard_gamma",
    "_sample_dirichlet",
}


def _name(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.partition("::")[2]
    return getattr(func, "__name__", str(func))


# A function mode is off while one of these runs, although activation checkpoints call modules again in it.
BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


# A package may write an operator as `torch.ops.aten...`, where the model has the function of that name.
OPERATORS = {_name(func): func for func in (*DROPOUT, *RECURRENT, *DRAWS)}


def _weights(args: tuple[Any, ...]) -> int:
    return max(i for i, argument in enumerate(args) if isinstance(argument, (list, tuple)))


class _Generator:
    """A global generator of Python or numpy: how its state is read and written, as it was, and as it starts."""

    def __init__(
        self, name: str, read: Callable[[], Any], write: Callable[[Any], None], seed: Callable[[int], None]
    ) -> None:
        self.name, self.read, self.write = name, read, write
        self.before = read()
        seed(0)
        self.start = read()

    def has_moved(self) -> bool:
        return _mark(self.read()) != _mark(self.start)


def _mark(state: Any) -> tuple[Any, ...]:
    """What of a generator's state moves with every draw: numpy's is a name, an array of words, and a position."""
    words = state[1]
    return state if isinstance(words, tuple) else (int(words[0]), *state[2:])


class FixedRandomness(TorchFunctionMode):
    """While active, dropout keeps everything and random draws give numbers that depend on their position alone.

    That holds for modules that are called again in backward too (activation checkpoints).

    Python's and numpy's own generators start anew in each call of a module: a module that is kept whole in a package
    draws there what it draws in the model.

    Attributes:
        dropout: Whether dropout was met.
        draws: Names of other random functions that were met.
        unknown: Names of functions that drew numbers which nobody fixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout = False
        self.draws: set[str] = set()
        self.unknown: set[str] = set()
        self._generators: list[_Generator] = []
        self._hooks: list[Any] = []
        self._in_backward = False
        self._depth = 0  # of module calls in backward

    def __enter__(self) -> FixedRandomness:
        self._generators = [_Generator("Python's random", random.getstate, random.setstate, random.seed)]
        if (numpy := sys.modules.get("numpy")) is not None:
            shared = numpy.random
            self._generators.append(_Generator("numpy.random", shared.get_state, shared.set_state, shared.seed))
        self._hooks = [
            register_module_forward_pre_hook(lambda *_: self._begin()),
            register_module_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        for generator in self._generators:
            generator.write(generator.before)

    def _begin(self) -> None:
        """A module is called."""
        if self._in_backward:
            if self._depth == 0:
                super().__enter__()
            self._depth += 1
        self._look()
        for generator in self._generators:
            generator.write(generator.start)

    def _end(self) -> None:
        """A call of a module is over, perhaps by an error: torch ends recomputation with one."""
        self._look()
        if self._in_backward:
            self._depth -= 1
            if self._depth == 0:
                super().__exit__(None, None, None)

    def _look(self) -> None:
        """Note the generators that were used since they were started."""
        self.draws.update(g.name for g in self._generators if g.has_moved())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in BACKWARD and not self._in_backward:
            self._in_backward = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._in_backward = False
        options = dict(kwargs or {})
        name = _name(func)
        known: Any = OPERATORS.get(name, func) if isinstance(func, torch._ops.OpOverload) else func
        if known in DROPOUT or known in RECURRENT:
            position, probability = DROPOUT.get(known) or (_weights(args) + AFTER_WEIGHTS, "dropout")
            given = options.get(probability, args[position] if len(args) > position else None)
            self.dropout |= bool(given)
            if probability in options or len(args) <= position:
                options[probability] = 0.0
            else:
                args = (*args[:position], 0.0, *args[position + 1 :])
            return func(*args, **options)
        before = torch.get_rng_state()
        if known in DRAWS:
            result = func(*args, **options)
            DRAWS[known](result)
        elif name in SEEDED:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                drawn_from = torch.get_rng_state()
                result = func(*args, **options)
                if torch.equal(torch.get_rng_state(), drawn_from):
                    return result
        else:
            result = func(*args, **options)
            if not torch.equal(torch.get_rng_state(), before):
                self.unknown.add(name)
            return result
        self.draws.add(name)
        return result

    def notes(self) -> list[str]:
        """What was changed, for the person who reads the report."""
        found = ["dropout was set to zero in both"] if self.dropout else []
        if self.draws:
            found.append(f"random draws ({', '.join(sorted(self.draws))}) were replaced by fixed numbers in both")
        if self.unknown:
            found.append(f"{', '.join(sorted(self.unknown))} drew random numbers, which differ between the two")
        return found
