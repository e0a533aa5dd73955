"""append_unique: where rows have no stable order, their event ids decide whether they were written before."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.context import ROW_WORDS, Context
from millstream.broker.keys import beside
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    count_word,
    entry_id,
    field_words,
    name_word,
    pairs,
    trim_words,
)
from millstream.broker.operations.durability import Wanted, durability_of, run_script_durably
from millstream.broker.steps.once.call import chunks
from millstream.broker.steps.once.writer import Appended
from millstream.broker.steps.retention.call import keep_short
from millstream.broker.steps.script import script
from millstream.errors import InvalidArgument, ServerError
from millstream.model import EntryId, TrimPolicy
from millstream.wire import Conversation

DAY_MS = 24 * 3600 * 1000


def append_unique(
    context: Context,
    stream: Name,
    entries: Sequence[tuple[str | bytes, Fields]],
    *,
    window_ms: int = DAY_MS,
    trim: TrimPolicy | None = None,
    durability: Wanted = None,
) -> Conversation[Appended]:
    """See ``Broker.append_unique``."""
    key = name_word(stream, "stream")
    keys = (key, *(beside(key, suffix) for suffix in ("seen.a", "seen.b", "seen.t")))
    words = trim_words(trim)
    head = [count_word(window_ms, "window_ms"), b"%d" % len(words), *words]
    rows = [
        [name_word(event, "entries"), *field_words(fields, context.limits)]
        for event, fields in pairs(entries, "entries", "pairs of event id and fields")
    ]
    if any(len(row) > ROW_WORDS for row in rows):
        raise InvalidArgument("entries", "an entry", f"at most {ROW_WORDS // 2} fields an entry")
    wanted = durability_of(durability)
    ids: list[EntryId | None] = []
    for chunk in chunks(rows, context.limits):
        argv = list(head)
        for event, *fields in chunk:
            argv += (event, b"%d" % len(fields))
            argv += fields
        reply = yield from run_script_durably(context, script("append_unique"), keys, argv, wanted, repeatable=True)
        if len(reply) != len(chunk):
            raise ServerError(f"ERR append_unique answered for {len(reply)} of {len(chunk)} entries")
        ids += [entry_id(raw) if raw else None for raw in reply]
    new = len(ids) - ids.count(None)
    if new and context.max_stream_len is not None:
        yield from keep_short(context, key, new)
    return Appended(ids, new, len(ids) - new)
