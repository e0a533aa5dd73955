"""Delayed messages: stored next to their stream, and published when they are due."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.context import MAX_ARGS_PER_ROW, Context
from millstream.broker.keys import companion_key
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    count_arg,
    field_args,
    name_arg,
    pairs,
)
from millstream.broker.operations.durability import Wanted, durability_of, run_script_durably
from millstream.broker.scripts.retention.call import keep_short
from millstream.broker.scripts.script import run_script, script
from millstream.errors import InvalidArgument
from millstream.wire import Operation


def publish_later(
    context: Context,
    stream: Name,
    messages: Sequence[tuple[Name, Fields]],
    *,
    delay_ms: int,
    unique_for_ms: int | None = None,
    sort_keys: Sequence[Name] | None = None,
    durability: Wanted = None,
) -> Operation[int]:
    """Stores messages until they are due; ``publish_due`` adds them to the stream. Idempotent by token.

    ``messages`` are pairs of token and fields. A message with the same token and fields is not stored again while it
    waits, nor for an hour after it was published. With ``unique_for_ms``, tokens are event ids, shared with
    ``append_unique``: a token that was used before adds nothing, whatever its fields, while it waits and for that time
    after it is due. Messages that are due in the same millisecond are published in the order of
    their tokens or, with ``unique_for_ms``, of their ``sort_keys``.
    """
    key = name_arg(stream, "stream")
    delay = count_arg(delay_ms, "delay_ms", least=0)
    window = 0 if unique_for_ms is None else int(count_arg(unique_for_ms, "unique_for_ms")) + delay_ms
    argv = [count_arg(window, "unique_for_ms", least=0), delay]
    token_fields = pairs(messages, "messages", "pairs of a token and fields")
    if sort_keys is not None and (unique_for_ms is None or len(sort_keys) != len(messages)):
        raise InvalidArgument("sort_keys", sort_keys, "one for each message, with unique_for_ms")
    for at, (token, fields) in enumerate(token_fields):
        token_arg, args = name_arg(token, "token"), field_args(fields, context.limits)
        if len(args) > MAX_ARGS_PER_ROW:  # a script could not publish it, and it would block all later messages
            raise InvalidArgument("messages", "a message", f"at most {MAX_ARGS_PER_ROW // 2} fields a message")
        # A sorted set orders members of one score by their bytes, and a message begins with this.
        first = token_arg if sort_keys is None else name_arg(sort_keys[at], "sort_keys")
        argv += (token_arg, b"".join(b"%d:%b" % (len(part), part) for part in (first, *args)))
    keys = tuple(companion_key(key, suffix) for suffix in ("later", "later.done", "seen.a", "seen.b", "seen.t"))
    level = durability_of(durability)
    added: int = yield from run_script_durably(context, script("later_add"), keys, argv, level, repeatable=True)
    return added


def publish_due(
    context: Context, stream: Name, *, limit: int = 100, remember_ms: int = 3_600_000
) -> Operation[tuple[int, int | None]]:
    """Publishes messages that are due, oldest first.

    Returns how many were published, and the milliseconds until the next one is due (None: no message waits).
    """
    key = name_arg(stream, "stream")
    keys = (key, companion_key(key, "later"), companion_key(key, "later.done"))
    argv = (count_arg(limit, "limit"), count_arg(remember_ms, "remember_ms"))
    reply = yield from run_script(script("later_move"), keys, argv)
    if reply[0] and context.max_stream_len is not None:
        yield from keep_short(context, key, len(reply[0]))
    return len(reply[0]), None if reply[1] < 0 else int(reply[1])
