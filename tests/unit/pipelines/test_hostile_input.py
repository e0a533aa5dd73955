"""Foreign documents, without Spark: an event that holds the very text, or a reason, and never an exception."""

from __future__ import annotations

import json
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.pipelines.envelope_reader import Format, understand
from millstream.pipelines.json_text import JsonError, canonical, has_duplicate_members, members, parse, write
from millstream.pipelines.processors.fields import Mask, _concealed, _concealed_key, hidden_before
from millstream.pipelines.templates import as_json, distinct_text

CANARY = "canary-4711"
NAMES = st.sampled_from(
    [
        "op",
        "before",
        "after",
        "source",
        "payload",
        "specversion",
        "type",
        "data",
        "ts_ms",
        "id",
        "email",
        "",
        "a.b",
        "}",
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(["c", "t", "x.truncated", "1.0", "\ud800", "\x00", CANARY, "{", '{"email":1}', "[" * 300]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12
)
NUMBERS = st.sampled_from(["1e400", "1e99999999999999999999", "-0.0", "9" * 50, "1.10", "1E+2"])


@st.composite
def documents(draw: st.DrawFn) -> str:
    text = json.dumps(draw(st.dictionaries(NAMES, VALUES, max_size=7)), ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):  # a member of another shape, perhaps a second one of its name
        member = f"{json.dumps(draw(NAMES))}:{draw(NUMBERS)}"
        text = "{" + member + ("," if text != "{}" else "") + text[1:]
    if draw(st.integers(0, 9)) == 0:  # not whole
        text = text[: draw(st.integers(0, len(text)))]
    return text


@settings(max_examples=400, deadline=None)
@given(documents())
def test_document_is_an_event_or_has_a_reason(text: str) -> None:
    for form in get_args(Format):
        result = understand(text, form)
        if result.error is not None:
            assert result.op is None
            continue
        assert result.op in ("c", "u", "d", "r", "t")
        for row in (result.before, result.after):
            assert row is None or (row in text and isinstance(parse(row), dict))
        assert result.op == "t" or (result.before, result.after) != (None, None), "a row is not lost"
        for name in (result.id, result.table, result.name, result.subject):
            assert name is None or name.encode()


@settings(max_examples=400, deadline=None)
@given(documents())
def test_masked_field_is_in_no_output(text: str) -> None:
    mask = Mask(type="mask", fields={"email": "hash", "a.b": "redact"})
    concealed = _concealed(text, hidden_before([mask]))
    _concealed_key(text, (text, None), hidden_before([mask]))
    mask.masked_key(text, _row(text), None)
    row = _row(concealed)
    email = row.get("email") if isinstance(row, dict) else None
    assert email is None or len(email) == 64
    assert not has_duplicate_members(concealed) if isinstance(row, dict) else True


@settings(max_examples=400, deadline=None)
@given(documents())
def test_json_is_written_as_it_was_read(text: str) -> None:
    try:
        value = parse(text)
    except JsonError:
        return
    assert canonical(parse(write(value))) == canonical(value)
    assert write(value).encode()
    for item in members(text).values() if isinstance(value, dict) else ():
        if item.value is not None:  # a null is no value of a key
            assert canonical(parse(as_json(distinct_text(item.value)))) == canonical(item.value)


def _row(text: str) -> Any:
    try:
        return parse(text)
    except JsonError:
        return None
