"""GPT-2 small (124 M parameters) over four processes of this machine: split it, check it, train it a few steps.

Shows every command before running it; `make demo` runs this. Takes a few minutes on two cores.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

MODEL = "hf:gpt2?batch=8&seq=64"
PROCESSES = 4
STEPS = 4
FOLDER = Path("out/demo")
BIN = Path(sys.executable).parent


def show(*command: str, capture: bool = False) -> tuple[str, float]:
    """Print a command and run it; returns its stdout, if captured, and its seconds. Ends the demo if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    start = time.perf_counter()
    # One thread for each process: four of them share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], stdout=subprocess.PIPE if capture else None, text=True, env=environment
    )
    if done.returncode != 0:
        print(done.stdout or "", file=sys.stderr)
        sys.exit(done.returncode)
    return done.stdout or "", time.perf_counter() - start


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    package, trained = FOLDER / "gpt2", FOLDER / "trained"
    _, planned_s = show(
        "autopart", "partition", MODEL, "--gpus", f"{PROCESSES}xCPU", "--stages", str(PROCESSES), "--out", str(package)
    )
    text, verified_s = show("autopart", "verify", str(package), "--json", capture=True)
    checked = json.loads(text)
    train = ("--optimizer", "adamw", "--lr", "1e-4", "--steps", str(STEPS), "--save", str(trained))
    _, trained_s = show("torchrun", "--nproc-per-node", str(PROCESSES), str(package / "train.py"), *train)

    plan = json.loads((package / "plan.json").read_text())
    losses = [json.loads(line)["loss"] for line in (trained / "log.jsonl").read_text().splitlines()]
    print()
    print(
        tabulate(
            summary(plan, checked, losses, (planned_s, verified_s, trained_s)), tablefmt="simple", disable_numparse=True
        )
    )


def summary(
    plan: dict[str, Any], checked: dict[str, Any], losses: list[float], seconds: tuple[float, float, float]
) -> list[tuple[str, str]]:
    """What the demo showed, as rows of two columns."""
    worst = {name: value for name, value in checked["worst_relative_error"].items() if value is not None}
    hand = {b["name"]: b["step_time_s"] for b in plan["baselines"] if b["step_time_s"]}
    parameters = sum(stage["parameters"] for stage in plan["per_stage"])
    return [
        ("model", f"{plan['model']}, {parameters / 1e6:.1f} M parameters over all stages (a tied one counts in each)"),
        (
            "plan",
            f"{plan['strategy']['stages']} stages, {plan['strategy']['schedule']}, gap {plan['gap'] * 100:.2f} %, {plan['status']}",
        ),
        *(
            (f"predicted against {name}", f"{value / plan['step_time_s']:.2f} times as fast")
            for name, value in hand.items()
        ),
        ("verified", f"{checked['passed']} in {checked['dtype']}, worst relative error {max(worst.values()):.1e}"),
        ("loss", " -> ".join(f"{loss:.3f}" for loss in losses)),
        ("seconds", "plan {:.0f}, verify {:.0f}, train {:.0f}".format(*seconds)),
        ("package", str(FOLDER / "gpt2")),
    ]


if __name__ == "__main__":
    main()
