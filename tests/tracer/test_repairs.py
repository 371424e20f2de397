"""Every repair is needed: with one switched off, its hazards come out wrong, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from capture_hazards import HAZARDS
from oracle import differences

from autopart.errors import AutopartError
from autopart.tracer import caches, capture, patches, state
from autopart.tracer.call import FlatCall
from autopart.tracer.sideeffects import PythonState


def without(repair: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Take one context manager out of those around forward."""

    def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
        rest = tuple(r for r in patches.REPAIRS if r.__name__ != repair)
        assert len(rest) == len(patches.REPAIRS) - 1
        monkeypatch.setattr(patches, "REPAIRS", rest)

    return switch_off


def replaced(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def both(*switches: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
        for switch in switches:
            switch(monkeypatch)

    return switch_off


@contextmanager
def unwatched(self: PythonState) -> Iterator[None]:
    yield


SWITCHES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str]]] = {
    "functions": (
        without("custom_functions"),
        [
            "function_straight_through",
            "function_two_outputs_and_none",
            "function_with_an_output_without_gradient",
            "function_that_changes_its_input",
            "function_of_a_parameter",
            "function_bound_in_an_attribute",
        ],
    ),
    "parameters past modules": (
        without("parameters_reached_past_modules"),
        ["detached_branch", "data_assigned"],
    ),
    # Two repairs do the same: what was lifted as a constant is also recognised by its storage.
    "parameters past modules, and constants by storage": (
        both(
            without("parameters_reached_past_modules"),
            replaced(state, "identity", lambda tensor: (id(tensor),)),
        ),
        ["parameter_in_a_plain_list", "parameter_in_a_closure"],
    ),
    "hooks on tensors": (
        without("tensor_hooks"),
        ["hook_on_a_tensor", "hook_on_a_tensor_registered_after_its_use"],
    ),
    "hooks on modules": (
        replaced(capture, "modules_with_backward_hooks", lambda model: []),
        ["hook_full_backward", "hook_full_backward_pre", "hook_forward_on_a_module_kept_whole"],
    ),
    "contexts": (
        replaced(patches, "stamped_nodes", lambda regions: nullcontext()),
        [
            "context_no_grad",
            "context_no_grad_inside_autocast",
            "context_autocast_inside_no_grad",
            "context_enable_grad_inside_no_grad",
            "context_autocast_switched_off_inside",
            "context_inference_mode",
        ],
    ),
    "checkpoints": (without("checkpoint_regions"), ["checkpoint_reentrant", "checkpoint_in_a_partial"]),
    "reassigned buffers": (
        replaced(FlatCall, "_reassigned", lambda self, buffers: []),
        ["buffer_reassigned_in_a_child", "buffer_reassigned_in_the_root"],
    ),
    "python state": (
        replaced(PythonState, "watched", unwatched),
        ["python_random", "numpy_random", "counter_attribute", "list_that_grows", "cache_made_on_first_use"],
    ),
    "remembered tensors": (
        replaced(caches, "_cached_functions", lambda model: []),
        ["function_that_remembers_tensors"],
    ),
    "packing hooks": (without("saved_tensor_hooks"), ["packed_saved_tensors"]),
    "is_exporting": (without("export_denied"), ["failure_when_compiled", "another_value_when_exported"]),
}


@pytest.mark.parametrize(("switch", "name"), [(s, n) for s, (_, names) in SWITCHES.items() for n in names])
def test_each_repair_is_needed(switch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SWITCHES[switch][0](monkeypatch)
    with pytest.raises(AutopartError) if switch == "is_exporting" else nullcontext():
        try:
            found = differences(HAZARDS[name], modes=(True,), check=switch == "is_exporting")
        except AutopartError:
            if switch == "is_exporting":
                raise
            return
        assert found != []


def test_one_step_would_miss_what_shows_at_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    SWITCHES["python state"][0](monkeypatch)
    for name in ("counter_attribute", "list_that_grows", "cache_made_on_first_use"):
        assert differences(HAZARDS[name], steps_count=1, modes=(True,)) == []
        assert differences(HAZARDS[name], steps_count=2, modes=(True,)) != []
        with pytest.raises(AutopartError):
            differences(HAZARDS[name], modes=(True,), check=True)
