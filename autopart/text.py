"""Numbers and names as they are printed everywhere: milliseconds, GiB, counts; nothing that could steer a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

MISSING = "-"


def milliseconds(time_s: float | None) -> str:
    """Seconds as milliseconds with four digits."""
    return MISSING if time_s is None else _digits(time_s * 1e3)


def gibibytes(count: float) -> str:
    """Bytes as GiB with two decimals (two digits where it is little), without the unit."""
    amount = count / 2**30
    return f"{amount:.2f}" if amount >= 0.1 or not count else f"{amount:.2g}"


def percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def signed(share: float, digits: int = 0) -> str:
    """A difference as a percentage; one that rounds to nothing has no minus."""
    return f"{round(share, digits + 2) + 0.0:+.{digits}%}"  # -0.0 + 0.0 is 0.0


def count(number: float) -> str:
    """A count with four digits: 950, 12.34 k, 124.4 M, 8.03 B."""
    for factor, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return _digits(number / factor) + unit
    return str(int(number))


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 row", "2 rows", "2 microbatches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def table(rows: Sequence[Sequence[Any]], headers: Sequence[str], text_columns: Sequence[int] = (0,)) -> str:
    """Aligned columns: those in `text_columns` to the left, all others, which are numbers, to the right."""
    align = ["left" if i in text_columns else "right" for i in range(len(headers))]
    plain = [[printable(str(cell)) for cell in row] for row in rows]
    return tabulate(plain, headers=headers, tablefmt="simple", colalign=align if rows else None, disable_numparse=True)


def printable(text: str) -> str:
    """Text with control characters escaped, so that a name cannot move the cursor or colour the screen."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def _digits(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"
