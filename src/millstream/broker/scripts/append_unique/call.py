"""``append_unique``: for rows without a stable order, event ids decide whether an entry was appended before."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.context import MAX_ARGS_PER_ROW, Context
from millstream.broker.keys import companion_key
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    count_arg,
    entry_id,
    field_args,
    name_arg,
    pairs,
    trim_args,
)
from millstream.broker.operations.durability import Wanted, durability_of, run_script_durably
from millstream.broker.scripts.append_once.call import chunks
from millstream.broker.scripts.append_once.writer import Appended
from millstream.broker.scripts.retention.call import keep_short
from millstream.broker.scripts.script import script
from millstream.errors import InvalidArgument, ServerError
from millstream.model import EntryId, TrimPolicy
from millstream.wire import Operation

DAY_MS = 24 * 3600 * 1000


def append_unique(
    context: Context,
    stream: Name,
    entries: Sequence[tuple[str | bytes, Fields]],
    *,
    window_ms: int = DAY_MS,
    trim: TrimPolicy | None = None,
    durability: Wanted = None,
) -> Operation[Appended]:
    """See ``Broker.append_unique``."""
    key = name_arg(stream, "stream")
    keys = (key, *(companion_key(key, suffix) for suffix in ("seen.a", "seen.b", "seen.t")))
    args = trim_args(trim)
    head = [count_arg(window_ms, "window_ms"), b"%d" % len(args), *args]
    rows = [
        [name_arg(event, "entries"), *field_args(fields, context.limits)]
        for event, fields in pairs(entries, "entries", "pairs of event id and fields")
    ]
    if any(len(row) > MAX_ARGS_PER_ROW for row in rows):
        raise InvalidArgument("entries", "an entry", f"at most {MAX_ARGS_PER_ROW // 2} fields an entry")
    level = durability_of(durability)
    ids: list[EntryId | None] = []
    for chunk in chunks(rows, context.limits):
        argv = list(head)
        for event, *fields in chunk:
            argv += (event, b"%d" % len(fields))
            argv += fields
        reply = yield from run_script_durably(
            context, script("append_unique"), keys, argv, level, repeatable=True, fence=context.fence
        )
        if len(reply) != len(chunk):
            raise ServerError(f"ERR append_unique returned {len(reply)} ids for {len(chunk)} entries")
        ids += [entry_id(raw) if raw else None for raw in reply]
    new = len(ids) - ids.count(None)
    if new and context.max_stream_len is not None:
        yield from keep_short(context, key, new)
    return Appended(ids, new, len(ids) - new)
