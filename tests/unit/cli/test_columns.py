"""Tables on a narrow screen: numbers and ids stay complete, names are shortened in the middle, and no row is too
long."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from rich.cells import cell_len

from millstream.cli.show import ago, cut, ident, lay_out, memory, name, number, span, text

LONG = "orders.eu-central-1.customer-000000000042.events"
ROW = {
    "stream": LONG,
    "group": LONG,
    "length": 12_345_678,
    "id": "1700000000000-0",
    "idle_ms": 90_000,
    "error": "x " * 99,
}


def test_numbers_stay_and_names_are_cut_in_the_middle() -> None:
    laid = lay_out([name("stream"), name("group"), number("length"), ident("id")], [ROW], 60)

    [line] = laid.lines()
    assert cell_len(line) == 60
    assert "12,345,678" in line
    assert "1700000000000-0" in line
    stream = line.split()[0]
    assert stream.startswith("orders.")
    assert stream.endswith("events")
    assert "…" in stream


def test_nothing_is_cut_if_it_fits_or_without_a_terminal() -> None:
    columns = [name("stream"), name("group"), number("length")]
    assert LONG in lay_out(columns, [ROW], 200).lines()[0]
    assert LONG in lay_out(columns, [ROW], None).lines()[0]


def test_spare_columns_are_dropped_first_from_the_right() -> None:
    columns = [name("stream"), number("length"), ident("id", spare=True), span("idle_ms", "idle", spare=True)]

    assert [item.key for item in lay_out(columns, [ROW], 44).left_out] == ["idle_ms"]
    assert [item.key for item in lay_out(columns, [ROW], 28).left_out] == ["idle_ms", "id"]
    assert lay_out(columns, [ROW], 80).left_out == []


@pytest.mark.parametrize("width", range(10, 120, 7))
def test_no_row_is_longer_than_the_screen(width: int) -> None:
    columns = [name("stream"), name("group"), number("length"), ident("id"), span("idle_ms"), text("error")]
    laid = lay_out(columns, [ROW], width)
    assert all(cell_len(line) <= width for line in (laid.header(), *laid.lines()))


def test_wide_characters_count_as_two_cells() -> None:
    assert cut("日本語日本語日本語", 9, "middle") == "日本…本語"
    assert cut("a sentence that goes on", 10, "end") == "a sentenc…"
    assert cut("short", 10, "middle") == "short"


def test_tokens_have_no_thousands_and_counts_have() -> None:
    laid = lay_out([ident("token"), number("count")], [{"token": 1700000000000, "count": 1700}], None)
    assert laid.lines() == ["1700000000000  1,700"]


def test_durations_and_sizes_are_formatted() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    columns = [ago("at", int(at.timestamp() * 1000) + 120_000), memory("bytes"), number("nothing")]
    assert lay_out(columns, [{"at": at, "bytes": 4200, "nothing": None}], None).lines() == [
        "2 min ago  4.2 kB        -"
    ]


def test_long_name_widens_no_other_row_without_a_terminal() -> None:
    rows = [{"stream": "x" * 10_000, "length": 1}, *({"stream": f"s{at}", "length": at} for at in range(100))]
    lines = lay_out([name("stream"), number("length")], rows, None).lines()
    assert "x" * 10_000 in lines[0]
    assert sum(map(len, lines)) < 30_000
    assert len({len(line) for line in lines[1:]}) == 1
