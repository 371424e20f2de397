"""Numbers keep their meaning in print, and text cannot steer a terminal."""

from __future__ import annotations

from autopart.text import count, gibibytes, milliseconds, printable, table


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
