"""The strict ledger reports columns that are missing on one side."""

from __future__ import annotations

import json
from typing import Any

import pytest
from strict_ledger import StrictLedger

ROW = {"word": "a", "n": 1}


def event(op: str, before: Any = None, after: Any = None) -> dict[str, Any]:
    """A change of the row ``a``, in a transaction of its own."""
    texts = {"before": before and json.dumps(before), "after": after and json.dumps(after)}
    position = {"lsn": hash((op, str(after))), "transaction": op}
    return {"id": f"s:{position}", "op": op, "table": "words", "key": '{"word":"a"}', "position": position, **texts}


@pytest.mark.parametrize(
    ("row", "table"),
    [
        ({"word": "a"}, ROW),
        ({**ROW, "note": None}, ROW),
        ({"word": "a", "n": 2}, ROW),
    ],
)
def test_column_on_one_side_only_is_a_fault(row: dict[str, Any], table: dict[str, Any]) -> None:
    ledger = StrictLedger()
    ledger.apply([event("c", after=row)])
    ledger.compare("words", [table], ("word",))
    [fault] = ledger.verdict()
    assert "the table has" in fault


@pytest.mark.parametrize("more", [{}, {"extra": "x"}])
def test_columns_that_writers_add_and_drop_may_be_missing(more: dict[str, Any]) -> None:
    ledger = StrictLedger()
    ledger.apply([event("c", after={**ROW, **more})])
    ledger.compare("words", [ROW], ("word",))
    ledger.compare("words", [{**ROW, "extra": "x"}], ("word",))
    assert ledger.verdict() == []


@pytest.mark.parametrize(
    ("before", "faults"),
    [(ROW, 0), ({"word": "a"}, 0), ({"word": "a", "n": 2}, 1), ({"n": 1}, 1), ({**ROW, "m": 1}, 1)],
)
def test_old_row_is_the_whole_row_or_its_key(before: dict[str, Any], faults: int) -> None:
    ledger = StrictLedger()
    ledger.apply([event("c", after=ROW), event("d", before=before)])
    assert len(ledger.verdict()) == faults
