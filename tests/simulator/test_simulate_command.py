"""`autopart simulate`: the table or JSON on stdout, and a trace that is never written over."""

import json

from autopart.cli import main
from autopart.errors import InputFileError, UsageError
from tests.simulator.simulated_plans import plan_of, stage_of


def plan_file(folder):
    file = folder / "plan.json"
    file.write_text(plan_of([stage_of(0), stage_of(1)]).to_json())
    return file


def test_a_plan_file_and_its_folder_are_simulated_alike(tmp_path, capsys):
    assert main(["simulate", str(plan_file(tmp_path))]) == 0
    table = capsys.readouterr().out
    assert main(["simulate", str(tmp_path)]) == 0
    assert capsys.readouterr().out == table
    assert "15,000 ms simulated" in table


def test_json_is_one_document(tmp_path, capsys):
    assert main(["simulate", str(plan_file(tmp_path)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == 15.0


def test_a_trace_is_written_once(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    command = ["simulate", str(plan_file(tmp_path)), "--trace", str(trace)]
    assert main(command) == 0
    written = trace.read_bytes()
    assert json.loads(written)["traceEvents"]
    assert main(command) == UsageError.exit_status
    assert "already" in capsys.readouterr().err
    assert trace.read_bytes() == written


def test_a_trace_has_a_place_or_nothing_is_simulated(tmp_path, capsys):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "elsewhere.json")
    for trace in (link, tmp_path / "no folder" / "trace.json"):
        assert main(["simulate", str(plan_file(tmp_path)), "--trace", str(trace)]) == UsageError.exit_status
        assert capsys.readouterr().out == ""
    assert not (tmp_path / "elsewhere.json").exists()


def test_what_is_no_plan_is_refused(tmp_path, capsys):
    (tmp_path / "plan.json").write_text("{}")
    assert main(["simulate", str(tmp_path)]) == InputFileError.exit_status
    assert "plan.json" in capsys.readouterr().err


def test_what_the_schedule_cannot_run_is_told(tmp_path, capsys):
    for name, stages, microbatches in (("dualpipev", 2, 1), ("zbv", 3, 8)):
        file = tmp_path / f"{name}.json"
        file.write_text(plan_of([stage_of(0) for _ in range(stages)], name, microbatches).to_json())
        assert main(["simulate", str(file)]) == UsageError.exit_status
        assert f"schedule {name} cannot run {microbatches} microbatches" in capsys.readouterr().err
