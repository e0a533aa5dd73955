"""Exact numbers as JSON numbers with a fixed scale: all digits, no exponent, and text where the scale does not fit."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millstream.cdc.json_columns import NumericAs, as_json

TINY = "0." + "0" * 37 + "1"


@pytest.mark.parametrize(
    ("scale", "texts", "values"),
    [
        (0, ["7", "-7", "7.0", "9" * 38, "9" * 39], ["7", "-7", '"7.0"', "9" * 38, f'"{"9" * 39}"']),
        (2, ["7", "-0.5", "1.10", "1.101", "NaN", None], ["7.00", "-0.50", "1.10", '"1.101"', '"NaN"', None]),
        (9, ["0", "0.000000001", "-0.0000001"], ["0.000000000", "0.000000001", "-0.000000100"]),
        (37, ["9", "10", "0"], [f"9.{'0' * 37}", '"10"', f"0.{'0' * 37}"]),
        (38, [TINY, "0.5", "1", "-0.5"], [TINY, f"0.5{'0' * 37}", '"1"', f"-0.5{'0' * 37}"]),
    ],
)
def test_number_has_the_digits_of_the_scale(scale: int, texts: list[str | None], values: list[str | None]) -> None:
    numeric = NumericAs.parse(f"decimal({scale})")
    assert numeric is not None
    assert as_json(pa.array(texts, pa.string()), "numeric", numeric).values.to_pylist() == values
