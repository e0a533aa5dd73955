"""The JSON output of each command (``-o json``): its keys and the kinds of their values.

``docs/reference/json.md`` is generated from this, and a test checks every command against it. Keys are stable; new ones
may be added.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

KINDS: Final = {
    "name": "text: a name; invalid UTF-8 is escaped",
    "text": "text for people",
    "id": "text: an entry's id, `1700000000000-0`",
    "time": "text: ISO 8601 in UTC with milliseconds, `2026-01-31T12:00:00.000Z`",
    "count": "a whole number",
    "number": "a number",
    "ms": "a whole number of milliseconds",
    "bytes": "a whole number of bytes",
    "flag": "true or false",
    "fields": "an object: field to value, both text",
    "object": "an object; its members depend on the spec, or are on the page of the command",
    "names": "a list of names",
    "any": "depends on the source of the pipeline",
}
"""A kind followed by ``?`` may be null."""


class Answer(NamedTuple):
    """``list``: a list of such objects. ``object``: one object. ``lines``: one object per line."""

    shape: str
    keys: dict[str, Any]


_GROUP: Final = {"stream": "name", "group": "name"}
_CONSUMER: Final = {"consumer": "name", "pending": "count", "idle_ms": "ms"}
_LETTER: Final = {
    "id": "id",
    "dead_lettered_at": "time?",
    "stream": "name?",
    "original_id": "name?",
    "group": "name?",
    "consumer": "name?",
    "deliveries": "count?",
    "pipeline": "name?",
    "stage": "name?",
    "error_type": "text?",
    "error": "text",
}
_LOST: Final = [{"group": "name", "count": "count"}]

ANSWERS: Final[dict[str, Answer]] = {
    "streams ls": Answer(
        "list",
        {
            "stream": "name",
            "length": "count",
            "groups": "count",
            "lag": "count?",
            "pending": "count",
            "last_entry_at": "time?",
            "memory_bytes": "bytes?",
        },
    ),
    "streams describe": Answer(
        "object",
        {
            "stream": "name",
            "length": "count",
            "entries_added": "count",
            "deleted_or_trimmed": "count",
            "first_id": "id?",
            "last_id": "id",
            "last_entry_at": "time?",
            "groups": [
                {
                    "group": "name",
                    "lag": "count?",
                    "pending": "count",
                    "last_delivered_id": "id",
                    "consumers": [_CONSUMER],
                }
            ],
        },
    ),
    "streams tail": Answer("lines", {"id": "id", "fields": "fields"}),
    "streams add": Answer("object", {"stream": "name", "id": "id"}),
    "streams del": Answer("object", {"stream": "name", "deleted": "count"}),
    "streams trim": Answer("object", {"stream": "name", "trimmed": "count", "left": "count"}),
    "streams rm": Answer("object", {"stream": "name", "removed": "flag"}),
    "groups ls": Answer(
        "list",
        {
            **_GROUP,
            "consumers": "count",
            "lag": "count?",
            "pending": "count",
            "oldest_pending_id": "id?",
            "oldest_pending_at": "time?",
            "last_delivered_id": "id",
        },
    ),
    "groups describe": Answer(
        "object",
        {
            **_GROUP,
            "last_delivered_id": "id",
            "entries_read": "count?",
            "lag": "count?",
            "pending": "count",
            "consumers": [_CONSUMER],
        },
    ),
    "groups create": Answer("object", {**_GROUP, "created": "flag"}),
    "groups rm": Answer("object", {**_GROUP, "removed": "flag"}),
    "groups reset": Answer("object", {**_GROUP, "position_id": "id"}),
    "consumers ls": Answer("list", {"group": "name", **_CONSUMER}),
    "consumers reap": Answer("list", {"consumer": "name", "handed_over": "count", "discarded": "count"}),
    "pending ls": Answer(
        "list", {"group": "name", "id": "id", "consumer": "name", "idle_ms": "ms", "deliveries": "count"}
    ),
    "pending ls --entries": Answer(
        "list",
        {
            "group": "name",
            "id": "id",
            "consumer": "name",
            "idle_ms": "ms",
            "deliveries": "count",
            "fields": "fields?",
        },
    ),
    "pending claim": Answer("list", {"id": "id"}),
    "pending ack": Answer("object", {**_GROUP, "acknowledged": "count"}),
    "dlq ls": Answer(
        "list",
        {"dead_letters": "name", "count": "count", "error_type": "text", "error": "text", "error_count": "count"},
    ),
    "dlq ls STREAM": Answer("list", _LETTER),
    "dlq show": Answer("object", {**_LETTER, "traceback": "text?", "fields": "fields"}),
    "dlq errors": Answer(
        "list",
        {
            "count": "count",
            "error_type": "text",
            "error": "text",
            "groups": "names",
            "first_id": "id",
            "last_id": "id",
            "example": "text",
        },
    ),
    "dlq replay": Answer(
        "object",
        {
            "added": "count",
            "already": "count",
            "left": "count",
            "without_handler": [{"stream": "name", "group": "name", "count": "count"}],
            "streams": "object",
            "dry_run": "flag",
        },
    ),
    "dlq purge": Answer("object", {"stream": "name", "purged": "count", "dry_run": "flag"}),
    "dlq purge --dry-run": Answer("object", {"stream": "name", "would_purge": "count", "dry_run": "flag"}),
    "retention ls": Answer(
        "list",
        {
            "stream": "name",
            "length": "count",
            "oldest_entry_at": "time?",
            "memory_bytes": "bytes?",
            "trim_waits_for": "name?",
            "lag": "count?",
            "pending": "count?",
            "lost": _LOST,
        },
    ),
    "retention apply": Answer(
        "list",
        {
            "stream": "name",
            "dropped": "count",
            "length": "count",
            "memory_bytes": "bytes",
            "held_back_by": [{"group": "name", "entries": "count", "idle_ms": "ms?", "dead": "flag"}],
            "lost": _LOST,
        },
    ),
    "assignments ls": Answer(
        "list",
        {
            "stream": "name",
            "lbs_id": "id",
            "owner": "name?",
            "alive": "flag",
            "token": "count?",
            "held_since": "time?",
            "held_for_ms": "ms?",
            "info": "object",
        },
    ),
    "assignments announce": Answer("object", {"service": "name", "stream": "name", "lbs_id": "id"}),
    "assignments release": Answer("object", {"service": "name", "stream": "name", "owner": "name?"}),
    "pipeline ls": Answer(
        "list",
        {
            "pipeline": "name?",
            "state": "text",
            "batch": "count?",
            "rows_per_second": "number?",
            "lag": "count?",
            "source": "name?",
            "sinks": "names",
            "holder": "object?",
            "file": "name",
        },
    ),
    "pipeline validate": Answer("list", {"pipeline": "name", "warnings": "names"}),
    "pipeline plan": Answer(
        "list", {"pipeline": "name", "fits": "flag", "plan": [{"part": "text", "how": "text", "fits": "flag?"}]}
    ),
    "pipeline status": Answer(
        "object",
        {
            "name": "name",
            "tenant": "name",
            "state": "text",
            "error": "text?",
            "batch": "count?",
            "in_flight": "count?",
            "checkpoint": "name",
            "source": "text",
            "sinks": "object",
            "waiting": "object",
            "progress": "object",
            "holder": "object?",
        },
    ),
    "pipeline checkpoints": Answer(
        "list", {"batch": "count", "planned_at": "time?", "committed_at": "time?", "offsets": "any"}
    ),
    "pipeline prepare": Answer("object", {"archive": "name", "created": "flag"}),
    "pipeline reset": Answer("object", {"pipeline": "name", "checkpoint": "name", "removed": "flag"}),
    "pipeline replay-dead-letters": Answer(
        "object", {"pipeline": "name", "delivered": "count", "failed_again": "count", "kept": "count"}
    ),
    "run --check": Answer("list", {"handler": "name", "topic": "name", "group": "name?", "place": "name"}),
    "migrate": Answer(
        "object",
        {
            "streams": "count",
            "entries": "count",
            "groups": "count",
            "consumers": "count",
            "pending": "count",
            "other_keys": "count",
            "skipped": "count",
            "databases": "any",
            "seconds": "number",
        },
    ),
    "top": Answer(
        "list",
        {
            "stream": "name",
            "length": "count",
            "added_per_s": "number?",
            "groups": "count",
            "lag": "count?",
            "pending": "count",
            "oldest_pending_ms": "ms?",
            "memory_bytes": "bytes?",
            "holds_back": "name?",
            "dead_letters": "count",
            "assigned_streams": "count",
        },
    ),
    "doctor": Answer("list", {"level": "text", "what": "text", "found": "text", "remedy": "text"}),
    "verify": Answer("list", {"chapter": "text", "test": "text", "failure": "text?", "skipped": "text?"}),
}
