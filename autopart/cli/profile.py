"""`autopart profile`: times of a model's operators on a device, two profiles side by side, or a machine's links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopart.cli.links import profile_links
from autopart.cli.models import load_model
from autopart.cli.options import SETTINGS, Dtype, GlobalBatch, Json, Mode, app
from autopart.cli.output import check_new, say, show, working
from autopart.errors import UsageError

if TYPE_CHECKING:
    from autopart.profiler.profile_file import Profile


@app.command("profile", no_args_is_help=True, context_settings=SETTINGS)
def profile_command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for partition; or none, with --diff or --links.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda (the default) or cpu: measured on this machine; a name of `autopart devices`: by formula. "
            "With --links: cuda or cpu; by default cuda where there are GPUs."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the profile there.")] = None,
    as_json: Json = False,
    microbatches: Annotated[int, typer.Option(min=1, help="Parts of the global batch; one part is profiled.")] = 1,
    global_batch: GlobalBatch = None,
    dtype: Dtype = None,
    mode: Mode = "training",
    again: Annotated[
        bool, typer.Option("--again", help="Measure also what was measured before, and keep that instead.")
    ] = False,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="BEFORE AFTER", help="Compare two profile files.")
    ] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure the links between processes instead.")] = False,
) -> None:
    """Time every distinct operator of a model, forward and backward. Interrupted, it goes on where it stopped."""
    if sum((model is not None, diff is not None, links)) != 1:
        raise UsageError("profile takes a MODEL, or --diff BEFORE AFTER, or --links", "See: autopart profile --help")
    if diff is not None and out is not None:
        raise UsageError("--diff writes no file: leave --out out, or send what it prints to a file")
    if again and model is None:
        raise UsageError("--again is for a MODEL: links are measured every time, and --diff measures nothing")
    if links:
        profile_links(device, out, as_json)
    elif diff is not None:
        _compare(*diff, as_json)
    else:
        assert model is not None
        _profile(model, device or "cuda", out, as_json, microbatches, global_batch, dtype, mode, again)


def _profile(
    model: str,
    device: str,
    out: Path | None,
    as_json: bool,
    microbatches: int,
    global_batch: int | None,
    dtype: str | None,
    mode: str,
    again: bool,
) -> None:
    with working():
        import os
        from dataclasses import replace

        import torch

        from autopart.api import as_dtype
        from autopart.inputs import find_inputs
        from autopart.new_file import write_new
        from autopart.profiler.operators import profile
        from autopart.profiler.this_machine import check_device, here
        from autopart.tracer import find_batch, trace

        if mode not in ("training", "inference"):
            raise UsageError(f"--mode must be training or inference, not {mode!r}")
        check_device(device)
        if again and here(device) is None:
            raise UsageError(f"--again measures, and {device} is not this machine's: its profile is by formula")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as torchrun starts processes
        check_new(out)
        loaded = load_model(model)
        args, kwargs = loaded.args, dict(loaded.kwargs)
        if not args and not kwargs:
            args, kwargs = find_inputs(loaded.model)
        batch = find_batch(loaded.model, args, kwargs)
        graph = trace(
            loaded.model,
            args,
            kwargs,
            mode=mode,  # type: ignore[arg-type]
            microbatches=microbatches,
            global_batch=global_batch or batch.rows,
            batch_dims=batch.dims,
            dtype=as_dtype(dtype),
        )
        say(f"Captured {len(graph.primary.calls)} operators, for {graph.microbatch_size} rows.")
        with _Bar() as bar:
            found = replace(profile(graph, device, again=again, progress=bar), model=model)
        if out is not None:
            write_new(out, found.to_json())
            options = {"--global-batch": global_batch, "--dtype": dtype, "--mode": mode}
            say(f"Wrote {out}. Plan with it: {plan_with(found, out, options)}")
    show(found.to_json().rstrip() if as_json else str(found))


def plan_with(profile: Profile, file: Path, options: Mapping[str, object]) -> str:
    """A command that plans with a profile, and what is to be filled in there."""
    import shlex

    from autopart.catalogue import find

    device = profile.device.name
    try:
        find(device)
    except UsageError:
        gpus, fill_in = "CLUSTER.yaml", f"CLUSTER.yaml is a cluster file with devices named '{device}': docs/costs.md"
    else:
        gpus, fill_in = f"2x{device}", f"for 2x{device} write what you have"
    words = ["autopart", "partition", profile.model, "--gpus", gpus, "--profile", str(file)]
    for option, value in options.items():
        words += [option, str(value)] if value is not None else []
    return f"{shlex.join(words)} ({fill_in})"


def _compare(before: Path, after: Path, as_json: bool) -> None:
    with working():
        import json

        from autopart.profiler.profile_file import Profile
        from autopart.profiler.profile_table import diff_as_data, format_diff

        profiles = Profile.load(before), Profile.load(after)
    show(json.dumps(diff_as_data(*profiles), indent=1) if as_json else format_diff(*profiles))


class _Bar:
    """A progress bar on stderr, shown on a terminal alone."""

    def __init__(self) -> None:
        import sys

        self._bar = typer.progressbar(length=1, label="Operators", file=sys.stderr, show_pos=True)

    def __enter__(self) -> _Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.render_finish()

    def __call__(self, done: int, count: int) -> None:
        self._bar.length = count
        self._bar.update(done - self._bar.pos)
