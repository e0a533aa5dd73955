"""Durations and sizes are parsed alike everywhere."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.model.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    parse_duration_ms,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("250ms", 250),
        ("30s", 30_000),
        ("0.1s", 100),
        ("1.5h", 5_400_000),
        (" 2 W ", 1_209_600_000),
        ("10 minutes", 600_000),
        ("1 minute", 60_000),
        ("5 min", 300_000),
        ("7 days", 604_800_000),
        ("0", 0),
        (0, 0),
    ],
)
def test_durations(text: str | int, ms: int) -> None:
    assert parse_duration_ms(text, "limit") == ms


@pytest.mark.parametrize(
    "text", ["", "-1s", "1 year", "1e3s", "٣s", "s", "1 s s", "9" * 5_000, "9" * 19 + "d", True, 1.5]
)
def test_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="limit"):
        parse_duration_ms(text, "limit")


@pytest.mark.parametrize("written", ["30", 30, "1.5"])
def test_bare_number_is_rejected_as_duration(written: str | int) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"{written}s or {written}ms")):
        parse_duration_ms(written, "limit")


def test_bare_number_is_accepted_if_the_option_has_a_unit() -> None:
    assert parse_duration_ms(30, "max_ms", bare_ms=True) == 30
    assert parse_duration_ms("30s", "max_ms", bare_ms=True) == 30_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        (7, 7),
        ("64kb", 65_536),
        ("64KiB", 65_536),
        ("1.5 MB", 1_572_864),
        ("2gb", 2 << 30),
        ("2GiB", 2 << 30),
        ("100b", 100),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size_bytes(text, "limit") == size


@pytest.mark.parametrize("text", ["", "-1", "1 tb?", "k", "1.5", "1pb", True, 1 << 70, -1])
def test_invalid_size_is_rejected(text: str | int) -> None:
    with pytest.raises(InvalidArgument, match="limit"):
        parse_size_bytes(text, "limit")


@pytest.mark.parametrize("text", ["1k", "2m", "3G"])
def test_ambiguous_units_are_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="ambiguous"):
        parse_size_bytes(text, "limit")


@given(st.integers(0, 10**9), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_parsed_values_are_exact_and_match_the_schema(number: int, unit: str) -> None:
    factor = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}[unit]
    assert parse_duration_ms(f"{number}{unit}", "x") == number * factor
    assert re.fullmatch(DURATION_PATTERN, f"{number}{unit}")
    tenth = f"{Decimal(number) / 10}{unit}"
    assert abs(parse_duration_ms(tenth, "x") - number * factor / 10) <= 0.5
    assert re.fullmatch(SIZE_PATTERN, f"{number}kb")
