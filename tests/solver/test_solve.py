"""Plans of captured models: their values, limits, refusals and promises."""

import dataclasses
import importlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plan_oracle import crossings, least_memory, stages_of_state, step_time

from autopart.costs import NodeTime
from autopart.errors import CaptureError, InfeasibleError, LimitError, UsageError
from autopart.plan import Plan
from autopart.solver import solve

solve_module = importlib.import_module("autopart.solver.solve")  # its name is that of the function

CASES = ["gpt2", "t5"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_step_time_is_what_an_independent_scorer_finds(case, stages, schedule, request):
    arguments = request.getfixturevalue(case).on("4xA100-80G", schedule=schedule)
    plan = solve(*arguments, stages=stages)
    assert plan.step_time_s == pytest.approx(step_time(*arguments, plan), rel=1e-9)
    assert plan.lower_bound_s <= plan.step_time_s
    assert plan.gap == pytest.approx(1 - plan.lower_bound_s / plan.step_time_s, abs=1e-9)
    assert (plan.status == "optimal") == (plan.gap <= 0.001)
    assert plan.stopped_by == "proof"
    assert plan.gap <= 0.011


@pytest.mark.parametrize("case", CASES)
def test_every_call_has_a_stage_no_value_flows_backwards_and_colocated_nodes_stay_together(case, request):
    graph, *rest = request.getfixturevalue(case).on("4xA100-80G")
    plan = solve(graph, *rest, stages=4)
    assert set(plan.assignment) == {node.name for node in graph.primary.calls}
    assert set(plan.assignment.values()) == {0, 1, 2, 3}
    for node in graph.primary.calls:
        for user in node.users:
            if user.name in plan.assignment:
                assert plan.assignment[node.name] <= plan.assignment[user.name]
    for names in graph.primary.colocated:
        assert len({plan.assignment[name] for name in names if name in plan.assignment}) <= 1


def test_stages_report_their_own_parameters_and_times(gpt2):
    graph, costs, cluster, workload = gpt2.on("4xA100-80G")
    plan = solve(graph, costs, cluster, workload, stages=4)
    used = stages_of_state(graph, plan)
    for s, stage in enumerate(plan.per_stage):
        own = [e for key, e in graph.state.items() if e.kind == "parameter" and s in used.get(key, ())]
        assert stage.parameters == sum(e.tensor.numel() for e in own)
        names = [name for name, at in plan.assignment.items() if at == s]
        assert stage.nodes == len(names)
        times = costs.times[cluster.devices[s].name]
        assert stage.forward_s == pytest.approx(sum(times[n].forward_s for n in names))
        assert stage.peak_memory_bytes >= least_memory(graph, costs, workload, plan, s)
        assert stage.peak_memory_bytes <= stage.memory_limit_bytes
    seconds = [stage.forward_s + stage.backward_s for stage in plan.per_stage]
    assert plan.balance == pytest.approx(sum(seconds) / len(seconds) / max(seconds))


def test_baselines_are_never_faster_than_an_optimal_plan_that_may_cut_anywhere(gpt2):
    plan = solve(*gpt2.on("4xA100-80G"), stages=4, granularity="operator")
    named = {baseline.name: baseline for baseline in plan.baselines}
    splits = ("uniform layers", "balanced parameters", "balanced times", "PipeDream")
    assert tuple(named) == ("one device", *splits)
    for name in splits:
        assert named[name].fits
        assert named[name].step_time_s >= plan.lower_bound_s


def test_a_tied_weight_is_charged_in_each_stage_that_holds_it(gpt2):
    graph, costs, cluster, workload = gpt2.on("2xA100-80G")
    plan = solve(graph, costs, cluster, workload, stages=2)
    tied = next(key for key, entry in graph.state.items() if len(entry.names) > 1)
    assert stages_of_state(graph, plan)[tied] == {0, 1}
    once = sum(e.tensor.numel() for e in graph.state.values() if e.kind == "parameter")
    assert sum(stage.parameters for stage in plan.per_stage) == once + graph.state[tied].tensor.numel()


def test_memory_limits_shape_the_plan_and_are_kept(gpt2):
    free = solve(*gpt2.on("2xA100-80G"), stages=2, granularity="operator")
    worst = max(range(2), key=lambda s: free.per_stage[s].peak_memory_bytes)
    low, high = min(s.peak_memory_bytes for s in free.per_stage), free.per_stage[worst].peak_memory_bytes
    limit = (low + 3 * high) / 4 / 0.94
    tight = solve(*gpt2.on("2xA100-80G", memory_bytes=limit), stages=2, granularity="operator")
    assert all(s.peak_memory_bytes <= s.memory_limit_bytes < high for s in tight.per_stage)
    assert tight.step_time_s >= free.lower_bound_s
    assert tight.assignment != free.assignment


def test_an_infeasible_request_names_the_device_the_shortfall_and_a_change_that_is_enough(gpt2):
    with pytest.raises(InfeasibleError) as refusal:
        solve(*gpt2.on("2xA100-80G", memory_bytes=2_000_000), stages=2)
    assert refusal.value.exit_status == 3
    assert "GPT2LMHeadModel" in refusal.value.message and "too little" in refusal.value.message
    assert "device" in refusal.value.message and "(stage" in refusal.value.message
    proposed = float(refusal.value.hint.split("It fits with ")[1].split(" GiB")[0]) * 2**30
    solve(*gpt2.on("2xA100-80G", memory_bytes=proposed), stages=2)


def test_more_stages_than_places_to_cut_are_refused_with_the_number_that_is_possible(gpt2):
    with pytest.raises(CaptureError, match=r"At most \d+ stages are possible"):
        solve(*gpt2.on("4000xA100-80G", schedule="gpipe"), stages=4000)


def test_more_stages_than_devices_are_a_usage_error(gpt2):
    with pytest.raises(UsageError, match="need 4 devices"):
        solve(*gpt2.on("2xA100-80G"), stages=4)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_costs_that_are_no_costs_are_refused_by_the_name_of_their_node(gpt2, seconds):
    graph, costs, cluster, workload = gpt2.on("2xA100-80G")
    device, node = cluster.devices[0].name, graph.primary.calls[5].name
    times = {device: {**costs.times[device], node: NodeTime(seconds, 0.0, 0.0)}}
    with pytest.raises(UsageError, match=f"{node}: its time costs {seconds}"):
        solve(graph, dataclasses.replace(costs, times=times), cluster, workload)


@pytest.mark.parametrize(
    ("option", "value"),
    [("granularity", "layer"), ("threshold", 1.5), ("time_limit_s", 0), ("stages", 0), ("stages", True)],
)
def test_a_wrong_option_is_a_usage_error_that_names_it(gpt2, option, value):
    with pytest.raises(UsageError, match=option):
        solve(*gpt2.on("2xA100-80G"), **{option: value})


def test_block_cuts_are_taken_unless_operator_cuts_gain_more_than_the_threshold(gpt2):
    arguments = gpt2.on("4xA100-80G")
    block = solve(*arguments, stages=4, granularity="block")
    operator = solve(*arguments, stages=4, granularity="operator")
    assert operator.step_time_s <= block.step_time_s * 1.001
    gain = 1 - operator.step_time_s / block.step_time_s
    assert gain > 0.002
    low, high = (
        solve(*arguments, stages=4, threshold=gain / 2),
        solve(*arguments, stages=4, threshold=min(0.9, gain * 2)),
    )
    assert (low.granularity, high.granularity) == ("operator", "block")
    assert low.alternatives["block"] == pytest.approx(block.step_time_s, rel=2e-3)
    assert high.alternatives["operator"] == pytest.approx(operator.step_time_s, rel=2e-3)
    assert high.step_time_s == pytest.approx(block.step_time_s, rel=2e-3)


def test_a_slower_device_gets_less_work(gpt2):
    plan = solve(*gpt2.on("A100-80G,T4"), stages=2, granularity="operator")
    _, costs, cluster, _ = gpt2.on("A100-80G,T4")
    fast = costs.times[cluster.devices[0].name]
    work = [sum(fast[n].forward_s for n, s in plan.assignment.items() if s == stage) for stage in (0, 1)]
    assert work[0] > work[1]
    assert plan.step_time_s == pytest.approx(step_time(*gpt2.on("A100-80G,T4"), plan), rel=1e-9)


def test_fewer_stages_are_chosen_only_with_a_reason(gpt2):
    graph, costs, cluster, workload = gpt2.on("4xA100-80G")
    slow = dataclasses.replace(cluster.intra_node, latency_s=1.0)
    plan = solve(graph, costs, dataclasses.replace(cluster, intra_node=slow), workload)
    assert plan.strategy.stages == 1
    assert any("1 of 4 devices are used" in note for note in plan.notes)


@pytest.fixture
def slow_gpt2(gpt2):
    """Arguments of `solve` for a model that gains from every device: its calls take much longer than transfers."""
    graph, costs, cluster, workload = gpt2.on("4xA100-80G")
    times = {
        device: {
            name: NodeTime(*(1e4 * s for s in (t.forward_s, t.backward_input_s, t.backward_weight_s)))
            for name, t in row.items()
        }
        for device, row in costs.times.items()
    }
    return graph, dataclasses.replace(costs, times=times), cluster, workload


@pytest.fixture
def promising(monkeypatch):
    """First plans of fewer stages promise a step of no time at all."""
    monkeypatch.setattr(solve_module, "first_value", lambda *arguments: 0.0)


def limited(monkeypatch, counts):
    """The limit is hit for these numbers of stages."""
    best = solve_module._Request.best

    def hit(self, stages, budget):
        if stages in counts:
            raise LimitError(f"no plan for {stages} stages was found")
        return best(self, stages, budget)

    monkeypatch.setattr(solve_module._Request, "best", hit)


def test_a_plan_with_fewer_stages_that_promised_more_than_it_keeps_is_not_taken(slow_gpt2, promising):
    assert solve(*slow_gpt2).strategy.stages == 4


def test_the_plan_with_most_stages_is_kept_if_none_is_found_with_fewer(slow_gpt2, promising, monkeypatch):
    limited(monkeypatch, {1, 2, 3})
    assert solve(*slow_gpt2).strategy.stages == 4


def test_fewer_stages_are_tried_where_the_limit_is_hit_with_most(slow_gpt2, monkeypatch):
    limited(monkeypatch, {4})
    plan = solve(*slow_gpt2)
    assert plan.strategy.stages == 3
    assert any("3 of 4 devices are used: no plan for 4 stages was found" in note for note in plan.notes)


@pytest.mark.parametrize("past", [False, True])
def test_a_limit_that_is_hit_with_every_number_of_stages_is_said(slow_gpt2, monkeypatch, past):
    limited(monkeypatch, {1, 2, 3, 4})
    with pytest.raises(LimitError, match="no plan for 4 stages"):
        solve(*slow_gpt2, deadline=0.0 if past else math.inf)


def test_after_the_deadline_a_proof_that_most_stages_do_not_fit_is_none_for_fewer(slow_gpt2, monkeypatch):
    def impossible(self, stages, budget):
        raise solve_module._DoesNotFit(self._shapes(stages)[0])

    monkeypatch.setattr(solve_module._Request, "best", impossible)
    with pytest.raises(LimitError, match="fewer than 4 stages"):
        solve(*slow_gpt2, deadline=0.0)
    with pytest.raises(InfeasibleError):
        solve(*slow_gpt2, explain_s=0.0)


def test_all_searches_have_one_deadline_and_their_shares_of_the_work(slow_gpt2, promising, monkeypatch):
    asked, search_any = [], solve_module.search_any

    def spying(problems, tolerance, time_limit_s, *arguments, deadline, **options):
        asked.append((time_limit_s, deadline))
        return search_any(problems, tolerance, time_limit_s, *arguments, deadline=deadline, **options)

    monkeypatch.setattr(solve_module, "search_any", spying)
    end = time.monotonic() + 20.0
    solve(*slow_gpt2, time_limit_s=1000.0, deadline=end)
    # Between blocks and anywhere, with four stages and with fewer.
    assert [seconds for seconds, _ in asked] == pytest.approx([160.0, 800.0, 40.0, 200.0])
    assert all(deadline <= end for _, deadline in asked)


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "zbv"])
def test_schedules_with_two_stages_a_process_balance_processes(gpt2, schedule):
    plan = solve(*gpt2.on("2xA100-80G", schedule=schedule), time_limit_s=10)
    assert plan.strategy.stages == 4
    expected = [0, 1, 0, 1] if schedule == "interleaved1f1b" else [0, 1, 1, 0]
    assert [stage.devices[0] for stage in plan.per_stage] == expected
    assert plan.lower_bound_s <= plan.step_time_s


def test_a_plan_survives_its_file(gpt2, tmp_path):
    plan = solve(*gpt2.on("2xA100-80G"), stages=2, model="hf:gpt2")
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert Plan.load(tmp_path / "plan.json") == plan


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from conftest import Case, gpt2_model
from autopart.solver import solve
print(solve(*Case(*gpt2_model()).on("4xA100-80G"), stages=4).to_json())
"""


def test_two_processes_make_the_same_plan(gpt2):
    here = str(Path(__file__).parent)
    texts = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(here=here)],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PYTHONHASHSEED": seed, "PATH": ""},
        )
        data = json.loads(run.stdout)
        del data["seconds"]
        texts.append(data)
    assert texts[0] == texts[1]
    assert crossings(gpt2.graph, Plan.from_json(run.stdout))
