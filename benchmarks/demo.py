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

import torch
from tabulate import tabulate

ROWS, TOKENS, VOCABULARY = 8, 32, 50257
MODEL = f"hf:gpt2?batch={ROWS}&seq={TOKENS}"
PROCESSES = 4
STEPS = 4
FOLDER = Path("out/demo")
BIN = Path(sys.executable).parent


def show(*command: str, capture: bool = False) -> tuple[str, float]:
    """Print a command and run it; returns its stdout, if captured, and its seconds. Ends the demo if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the processes share the cores
    program, *arguments = command
    stdout = subprocess.PIPE if capture else None
    done = subprocess.run([str(BIN / program), *arguments], stdout=stdout, text=True, env=environment)
    if done.returncode != 0:
        print(done.stdout or "", file=sys.stderr)
        sys.exit(done.returncode)
    return done.stdout or "", time.perf_counter() - start


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    package, trained = FOLDER / "gpt2", FOLDER / "trained"
    devices = ("--gpus", f"{PROCESSES}xCPU", "--stages", str(PROCESSES))
    _, planned_s = show("autopart", "partition", MODEL, *devices, "--out", str(package))
    text, verified_s = show("autopart", "verify", str(package), "--json", capture=True)
    batches = write_batches(FOLDER / "batches.pt")
    train = ("--batches", str(batches), "--lr", "2e-4", "--save", str(trained))
    _, trained_s = show("torchrun", "--nproc-per-node", str(PROCESSES), str(package / "train.py"), *train)

    plan, checked = json.loads((package / "plan.json").read_text()), json.loads(text)
    losses = [json.loads(line)["loss"] for line in (trained / "log.jsonl").read_text().splitlines()]
    rows = summary(plan, checked, losses)
    rows.append(("seconds", f"plan {planned_s:.0f}, verify {verified_s:.0f}, train {trained_s:.0f}"))
    print("\n" + tabulate(rows, tablefmt="simple", disable_numparse=True))


def write_batches(path: Path) -> Path:
    """The same random text in every step, so that the loss falls as it is learned by heart."""
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = {"args": (), "kwargs": {"input_ids": tokens, "labels": tokens}, "target": None}
    torch.save([batch] * STEPS, path)
    return path


def summary(plan: dict[str, Any], checked: dict[str, Any], losses: list[float]) -> list[tuple[str, str]]:
    """What the demo showed, as rows of two columns."""
    worst = max(value for value in checked["worst_relative_error"].values() if value is not None)
    parameters = sum(stage["parameters"] for stage in plan["per_stage"])
    strategy = plan["strategy"]
    by_hand = [
        (f"predicted against {baseline['name']}", f"{baseline['step_time_s'] / plan['step_time_s']:.2f} times as fast")
        for baseline in plan["baselines"]
        if baseline["step_time_s"]
    ]
    return [
        ("model", f"{plan['model']}; its stages hold {parameters / 1e6:.1f} M parameters, tied ones in each"),
        ("plan", f"{strategy['stages']} stages, {strategy['schedule']}, {plan['status']}, gap {plan['gap']:.2%}"),
        *by_hand,
        ("verified", f"{checked['passed']}: {checked['dtype']}, worst relative error {worst:.1e}"),
        ("loss", " -> ".join(f"{loss:.3f}" for loss in losses)),
        ("package", str(FOLDER / "gpt2")),
    ]


if __name__ == "__main__":
    main()
