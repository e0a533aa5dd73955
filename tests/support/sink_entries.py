"""Entries as the redis sink of a pipeline writes them, byte for byte: every layout with every envelope and every op.

``tests/spark/pipelines/test_sink_entries.py`` verifies that the sink writes exactly these.
"""

from __future__ import annotations

LAYOUTS = ("native", "debezium")
"""``fields:`` of the redis sink."""
ENVELOPES = ("native", "debezium", "debezium-null-schema", "cloudevents", "raw")
OPS = ("c", "u", "d", "r", "t")

ROW = '{"id":7,"total":"9.90","exact":1.10,"note":null}'
OLD_ROW = '{"id":7,"total":"5.00","exact":1.00,"note":"n"}'
ID, TABLE, NAME, DB, SCHEMA, TS_MS = "shop:26:3", "orders", "shop", "store", "public", 1001
KEY = '{"id":7}'
_HAPPENED = {"c": "created", "u": "updated", "d": "deleted", "r": "snapshot", "t": "truncated"}


def rows_of(op: str) -> tuple[str | None, str | None]:
    """``before`` and ``after`` of the event with this op, as a source sends them."""
    return {
        "c": (None, ROW),
        "u": (OLD_ROW, ROW),
        "d": (OLD_ROW, None),
        "r": (None, ROW),
        "t": (None, None),
    }[op]


def document(envelope: str, op: str) -> str:
    before, after = (row or "null" for row in rows_of(op))
    if envelope == "native":
        source = f'{{"name":"{NAME}","db":"{DB}","schema":"{SCHEMA}","table":"{TABLE}"}}'
        return f'{{"id":"{ID}","op":"{op}","ts_ms":{TS_MS},"source":{source},"before":{before},"after":{after}}}'
    if envelope.startswith("debezium"):
        snapshot = "true" if op == "r" else "false"
        source = (
            f'{{"version":"1","connector":"millstream","name":"{NAME}","ts_ms":{TS_MS},"snapshot":"{snapshot}",'
            f'"db":"{DB}","schema":"{SCHEMA}","table":"{TABLE}"}}'
        )
        payload = f'{{"before":{before},"after":{after},"source":{source},"op":"{op}","ts_ms":{TS_MS}}}'
        return f'{{"schema":null,"payload":{payload}}}' if envelope.endswith("schema") else f'{{"payload":{payload}}}'
    if envelope == "cloudevents":
        subject = "" if op == "t" else ',"subject":"{\\"id\\":7}"'
        return (
            f'{{"specversion":"1.0","id":"{ID}","source":"/{NAME}/{DB}/{SCHEMA}/{TABLE}",'
            f'"type":"millstream.{TABLE}.{_HAPPENED[op]}","time":"1970-01-01T00:00:01.001Z"{subject},'
            f'"datacontenttype":"application/json",'
            f'"data":{{"op":"{op}","ts_ms":{TS_MS},"before":{before},"after":{after}}}}}'
        )
    assert envelope == "raw"
    return before if after == "null" else after


def entry(layout: str, envelope: str, op: str) -> dict[bytes, bytes]:
    """The fields of one entry, in the order in which the sink writes them. A truncate has no key."""
    if layout == "debezium":
        key = "default" if op == "t" else KEY
        fields = {"key": key, "value": document(envelope, op), "id": ID}
    else:
        kind = "application/cloudevents+json" if envelope == "cloudevents" else "application/json"
        headers = f'{{"content-type":"{kind}","table":"{TABLE}","op":"{op}","tenant":"acme"}}'
        fields = {"event": document(envelope, op), "id": ID, "key": KEY, "headers": headers}
        if op == "t":
            del fields["key"]
    return {name.encode(): value.encode() for name, value in fields.items()}
