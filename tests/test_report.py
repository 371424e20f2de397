"""Numbers keep their meaning in print, and text cannot steer a terminal."""

from __future__ import annotations

import pytest
from test_plan import make_plan

from autopart.plan import Strategy
from autopart.report.plan import format_plan
from autopart.text import count, counted, gibibytes, milliseconds, printable, signed, table


def test_numbers_have_four_digits_and_no_exponents() -> None:
    assert [milliseconds(t) for t in (None, 0.0, 9.722e-05, 0.006012, 0.3563, 12.345)] == [
        "-",
        "0.000",
        "0.09722",
        "6.012",
        "356.3",
        "12,345",
    ]
    assert [count(n) for n in (0, 950, 12_340, 124_439_808, 8_030_261_248)] == [
        "0",
        "950",
        "12.34 k",
        "124.4 M",
        "8.030 B",
    ]
    assert [gibibytes(n) for n in (0, 530_000, 3 * 2**30)] == ["0.00", "0.00049", "3.00"]


def test_control_characters_are_shown_and_letters_of_all_scripts_kept() -> None:
    assert printable("\x1b[31mred\x07 Ünïcode 模型") == "\\x1b[31mred\\x07 Ünïcode 模型"


def test_a_table_aligns_numbers_to_the_right_and_text_to_the_left() -> None:
    lines = table([("a", "1.0"), ("long name", "100.0")], ["name", "ms"]).splitlines()
    assert lines[2] == "a            1.0" and lines[3] == "long name  100.0"
    assert table([], ["name"]).startswith("name")


def test_one_is_singular_and_no_difference_has_no_sign() -> None:
    words = [(n, noun) for n in (1, 2) for noun in ("row", "stage", "microbatch")]
    assert [counted(*each) for each in words] == [
        "1 row",
        "1 stage",
        "1 microbatch",
        "2 rows",
        "2 stages",
        "2 microbatches",
    ]
    assert [signed(share, 2) for share in (-1e-6, 0.0, -0.012, 0.5)] == ["+0.00%", "+0.00%", "-1.20%", "+50.00%"]
    assert signed(-0.004) == "+0%"


def test_a_plan_says_what_its_bound_bounds_and_how_large_microbatches_are() -> None:
    text = format_plan(make_plan(strategy=Strategy(2, 1, 1, 0, "1f1b", 4, 1)))
    assert "4 microbatches of 1 row," in text and "lower bound (of the formula)" in text
    assert "\ntimes" not in text


@pytest.mark.parametrize(
    ("times_from", "words"),
    [("measured", "as they were measured"), ("corrected", "of formulas: those of operators corrected by")],
)
def test_a_plan_says_where_its_times_come_from(times_from: str, words: str) -> None:
    (line,) = (line for line in format_plan(make_plan(times_from=times_from)).splitlines() if line.startswith("times"))
    assert words in line
