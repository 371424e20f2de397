"""How many faults of the tensor splits do the tests catch? `python -m benchmarks.sharding_faults [WORD...]`

Each fault of `sharding_fault_table` is an edit of one line of a copy of the source. The tests that should notice it run
against the copy; the fault is caught when one fails. Before, the same tests pass on the copy as it is. Prints a table,
writes JSON; exit status 1 when a fault goes through. Words choose the faults whose name holds one of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

from benchmarks.sharding_fault_table import FAULTS, Fault, Tests

ROOT = Path(__file__).parents[1]
COPIES = os.cpu_count() or 1
FAILED = 1  # exit status of pytest
# What all tests import, and what takes most of the time of most of them: processes are forked with it.
LIBRARIES = ["pytest", "torch", "torch.distributed.pipelining", "transformers.integrations.moe"]


class Copies:
    """Copies of the source, one for each core, all made at once: what others edit meanwhile does not matter."""

    def __init__(self, folder: Path) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(COPIES):
            copy = folder / str(number)
            for part in ("autopart", "tests", "benchmarks"):
                shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
            shutil.copy(ROOT / "pyproject.toml", copy)
            self._free.put(copy)

    def failed(self, tests: Tests, fault: Fault | None = None) -> str | None:
        """The first of the tests that fails, with the fault; None when all pass.

        Raises:
            LookupError: The line to edit is not there.
            RuntimeError: The tests did not run.
        """
        copy = self._free.get()
        path = copy / fault.file if fault is not None else None
        before = path.read_text() if path is not None else ""
        try:
            if path is not None and fault is not None:
                if fault.line not in before:
                    raise LookupError(f"{fault.name}: {fault.file} no longer holds {fault.line!r}")
                _write(path, before.replace(fault.line, fault.instead, 1))
            return _run(copy, tests)
        finally:
            if path is not None:
                _write(path, before)
            self._free.put(copy)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # An edit within a second that keeps the size would be taken for what was compiled before.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _run(folder: Path, tests: Tests) -> str | None:
    log = folder / "log"
    process = multiprocessing.get_context("forkserver").Process(target=_test, args=(folder, log, tests))
    process.start()
    process.join()
    printed = log.read_text()
    if process.exitcode not in (0, FAILED):
        raise RuntimeError(f"{' -k '.join(tests)} did not run:\n{printed[-3000:]}")
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return failed[0].split(" ", 1)[1] if process.exitcode else None


def _test(folder: Path, log: Path, tests: Tests) -> None:
    """Run tests on a copy, in a process that has imported nothing of the source."""
    import pytest

    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("autopart", "benchmarks", "tests")]:
        del sys.modules[name]
    with log.open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    sys.exit(int(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", tests[0], "-k", tests[1]])))


def unbroken(copies: Copies, faults: Sequence[Fault], workers: ThreadPoolExecutor) -> list[str]:
    """Tests that fail without a fault: what they say of faults is worth nothing."""
    words: dict[str, list[str]] = {}
    for file, word in dict.fromkeys(fault.tests for fault in faults):
        words.setdefault(file, []).append(f"({word})" if word else "")
    unions = [(file, " or ".join(found) if all(found) else "") for file, found in words.items()]
    return [failed for failed in workers.map(copies.failed, unions) if failed is not None]


def main(words: list[str]) -> int:
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]

    def caught(fault: Fault) -> dict[str, object]:
        start = time.monotonic()
        test = copies.failed(fault.tests, fault)
        seconds = round(time.monotonic() - start, 1)
        print(
            f"{fault.name:50} {'caught' if test else 'NOT CAUGHT':10} {seconds:6.1f} s  {(test or '')[:110]}",
            flush=True,
        )
        return {**asdict(fault), "caught_by": test, "seconds": seconds}

    start = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(LIBRARIES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(COPIES) as workers:
        copies = Copies(Path(folder))
        broken = unbroken(copies, faults, workers)
        if broken:
            print("fails without a fault: " + "\n".join(broken))
            return 1
        rows = list(workers.map(caught, faults))
    count = sum(row["caught_by"] is not None for row in rows)
    print(f"{count} of {len(rows)} faults caught, {time.monotonic() - start:.0f} s on {COPIES} cores")
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "sharding_faults.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if count == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
