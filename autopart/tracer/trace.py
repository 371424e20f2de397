"""trace(): from a model and an example call to a Graph."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autopart.errors import CaptureError, UsageError
from autopart.graph import Capture, Graph, InputSpec, Mode, OutputSpec
from autopart.tracer.autograd import stamp_requires_grad
from autopart.tracer.batch import Batch, batch_of, microbatch_rows
from autopart.tracer.call import NO_TARGET, STAND_IN, Call, Recording, read_call
from autopart.tracer.capture import Capturer
from autopart.tracer.check import disagreement
from autopart.tracer.colocation import colocated_sets
from autopart.tracer.errors import ModelFailsError
from autopart.tracer.initialization import initialization_rules
from autopart.tracer.modes import Modes
from autopart.tracer.recomputation import refuse_repeated_changes
from autopart.tracer.state import StateTable
from autopart.tracer.surroundings import neutral_surroundings


@neutral_surroundings()
def trace(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: Mode = "training",
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    microbatches: int = 1,
    global_batch: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dtype: torch.dtype | None = None,
    check: bool = True,
) -> Graph:
    """Capture a model at one microbatch, in training and in evaluation mode.

    Args:
        model: Any module; its weights may live on `meta`. It is left as it was.
        args, kwargs: An example global batch, as the model would be called with it.
        mode: "training" captures both modes and a loss; "inference" only evaluation.
        loss_fn, target: `loss_fn(output, target)` is captured behind the model. Without it the model's own loss is used
            (an output named `loss`, or a floating scalar that is the whole output or its first element), else a
            stand-in.
        microbatches: Parts that a global batch is cut into.
        global_batch: Rows of a global batch when they are not those of the example, whose rows are then repeated or
            cut.
        batch_dims: Name or path of an input -> dimension of its rows, or None for an input without rows. Found by
            running the model when not given.
        dtype: Capture the model and its floating inputs in this dtype instead of their own.
        check: Compare the captures with the model itself over two steps where the weights are real.

    Raises:
        UsageError: An argument does not fit, or the batch dimension cannot be told.
        CaptureError: The model cannot be captured without changing what it computes.
    """
    if mode not in ("training", "inference"):
        raise UsageError(f"mode is {mode!r}; it must be 'training' or 'inference'")
    if loss_fn is not None and target is None:
        raise UsageError(
            "loss_fn is given without target", "Pass target=..., the second argument of loss_fn(output, target)."
        )
    training = mode == "training"
    notes: list[str] = []
    if dtype is not None:
        model = in_dtype(model, dtype)
    wanted = target if training and loss_fn is not None else NO_TARGET
    with leaving_model_as_it_was(model, notes), blaming_dtype(dtype):
        call = read_call(model, args, kwargs or {}, wanted)
        if dtype is not None:
            call = call.with_tensors([t.to(dtype) if t.is_floating_point() else t for t in call.tensors])
        batch = batch_of(model, call, batch_dims)
        rows = microbatch_rows(batch, microbatches, global_batch)
        notes += batch.notes
        small = call.with_tensors(batch.resize(call.tensors, rows))
        modes = Modes(model)
        if training:
            notes += modes.sentences()
        job = _Job(modes, small, batch, rows, mode, loss_fn if training else None, dtype, notes)
        graph = job.graph(deny_export=False)
        if not check:
            return graph
        for deny_export in (False, True):
            if deny_export:
                graph = job.graph(deny_export=True)
            found, more = disagreement(graph, modes, small.tensors, job.loss_fn)
            if found is None:
                return replace(graph, notes=(*graph.notes, *more))
        raise CaptureError(
            f"the captured graph of {type(model).__name__} computes something else than the model: {found}",
            "Look for Python state, random numbers or hooks in forward; please report the model if there are none.",
        )


@dataclass
class _Job:
    """What both captures of one trace have in common."""

    modes: Modes
    call: Call
    batch: Batch
    rows: int
    mode: Mode
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    dtype: torch.dtype | None
    notes: list[str]

    def graph(self, deny_export: bool) -> Graph:
        """Capture both modes and put everything together."""
        training = self.mode == "training"
        model = self.modes.model
        notes = list(self.notes)
        state = StateTable.of(model)
        capturer = Capturer(self.modes, self.call, state, loss_fn=self.loss_fn, training=training, notes=notes)
        capturer.deny_export = deny_export
        captures: dict[bool, Capture] = {}
        records: dict[bool, Recording] = {}
        for train_mode in (True, False) if training else (False,):
            graph, records[train_mode] = capturer.capture(train_mode)
            stamp_requires_grad(graph, state.entries)
            refuse_repeated_changes(graph, state.entries, type(model).__name__)
            captures[train_mode] = Capture(graph, colocated_sets(graph))
            for node in graph.nodes:
                if node.op == "get_attr":
                    state.use(str(node.target))
        for path in capturer.opaque:
            state.use_below(path)
        record = records[training]
        if training:
            if record.loss_name == STAND_IN:
                notes.append(f"neither loss_fn nor a loss of the model is given: trained on a {STAND_IN}")
            notes += align_outputs(captures[False].graph, records[False], captures[True].graph, record)
        initialization, unknown = initialization_rules(model, state.entries)
        primary = captures[training].graph
        placeholders = [n for n in primary.nodes if n.op == "placeholder"]
        specs = zip(placeholders, self.call.paths, self.call.tensors, self.batch.dims.values(), strict=True)
        values = [n.meta["val"] for n in output_of(primary)]
        dims = self.batch.output_dims(values, self.rows)
        return Graph(
            name=type(model).__name__,
            mode=self.mode,
            training=captures.get(True),
            evaluation=captures[False],
            state=dict(state.entries),
            inputs=tuple(InputSpec(n.name, path, tuple(t.shape), t.dtype, dim) for n, path, t, dim in specs),
            call=self.call.structure,
            outputs=tuple(
                OutputSpec(path, tuple(v.shape), v.dtype, dim)
                for path, v, dim in zip(record.paths, values, dims, strict=True)
            ),
            result=record.result,
            loss=record.loss,
            loss_name=record.loss_name,
            opaque=dict(capturer.calls),
            microbatch_size=self.rows,
            dtype=self.dtype or main_dtype(state),
            notes=tuple(dict.fromkeys([*notes, *capturer.sentences(), *record.sentences(), *unknown])),
            initialization=initialization,
            modules={path: type(module) for path, module in model.named_modules()},
        )


def align_outputs(graph: fx.Graph, record: Recording, wanted_graph: fx.Graph, wanted: Recording) -> list[str]:
    """Give the evaluation graph the outputs of the training graph; what evaluation mode does not return becomes None.

    Returns:
        A note, where the model returns different things in the two modes.
    """
    if record.paths == wanted.paths:
        return []
    values = dict(zip(record.paths, output_of(graph), strict=True))
    if "output" in values:  # a single tensor stands for the first one of its shape
        shape = values["output"].meta["val"].shape
        for path, node in zip(wanted.paths, output_of(wanted_graph), strict=True):
            if path != "loss" and node.meta["val"].shape == shape:
                values[path] = values["output"]
                break
    (output,) = (n for n in graph.nodes if n.op == "output")
    output.args = (tuple(values.get(path) for path in wanted.paths),)
    missing = ", ".join(path for path in wanted.paths if path not in values)
    return [f"in evaluation mode the model returns something else: without {missing}"]


def output_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the graph gives back."""
    (node,) = (n for n in graph.nodes if n.op == "output")
    return list(node.args[0])  # type: ignore[arg-type]


@contextmanager
def blaming_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """A model that fails when it was converted is likely to fail because of that."""
    try:
        yield
    except ModelFailsError as error:
        if dtype is None:
            raise
        raise ModelFailsError(
            error.message,
            f"It was converted to {dtype}, as dtype asks. Leave dtype out where the model converts values itself, or "
            f"check that model.to({dtype}) runs on the example.",
        ) from None


def main_dtype(state: StateTable) -> torch.dtype:
    """The floating dtype that holds most parameters."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in state.entries.values():
        if entry.kind == "parameter" and entry.tensor.is_floating_point():
            sizes[entry.tensor.dtype] += entry.tensor.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself if all its floating state is of that dtype, else a converted copy."""
    if not dtype.is_floating_point:
        raise UsageError(f"dtype is {dtype}; it must be a floating dtype")
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.dtype == dtype for t in tensors if t.is_floating_point()):
        return model
    try:
        converted = copy.deepcopy(model)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied to be captured in {dtype}: {error}",
            f"Convert it yourself: model.to({dtype}).",
        ) from None
    return converted._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


@contextmanager
def leaving_model_as_it_was(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """Restore training flags, and for transformers' models the cache, which one forward pass does not need."""
    flags = {module: module.training for module in model.modules()}
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    if caching:
        notes.append("captured with config.use_cache=False: the key-value cache is not part of the result")
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag
        for config in caching:
            config.use_cache = True
