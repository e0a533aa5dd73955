"""Messages that are published later: kept beside their stream, and moved into it when they are due."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.context import ROW_WORDS, Context
from millstream.broker.keys import beside
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    count_word,
    field_words,
    name_word,
    pairs,
)
from millstream.broker.operations.durability import Wanted, durability_of, run_script_durably
from millstream.broker.steps.retention.call import keep_short
from millstream.broker.steps.script import run_script, script
from millstream.errors import InvalidArgument
from millstream.wire import Conversation


def publish_later(
    context: Context,
    stream: Name,
    messages: Sequence[tuple[Name, Fields]],
    *,
    delay_ms: int,
    unique_for_ms: int | None = None,
    durability: Wanted = None,
) -> Conversation[int]:
    """Keeps entries beside the stream until they are due; ``publish_due`` adds them. Idempotent by token.

    ``messages``: token and fields. The same token with the same fields is not kept again while it waits, nor for an
    hour after it was published. With ``unique_for_ms`` tokens are event ids, those of ``append_unique`` too: whatever
    its fields, a token adds nothing while it waits, nor for that long after it is due.
    """
    key = name_word(stream, "stream")
    delay = count_word(delay_ms, "delay_ms", least=0)
    window = 0 if unique_for_ms is None else int(count_word(unique_for_ms, "unique_for_ms")) + delay_ms
    argv = [count_word(window, "unique_for_ms", least=0), delay]
    for token, fields in pairs(messages, "messages", "pairs of a token and fields"):
        word, words = name_word(token, "token"), field_words(fields, context.limits)
        if len(words) > ROW_WORDS:  # when it is due a script could not add it, nor any message behind it
            raise InvalidArgument("messages", "a message", f"at most {ROW_WORDS // 2} fields a message")
        argv += (word, b"".join(b"%d:%b" % (len(part), part) for part in (word, *words)))
    keys = tuple(beside(key, suffix) for suffix in ("later", "later.done", "seen.a", "seen.b", "seen.t"))
    wanted = durability_of(durability)
    kept: int = yield from run_script_durably(context, script("later_add"), keys, argv, wanted, repeatable=True)
    return kept


def publish_due(
    context: Context, stream: Name, *, limit: int = 100, remember_ms: int = 3_600_000
) -> Conversation[tuple[int, int | None]]:
    """Adds what is due to the stream, oldest first: how many, and the milliseconds until the next (None: nothing)."""
    key = name_word(stream, "stream")
    keys = (key, beside(key, "later"), beside(key, "later.done"))
    argv = (count_word(limit, "limit"), count_word(remember_ms, "remember_ms"))
    reply = yield from run_script(script("later_move"), keys, argv)
    if reply[0] and context.max_stream_len is not None:
        yield from keep_short(context, key, len(reply[0]))
    return len(reply[0]), None if reply[1] < 0 else int(reply[1])
