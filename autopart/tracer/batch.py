"""Which dimension of each input holds the rows of the batch: asked for, or found by running the model at two sizes."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopart.errors import CaptureError, UsageError
from autopart.runtime.structure import decode, encode, omitted
from autopart.torch_private import FakeTensor, FakeTensorMode
from autopart.tracer.caches import caches_emptied
from autopart.tracer.call import Call, read_call
from autopart.tracer.compare import largest
from autopart.tracer.errors import ModelFailsError
from autopart.tracer.kept_parameters import kept_parameters
from autopart.tracer.quiet import quiet
from autopart.tracer.snapshot import random_states, same_random_state, set_random_states, unmarked
from autopart.tracer.surroundings import neutral_surroundings

Dims = tuple[int | None, ...]

# Assignments tried for one size before giving up.
MOST_CANDIDATES = 64
# A row computed alone may differ from the same row in a batch by rounding only.
ROW_TOLERANCE = 1e-3
# How torch says that a tensor on meta has no values.
READS_VALUES = ("meta tensor", "data-dependent", "_local_scalar_dense")
# A model whose row takes longer is judged by its shapes alone.
SLOW_ROW_S = 0.5
# Runs with other random numbers that tell which outputs depend on them.
OTHER_DRAWS = 4


@dataclass(frozen=True)
class Batch:
    """The rows of an example call.

    Attributes:
        rows: Rows of the example (1 if no input has any).
        dims: Path of each tensor of the call -> the dimension of its rows, or None.
        outputs: Dimension of the rows of each tensor of the model's result; None: unknown, see `output_dims`.
        notes: Sentences for the person who reads the plan.
    """

    rows: int
    dims: Mapping[str, int | None]
    outputs: Dims | None
    notes: tuple[str, ...] = ()

    def resize(self, tensors: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """The tensors with that many rows: the first ones, repeated from the start where there are too few."""
        return resize(tensors, tuple(self.dims.values()), rows)

    def output_dims(self, values: Sequence[torch.Tensor], rows: int) -> list[int | None]:
        """Row dimension of each output of a capture at `rows` rows; values behind the model's own have none."""
        if self.outputs is not None and len(self.outputs) in (len(values), len(values) - 1):
            return [*self.outputs, None][: len(values)]
        if all(d is None for d in self.dims.values()):
            return [None for _ in values]
        return [next((i for i, n in enumerate(v.shape) if n == rows), None) for v in values]


@neutral_surroundings()
def find_batch(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Batch:
    """Rows of an example call, and where they are.

    Args:
        batch_dims: Name or path of an input -> its row dimension, or None; the others are found.

    Raises:
        UsageError: The call does not fit the model, or several different answers are possible.
    """
    return batch_of(model, read_call(model, args, kwargs or {}), batch_dims)


def microbatch_rows(batch: Batch, microbatches: int, global_batch: int | None) -> int:
    """Rows of one microbatch.

    Raises:
        UsageError: The microbatches do not divide the batch, or there are no rows to cut.
    """
    if microbatches < 1:
        raise UsageError(f"microbatches is {microbatches}; it must be at least 1")
    if all(d is None for d in batch.dims.values()):
        if microbatches > 1:
            raise UsageError(
                f"no input has a batch dimension, so it cannot be cut into {microbatches} microbatches", HINT
            )
        return 1
    total = batch.rows if global_batch is None else global_batch
    if total < 1 or total % microbatches:
        near = sorted(range(1, max(total, 1) + 1), key=lambda m: (total % m != 0, abs(m - microbatches)))[:2]
        raise UsageError(
            f"a batch of {total} rows cannot be cut into {microbatches} equal microbatches",
            f"Use {' or '.join(map(str, sorted(near)))} microbatches, or a batch that is a multiple of {microbatches}.",
        )
    return total // microbatches


HINT = (
    "Pass batch_dims={'input name': dimension, ...}, with None for an input that every microbatch gets whole; "
    "for example batch_dims={'x': 1, 'mask': None}."
)


def batch_of(model: nn.Module, call: Call, given: Mapping[str, int | None] | None) -> Batch:
    """The batch of a flattened call; see `find_batch`."""
    if not call.tensors:
        raise UsageError(
            f"the example call of {type(model).__name__} holds no tensor",
            "Pass example_inputs=(tensor, ...) or example_kwargs={'name': tensor, ...}.",
        )
    fixed = _fixed(call, given or {})
    model_tensors = [i for i, path in enumerate(call.paths) if not path.startswith("target")]
    trials = _Trials(model, call)
    working: list[tuple[Dims, Dims]] = []
    if trials.runs:
        for first, dims in _candidates(call, fixed, model_tensors):
            outputs = trials.follow(dims)
            asked = len(fixed) == len(call.tensors)
            if outputs is None or not (asked or trials.rows_are_independent(dims, outputs)):
                continue
            if first:
                return _batch(call, dims, outputs)
            working.append((dims, outputs))
    elif len(fixed) == len(call.tensors):
        return _batch(call, tuple(fixed[i] for i in range(len(call.tensors))), None)
    working = [w for w in working if not any(_covers(other, w[0]) for other, _ in working)]
    # Cutting the first tensor in its first dimension is what people mean, where it is one of several possible answers.
    usual = [w for w in working if model_tensors and w[0][model_tensors[0]] == 0]
    if len(working) == 1 or len(usual) == 1:
        return _batch(call, *(usual or working)[0])
    if len(working) > 1:
        several = "; or ".join(_spell(call, dims) for dims, _ in working[:3])
        raise UsageError(f"the batch dimension could be {several}", HINT)
    if not trials.runs:
        dims, _ = next(
            ((d, f) for f, d in _candidates(call, fixed, model_tensors)),
            (tuple(fixed.get(i) for i in range(len(call.tensors))), False),
        )
        return _batch(call, dims, None, (f"the batch dimension is a guess ({_spell(call, dims)}): {trials.failure}",))
    note = "no batch dimension was found: every microbatch would get all inputs whole"
    return _batch(call, tuple(fixed.get(i) for i in range(len(call.tensors))), None, (note,))


def _batch(call: Call, dims: Dims, outputs: Dims | None, notes: tuple[str, ...] = ()) -> Batch:
    rows = {t.shape[d] for t, d in zip(call.tensors, dims, strict=True) if d is not None}
    if len(rows) > 1:
        raise UsageError(f"the inputs have different numbers of rows: {_spell(call, dims)}", HINT)
    return Batch(rows.pop() if rows else 1, dict(zip(call.paths, dims, strict=True)), outputs, notes)


def _fixed(call: Call, given: Mapping[str, int | None]) -> dict[int, int | None]:
    fixed: dict[int, int | None] = {}
    for name, dim in given.items():
        found = [i for i, (n, p) in enumerate(zip(call.names, call.paths, strict=True)) if name in (n, p)]
        if not found:
            raise UsageError(f"batch_dims names {name!r}; the inputs are {', '.join(call.names)}")
        tensor = call.tensors[found[0]]
        if dim is not None:
            if not -tensor.dim() <= dim < tensor.dim():
                raise UsageError(f"batch_dims says dimension {dim} of {name!r}, whose shape is {tuple(tensor.shape)}")
            dim %= tensor.dim()
        fixed[found[0]] = dim
    return fixed


def _candidates(
    call: Call, fixed: Mapping[int, int | None], model_tensors: Sequence[int]
) -> Iterator[tuple[bool, Dims]]:
    """(is the usual one, assignment): first dimension 0 wherever it has the first tensor's size, then all others."""
    shapes = [tuple(t.shape) for t in call.tensors]
    sizes = [shapes[i][d] for i, d in fixed.items() if d is not None]
    if not sizes:
        sizes = list(dict.fromkeys(n for i in model_tensors for n in shapes[i]))

    def assignment(choose: Any) -> Dims:
        return tuple(fixed[i] if i in fixed else choose(i, shape) for i, shape in enumerate(shapes))

    seen: set[Dims] = set()
    for number, size in enumerate(sizes):
        # A target is not seen by the model's run, so it is cut wherever it has as many rows.
        usual = assignment(
            lambda i, shape, size=size: next(
                (d for d, n in enumerate(shape) if n == size and (d == 0 or i not in model_tensors)), None
            )
        )
        options = [
            [fixed[i]] if i in fixed else [*(d for d, n in enumerate(shape) if n == size), None]
            for i, shape in enumerate(shapes)
        ]
        if math.prod(len(o) for o in options) > MOST_CANDIDATES:
            options = [o if len(o) == 1 else o[:1] for o in options]
        for dims in (usual, *itertools.product(*options)):
            if dims not in seen and any(d is not None for d in dims):
                seen.add(dims)
                yield (number == 0 and dims == usual), dims


def _covers(one: Dims, other: Dims) -> bool:
    """Whether `one` cuts all that `other` cuts, in the same dimensions, and more."""
    return one != other and all(b is None or a == b for a, b in zip(one, other, strict=True))


def _spell(call: Call, dims: Dims) -> str:
    return ", ".join(f"{name}: {dim}" for name, dim in zip(call.names, dims, strict=True))


def resize(tensors: Sequence[torch.Tensor], dims: Sequence[int | None], rows: int) -> list[torch.Tensor]:
    found = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is not None and tensor.shape[dim] != rows:
            have = tensor.shape[dim]
            tensor = (
                tensor.narrow(dim, 0, rows)
                if rows < have
                else torch.cat([tensor] * -(-rows // have), dim).narrow(dim, 0, rows)
            )
        found.append(tensor.contiguous() if dim is not None else tensor)
    return found


class _Trials:
    """Runs the model in evaluation mode: on tensors without values, and on two rows with values where it has any."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model = model
        self.call = call
        tensors = [*model.parameters(), *model.buffers()]
        self.on_meta = any(t.device.type == "meta" for t in tensors)
        self.failure = ""
        self.inputs_on_meta = any(t.device.type == "meta" for t in call.tensors)
        self.example: list[tuple[int, ...]] = []
        self.with_values = False
        self.draws = False
        try:
            self.example = self._shapes(call.tensors)
        except UsageError:
            raise
        except Exception as error:
            self._run_with_values(error)
        self.runs = bool(self.example) or not self.failure

    def _run_with_values(self, error: Exception) -> None:
        """The example itself: a failure here is the call's own."""
        self.with_values = not self.on_meta
        try:
            if self.on_meta:
                raise error
            self.example = self._shapes(self.call.tensors)
        except Exception as failure:
            if self.on_meta and any(word in str(failure) for word in READS_VALUES):
                self.failure = f"the model cannot be run without values ({_first_line(failure)})"
                return
            raise ModelFailsError(
                f"{type(self.model).__name__} fails on the example inputs: {_first_line(failure)}",
                "Pass example inputs with which model(*example_inputs, **example_kwargs) runs.",
            ) from None

    def _outputs(
        self, tensors: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Tensors of the model's result in evaluation mode, with other parameters and buffers where given."""
        args, kwargs, *_ = decode(self.call.structure, tensors)
        flags = {m: m.training for m in self.model.modules()}
        self.model.eval()
        try:
            with torch.enable_grad(), unmarked(self.model, values=True), kept_parameters(self.model):
                before = random_states()
                result = torch.func.functional_call(self.model, dict(state or {}), args, kwargs)
                self.draws = self.draws or not same_random_state(list(before.values()), list(random_states().values()))
        finally:
            for module, flag in flags.items():
                module.training = flag
        return encode(result, "", omitted)[1]

    def _shapes(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        with quiet(), caches_emptied(self.model):
            if self.on_meta:
                return [tuple(t.shape) for t in self._outputs([t.to("meta") for t in tensors])]
            if self.with_values:
                return [tuple(t.shape) for t in self._outputs(tensors)]
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
                fakes = {name: mode.from_tensor(t) for name, t in state.items()}
                return [tuple(t.shape) for t in self._outputs([mode.from_tensor(t.detach()) for t in tensors], fakes)]

    def follow(self, dims: Dims) -> Dims | None:
        """Row dimension of each output when the inputs have twice the rows; None if an output does not follow."""
        rows = next(t.shape[d] for t, d in zip(self.call.tensors, dims, strict=True) if d is not None)
        try:
            doubled = self._shapes(resize(self.call.tensors, dims, 2 * rows))
        except Exception:
            return None
        if len(doubled) != len(self.example):
            return None
        found: list[int | None] = []
        for before, after in zip(self.example, doubled, strict=True):
            differing = [d for d in range(len(before)) if len(after) == len(before) and before[d] != after[d]]
            follows = len(differing) == 1 and before[differing[0]] == rows and after[differing[0]] == 2 * rows
            if before == after:
                found.append(None)
            elif follows:
                found.append(differing[0])
            else:
                return None
        unjoined = any(d is None and len(s) > 0 for d, s in zip(found, self.example, strict=True))
        return None if unjoined and all(d is None for d in found) else tuple(found)

    def _drawn(self, tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Outputs with other random numbers."""
        states = random_states()
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            return self._outputs(tensors)
        finally:
            set_random_states(states)

    def rows_are_independent(self, dims: Dims, outputs: Dims) -> bool:
        """Whether each of two rows gives alone what it gives beside the other; True where there are no values."""
        rows = next(t.shape[d] for t, d in zip(self.call.tensors, dims, strict=True) if d is not None)
        if self.on_meta or self.inputs_on_meta or rows < 2:
            return True
        try:
            start = time.perf_counter()
            alone = [self._outputs(resize(self.call.tensors, dims, 1))]
            if time.perf_counter() - start > SLOW_ROW_S:
                return True
            pair = resize(self.call.tensors, dims, 2)
            together = self._outputs(pair)
        except Exception:
            return True
        try:
            alone.append(
                self._outputs([t if d is None else t.narrow(d, 1, 1) for t, d in zip(pair, dims, strict=True)])
            )
            others = [self._drawn(pair, seed) for seed in range(OTHER_DRAWS)] if self.draws else []
        except Exception:
            return False
        if any(isinstance(t, FakeTensor) for t in together):
            raise CaptureError(
                f"{type(self.model).__name__} keeps tensors of one run for the next outside its modules",
                "Keep them in buffers, or make them anew in each forward.",
            )
        for row, single in enumerate(alone):
            for index, (dim, two, one) in enumerate(zip(outputs, together, single, strict=True)):
                # What depends on random numbers cannot be compared.
                drawn = any(not torch.equal(two, other[index]) for other in others)
                if dim is None or not two.is_floating_point() or drawn:
                    continue
                wanted, got = two.detach().narrow(dim, row, 1), one.detach()
                if wanted.numel() and float((wanted - got).abs().max()) > ROW_TOLERANCE * max(largest([wanted]), 1e-6):
                    return False
        return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
