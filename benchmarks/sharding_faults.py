"""How many faults of the tensor splits do the tests catch? `python -m benchmarks.sharding_faults [WORD...]`

Each fault is an edit of one line of a copy of the source. The tests run against the copy, the fast ones first, until
one fails: then the fault is caught. Prints a table, writes JSON; exit status 1 when a fault goes through, or when an
edit no longer finds its line. Words choose the faults whose name holds one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITES = (
    ["tests/sharding/test_conversions.py"],
    ["tests/sharding/test_rules.py"],
    ["tests/sharding/test_split_hazards.py"],
    ["tests/sharding/test_classics.py"],
    ["tests/sharding/test_models.py", "-k", "recommender or resnet or llama"],
)


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    line: str
    instead: str


_RUNTIME, _RULES = "autopart/runtime/", "autopart/sharding/rules/"
_COLLECTIVES, _OPERATORS = f"{_RUNTIME}collectives.py", f"{_RUNTIME}split_operators.py"
FAULTS = [
    Fault("copy_to without its all-reduce", _COLLECTIVES, "_convert(x, _same, _sum)", "_convert(x, _same, _same)"),
    Fault("all_reduce ignores partial gradients", _COLLECTIVES, "_sum if partial_gradient else _same", "_same"),
    Fault(
        "all_gather ignores partial gradients",
        _COLLECTIVES,
        "(_sum_own if partial_gradient else _own)(dim, parts)",
        "_own(dim, parts)",
    ),
    Fault(
        "split gives gradients of the own shard alone",
        _COLLECTIVES,
        "(_between_zeros if partial_gradient else _gather)(dim, parts)",
        "_between_zeros(dim, parts)",
    ),
    Fault("share divides the gradient too", _COLLECTIVES, "_divide if partial_gradient else _same", "_divide"),
    Fault("share_gradient does not divide", _COLLECTIVES, "_convert(x, _same, _divide)", "_convert(x, _same, _same)"),
    Fault(
        "reduce_scatter without a gradient",
        _COLLECTIVES,
        "_convert(x, _sum_own(dim, parts), _gather(dim, parts))",
        "_convert(x, _sum_own(dim, parts), _between_zeros(dim, parts))",
    ),
    Fault("parts in the wrong order", f"{_RUNTIME}shards.py", "pieces.append(piece)", "pieces.insert(0, piece)"),
    Fault("padding is not zero", f"{_RUNTIME}shards.py", "piece.new_zeros(shape)", "piece.new_ones(shape)"),
    Fault("one random stream for all shards", _OPERATORS, "* ranks.size + ranks.rank", "* ranks.size"),
    Fault("padding_idx ignored", _OPERATORS, "found = torch.where(gives_gradient, found, found.detach())", "pass"),
    Fault(
        "mean over local rows in the loss",
        _OPERATORS,
        "count = group().all_reduce((target != ignore_index).sum())",
        "count = group().size * (target != ignore_index).sum()",
    ),
    Fault(
        "softmax without its maximum",
        _OPERATORS,
        ".unsqueeze(1)\n        exponents",
        ".unsqueeze(1) * 0\n        exponents",
    ),
    Fault("ignored rows have gradients", _OPERATORS, "(gradient * valid).unsqueeze(1)", "(gradient * 1).unsqueeze(1)"),
    Fault("padded classes count", _OPERATORS, "logits = logits.masked_fill(padding, -torch.inf)", "pass"),
    Fault(
        "batch norm: mean without its gradient",
        _OPERATORS,
        "all_reduce(x.sum(dims), partial_gradient=True)",
        "all_reduce(x.sum(dims))",
    ),
    Fault("batch norm: biased running variance", _OPERATORS, "(count / (count - 1))", "1"),
    Fault("batch norm: count of one rank", _OPERATORS, "count = group().size * x.numel()", "count = x.numel()"),
    Fault("mean not divided", f"{_RULES}reductions.py", "if mean and label in sums:", "if mean and label in ():"),
    Fault(
        "bias added by every rank", f"{_RULES}labels.py", "inputs.append(P if number", "inputs.append(R_STAR if number"
    ),
    Fault(
        "unsplit operands have whole gradients",
        f"{_RULES}labels.py",
        "outputs[0] == P else R_STAR)",
        "outputs[0] == P else R)",
    ),
    Fault("queries cut under is_causal", f"{_RULES}attention.py", 'None if a["is_causal"] else "queries"', '"queries"'),
    Fault(
        "mask cut by heads alone",
        f"{_RULES}attention.py",
        "(*batch(shape[:-2]), rows if shape[-2] != 1 else None, None)",
        "(*batch(shape[:-2]), None, None)",
    ),
    Fault("softmax dimension cut", f"{_RULES}labels.py", "None if d in barred else", "None if d in () else"),
    Fault(
        "adding a number keeps zeros",
        f"{_RULES}pointwise.py",
        "return len(op.inputs) == 2\n    return op",
        "return True\n    return op",
    ),
    Fault("groups not divided", f"{_RULES}algebra.py", "op.call(groups=groups // op.t)", "op.call(groups=groups)"),
    Fault("shards of size one squeezed", f"{_RULES}views.py", "if shape[d] == 1]))", "]))"),
    Fault(
        "integers are summed as summands",
        f"{_RULES}labels.py",
        "if not all(v.is_floating_point() for v in tensors):",
        "if False:",
    ),
    Fault(
        "view forgets what a dimension holds",
        f"{_RULES}views.py",
        "blocks % prefix == 0 and size % ((blocks // prefix) * t) == 0",
        "blocks % prefix == 0 and size % t == 0",
    ),
    Fault(
        "slices keep their whole bounds", f"{_RULES}views.py", "end=local_size(source.parts[:last], op.t)", "end=end"
    ),
    Fault(
        "conversions survive changes in place",
        "autopart/sharding/rewrite.py",
        "                aliases.version(source, user),\n",
        "                0,\n",
    ),
    Fault(
        "changed memory is converted",
        "autopart/sharding/aliases.py",
        "return (user, number) in self._edges and bool(self.changes(self._operands[user][number]))",
        "return False",
    ),
    Fault(
        "another rank's experts look up rows",
        _OPERATORS,
        "torch.where(mine, table[local.clamp(0, rows - 1)], zero)",
        "table[local.clamp(0, rows - 1)] + 0 * zero",
    ),
    Fault("grouped rows not brought back", _OPERATORS, "found[(rows - before) % x.shape[0]]", "found"),
    Fault("nothing is ever split", f"{_RULES}labels.py", "label is None or (len", "True or (len"),
]


def caught_by(fault: Fault, folder: Path) -> str | None:
    """The first test that fails on a copy of the source with the fault; None when all pass.

    Raises:
        LookupError: The line to edit is not there exactly once.
    """
    for part in ("autopart", "tests", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / fault.file
    text = path.read_text()
    if text.count(fault.line) < 1:
        raise LookupError(f"{fault.file} no longer holds {fault.line!r}")
    path.write_text(text.replace(fault.line, fault.instead, 1))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    for suite in SUITES:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *suite]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failed[0].split(" ", 1)[1][:110] if failed else suite[0]
    return None


def main(words: list[str]) -> int:
    rows = []
    for fault in FAULTS:
        if words and not any(word in fault.name for word in words):
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            test = caught_by(fault, Path(folder))
        rows.append({**asdict(fault), "caught_by": test, "seconds": round(time.monotonic() - start, 1)})
        print(
            f"{fault.name:45} {'caught' if test else 'NOT CAUGHT':10} {rows[-1]['seconds']:6.1f} s  {test or ''}",
            flush=True,
        )
    caught = sum(row["caught_by"] is not None for row in rows)
    print(f"{caught} of {len(rows)} faults caught")
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "sharding_faults.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if caught == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
