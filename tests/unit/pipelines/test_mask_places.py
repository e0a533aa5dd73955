"""A masked value leaves in no place: duplicate members, keys, JSON as text, and fields under their earlier names."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from pydantic import TypeAdapter
from specs import URI, planned

from millstream.model import Entry, EntryId
from millstream.pipelines import paths
from millstream.pipelines.dead_letters import _is_withheld
from millstream.pipelines.envelope_reader import understand
from millstream.pipelines.json_text import JsonError, has_duplicate_members, parse, write
from millstream.pipelines.paths import FieldPath
from millstream.pipelines.processors import AnyProcessor, Processor
from millstream.pipelines.processors.fields import (
    VALUE_WITHHELD,
    Flatten,
    Mask,
    Rename,
    _concealed,
    _concealed_key,
    _new_hashes,
    hidden_before,
)
from millstream.pipelines.templates import as_json, distinct_text

CANARY = "canary-4711"
_PROCESSOR: TypeAdapter[Processor] = TypeAdapter(AnyProcessor)


def processors(*specs: dict[str, Any]) -> list[Processor]:
    return [_PROCESSOR.validate_python(spec) for spec in specs]


def mask(**fields: str) -> dict[str, Any]:
    return {"type": "mask", "fields": fields}


@pytest.mark.parametrize(
    ("chain", "row"),
    [
        ([{"type": "rename", "fields": {"old": "new"}}, mask(new="hash")], {"old": CANARY, "new": CANARY}),
        ([{"type": "flatten"}, mask(contact__email="hash")], {"contact": {"email": CANARY}, "contact__email": CANARY}),
        (
            [{"type": "flatten"}, {"type": "rename", "fields": {"a__b__c": "x"}}, mask(x="redact")],
            {"a": {"b": {"c": CANARY}}, "a__b": {"c": CANARY}},
        ),
        (
            [{"type": "sql", "query": "SELECT id, op, email AS mail FROM events"}, mask(mail="hash")],
            {"email": CANARY, "tags": [CANARY], "deep": {"x": [{"y": CANARY}]}},
        ),
        ([mask(email="hash")], {"inner": json.dumps({"email": CANARY}), "list": [json.dumps([{"email": CANARY}])]}),
        ([mask(email="hash")], {"inner": json.dumps(json.dumps(json.dumps({"email": CANARY})))}),
        ([{"type": "flatten"}, mask(a___b="hash")], {"a_": {"b": CANARY}, "a": {"_b": CANARY}, "a___b": CANARY}),
        ([{"type": "flatten"}, mask(__a="hash")], {"": {"a": CANARY}}),
    ],
)
def test_dead_letter_holds_no_clear_value_under_an_earlier_name(
    chain: list[dict[str, Any]], row: dict[str, Any]
) -> None:
    assert CANARY not in _concealed(json.dumps(row), hidden_before(processors(*chain)))


def test_earlier_duplicate_member_is_not_kept() -> None:
    text = f'{{"email": "{CANARY}", "email": null}}'
    assert has_duplicate_members(text)
    assert CANARY not in _concealed(text, hidden_before(processors(mask(email="hash"))))


def test_masked_key_is_masked_in_the_entry_key() -> None:
    [hashing] = processors(mask(email="hash"))
    assert isinstance(hashing, Mask)
    row = {"email": CANARY, "id": "7"}
    hashed = hashing.masked("hash", CANARY)
    assert hashing.masked_key(CANARY, None, row) == hashed
    assert json.loads(hashing.masked_key(json.dumps({"email": CANARY}), None, row) or "") == {"email": hashed}
    assert hashing.masked_key("7", None, row) == "7"
    hidden = hidden_before([hashing])
    assert _concealed_key(CANARY, (None, json.dumps(row), None), hidden) == VALUE_WITHHELD
    assert _concealed_key("7", (None, json.dumps(row), None), hidden) == "7"
    assert _concealed_key("7", (None, None, f"{CANARY} {{"), hidden) == VALUE_WITHHELD


def test_value_that_looks_like_a_hash_is_masked_in_front_of_the_mask() -> None:
    """An access token of 64 hexadecimal digits is a common value of a masked field."""
    token = hashlib.sha256(b"canary").hexdigest()
    chain = processors(mask(token="hash"), {"type": "rename", "fields": {"old": "token"}}, mask(token="redact"))
    failed_at_source = _concealed(json.dumps({"token": token, "old": token}), hidden_before(chain))
    assert token not in failed_at_source
    assert isinstance(chain[0], Mask)
    assert json.loads(failed_at_source)["token"] == chain[0].masked("hash", token), "hashed once"
    masked_already = json.dumps({"token": chain[0].masked("hash", "x")})
    assert _concealed(masked_already, hidden_before(chain[:1], 1)) == masked_already, "kept, so that a replay can go on"


def test_value_is_hashed_once_where_two_names_lead_to_it() -> None:
    chain = processors({"type": "mask", "fields": {"email": "hash", "contact.email": "hash"}})
    [hashing] = chain
    assert isinstance(hashing, Mask)
    result = json.loads(_concealed(json.dumps({"contact": {"email": CANARY}}), hidden_before(chain)))
    assert result["contact"]["email"] == hashing.masked("hash", CANARY)


def test_key_with_the_names_of_the_source_is_masked_behind_a_rename() -> None:
    rename, hashing = processors({"type": "rename", "fields": {"email": "mail"}}, mask(mail="hash"))
    assert isinstance(hashing, Mask)
    key = json.dumps({"id": 7, "email": CANARY})
    assert CANARY not in (hashing.masked_key(key, {"id": 7, "mail": CANARY}, None) or "")
    hidden = hidden_before([rename, hashing])
    concealed = _concealed_key(key, (json.dumps({"id": 7, "email": CANARY}), None, None), hidden)
    assert CANARY not in concealed
    assert json.loads(concealed)["id"] == 7


def test_dead_letter_with_withheld_values_is_not_replayed() -> None:
    hidden = hidden_before(processors({"type": "sql", "query": "SELECT id, op FROM events"}, mask(mail="hash")))
    payload = _concealed(json.dumps({"email": CANARY}), hidden)
    assert _is_withheld(Entry(EntryId(1), {b"payload": payload.encode()}))
    assert not _is_withheld(Entry(EntryId(1), {b"payload": b'{"email":"x"}', b"key": b"7"}))
    key = _concealed_key('{"id":"7"}', (json.dumps({"id": "7"}), None, None), hidden)
    assert _is_withheld(Entry(EntryId(1), {b"key": key.encode(), b"payload": b"{}"}))


def test_replay_masks_clear_values_and_keeps_the_hashes_of_the_dead_letter() -> None:
    [hashing] = processors(mask(email="hash"))
    assert isinstance(hashing, Mask)
    clear = {"email": CANARY, "other": "x"}
    concealed = _concealed(json.dumps(clear), hidden_before([hashing]))
    hashes = _new_hashes(json.dumps(clear), concealed).split()
    assert hashes == [hashing.masked("hash", CANARY)]
    again = hashing.for_masked_letters(frozenset(hashes))
    row = json.loads(concealed)
    again.hides()(row)
    assert row == json.loads(concealed)
    for key in (row["email"], json.dumps({"email": row["email"]}, separators=(",", ":"))):
        assert again.masked_key(key, None, row) == key
    token = {"email": hashlib.sha256(b"a clear value that only looks like a hash").hexdigest()}
    masked = dict(token)
    again.hides()(masked)
    assert masked == {"email": hashing.masked("hash", token["email"])}
    again.hides()(clear)
    assert CANARY not in clear["email"]


KEYS = [
    CANARY,
    json.dumps(CANARY),
    json.dumps([CANARY]),
    json.dumps({"email": CANARY}),
    json.dumps({"schema": {"type": "struct"}, "payload": {"email": CANARY}}),
    json.dumps({"contact": {"email": CANARY}}),
    json.dumps({"k": [CANARY, {}]}),
    json.dumps(json.dumps({"email": CANARY})),
    f"7|{CANARY}",
    f"id{CANARY}x",
    json.dumps({"k": f"7|{CANARY}"}),
]


@pytest.mark.parametrize("key", KEYS)
def test_key_holds_no_masked_value_in_any_form(key: str) -> None:
    [hashing] = processors(mask(mail="hash"))
    assert isinstance(hashing, Mask)
    masked = hashing.masked_key(key, None, {"id": 7, "mail": CANARY})
    assert masked is not None
    assert CANARY not in masked
    assert hashing.masked("hash", CANARY) in masked
    assert CANARY not in (hashing.masked_key(key, {"mail": {"address": CANARY}}, None) or "")
    row = json.dumps({"id": 7, "email": CANARY})
    rename, sql = processors(
        {"type": "rename", "fields": {"email": "mail"}}, {"type": "sql", "query": "SELECT id, op FROM events"}
    )
    for chain in ([rename, hashing], [sql, hashing]):
        assert CANARY not in _concealed_key(key, (None, row, None), hidden_before(chain))


def test_key_is_kept_where_a_short_value_is_only_a_part_of_another_one() -> None:
    [hashing] = processors(mask(n="redact"))
    assert isinstance(hashing, Mask)
    row = {"n": "7"}
    assert [hashing.masked_key(key, row) for key in ("17", "7", "x-7", "[77]", "[7]")] == [
        "17",
        "***",
        "x-***",
        "[77]",
        '["***"]',
    ]
    assert hashing.masked_key("47110815", {"n": parse("47110815.0")}) == "***"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"a": [CANARY, {"x": 1}]}),
        json.dumps({"a": [[CANARY]]}),
        json.dumps([CANARY]),
        json.dumps([{"a": 1}, CANARY]),
        json.dumps({CANARY: 1}),
        json.dumps({"a": {"b": {CANARY: [CANARY]}}}),
    ],
)
def test_withheld_row_holds_no_value_at_all(text: str) -> None:
    hidden = hidden_before(processors({"type": "python", "function": "a:b"}, mask(email="hash")))
    assert CANARY not in _concealed(text, hidden)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"email": CANARY})[:-1],
        json.dumps({"email": CANARY}) + "\n" + json.dumps({"email": CANARY}),
        '{"a":' * 300 + json.dumps({"email": CANARY}) + "}" * 300,
        '{"\\u0065mail": "' + CANARY,
    ],
)
def test_text_that_may_hold_a_masked_field_and_cannot_be_searched_is_withheld(text: str) -> None:
    hidden = hidden_before(processors(mask(email="hash")))
    assert CANARY not in _concealed(json.dumps({"a": text}), hidden)
    assert _concealed('{"a":"see [1] and {x}"}', hidden) == '{"a":"see [1] and {x}"}'


@pytest.mark.parametrize("levels", [201, 340, 990])
def test_deep_document_is_refused_by_the_source(levels: int) -> None:
    deep = '{"a":' * levels + "1" + "}" * levels
    for form in ("auto", "row"):
        assert "nested too deeply" in (understand(deep, form).error or "no error")  # type: ignore[arg-type]
    with pytest.raises(JsonError):
        parse(deep)


def test_document_at_the_depth_limit_is_written() -> None:
    deep = '{"a":' * 200 + "1" + "}" * 200
    assert write(parse(deep)) == deep


def test_lone_surrogate_can_be_a_distinct_value() -> None:
    text = distinct_text("\ud800")
    assert text.encode()
    assert parse(as_json(text)) == "\ud800"


@pytest.mark.parametrize("text", ['{"id": 1, "op": "t"}', '{"id": 1, "op": "d"}'])
def test_plain_row_with_a_column_op_is_a_row(text: str) -> None:
    result = understand(text, "auto")
    assert (result.op, result.after) == ("c", text)


def flattened_and_masked(row: dict[str, Any], *chain: dict[str, Any]) -> str:
    """The row after the processors of a pipeline's plan, each applied to it without Spark."""
    made = planned(source={"type": "redis", "config": {"uri": URI, "stream": "in"}}, processors=list(chain))
    row = json.loads(json.dumps(row))
    for placed in (*made.streaming, *made.per_batch):
        processor = placed.processor
        if isinstance(processor, Flatten):
            processor._flat(row)
        elif isinstance(processor, Rename):
            paths.rename(row, processor._names())
        elif isinstance(processor, Mask):
            processor.hides()(row)
    return json.dumps(row)


SHAPES = [
    {"contact": {"email": CANARY}},
    {"contact": [{"email": CANARY}, {"email": [CANARY]}]},
    {"contact": [[{"email": {"work": CANARY}}]]},
    {"contact": {"email": {"work": CANARY}}},
    {"contact": {"email": [{"work": CANARY}]}},
    {"contact.email": CANARY},
    {"contact.email": {"work": CANARY}},
    {"contact__email": CANARY},
    {"contact__email": {"work": CANARY}},
    {"contact__email": [{"work": {"x": CANARY}}]},
]


@pytest.mark.parametrize("row", SHAPES, ids=json.dumps)
@pytest.mark.parametrize("depth", [1, 4])
def test_mask_behind_flatten_finds_the_field_in_every_shape(row: dict[str, Any], depth: int) -> None:
    flatten = {"type": "flatten", "max_depth": depth}
    renaming = {"type": "rename", "fields": {"contact__email": "mail", "contact": "person"}}
    row = {**row, "other": {"x": "1"}}
    result = flattened_and_masked(row, flatten, mask(contact__email="hash"))
    assert CANARY not in result
    assert "other__x" in result
    assert CANARY not in flattened_and_masked(row, flatten, renaming, mask(mail="hash"))
    assert CANARY not in flattened_and_masked(
        row, flatten, {"type": "flatten", "separator": "_"}, mask(contact__email="hash")
    )
    dotted = {"type": "flatten", "separator": ".", "max_depth": depth}
    if "contact__email" not in row:
        assert CANARY not in flattened_and_masked(row, dotted, mask(**{"contact.email": "hash"}))


def test_mask_behind_flatten_finds_a_field_below_the_depth() -> None:
    row = {"a": {"b": {"c": {"d": CANARY}}}}
    for depth in (1, 2, 3):
        assert CANARY not in flattened_and_masked(row, {"type": "flatten", "max_depth": depth}, mask(a__b__c__d="hash"))
    assert CANARY not in flattened_and_masked(row, {"type": "flatten"}, mask(a="redact"))


def test_mask_behind_flatten_leaves_fields_with_similar_names() -> None:
    row = {"contact": {"email": "a", "email_verified": True}, "email": "b", "contacts": [{"email": "c"}]}
    result = flattened_and_masked(row, {"type": "flatten", "separator": "_"}, mask(contact_email="redact"))
    assert json.loads(result) == {
        "contact_email": "***", "contact_email_verified": True, "email": "b", "contacts": [{"email": "c"}],
    }  # fmt: skip


@pytest.mark.parametrize("row", SHAPES, ids=json.dumps)
def test_letter_that_fails_between_flatten_and_mask_is_concealed_in_every_shape(row: dict[str, Any]) -> None:
    chain = [{"type": "flatten"}, {"type": "filter", "ops": ["c"]}, mask(contact__email="hash")]
    made = planned(source={"type": "redis", "config": {"uri": URI, "stream": "in"}}, processors=chain)
    for stage in ("source", "processors[0]", "processors[1]", "processors[2]"):
        assert CANARY not in _concealed(json.dumps(row), made.hidden_by_stage()[stage])


def test_replay_masks_every_shape_too() -> None:
    made = planned(
        source={"type": "redis", "config": {"uri": URI, "stream": "in"}},
        processors=[{"type": "flatten"}, mask(contact__email="hash")],
    )
    again = made.streaming[1].processor.for_masked_letters(frozenset())
    row = {"contact": [{"email": CANARY}]}
    assert isinstance(again, Mask)
    assert again.hides()(row)
    assert CANARY not in json.dumps(row)
    assert CANARY not in (again.masked_key(f"7|{CANARY}", {"contact": [{"email": CANARY}]}) or "")


def test_name_with_too_many_separators_is_refused() -> None:
    [flatten] = processors({"type": "flatten", "separator": "_"})
    assert flatten.takes_away(FieldPath.of_row("a_b_c")) is None
    assert "separator" in (flatten.takes_away(FieldPath.of_row("_".join("abcdefghijklmno"))) or "")
