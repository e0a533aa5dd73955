"""Keeping streams short without dropping what a group still needs."""

from __future__ import annotations

from millstream.broker.context import Context
from millstream.broker.operations.arguments import Id, Name, count_word, id_word, name_word
from millstream.broker.steps.script import run_script, script
from millstream.errors import InvalidArgument, MillstreamError
from millstream.wire.commands import Conversation
from millstream.wire.names import to_name

REMEMBERED_STREAMS = 10_000
"""Streams whose adds are counted. Beyond that counting starts afresh: streams are then trimmed sooner, never later."""


def trim_safely(
    context: Context, stream: Name, *, max_len: int | None = None, min_id: Id | None = None
) -> Conversation[int]:
    """Drops what is beyond ``max_len`` entries or older than ``min_id``, but nothing that a group still needs.

    Needed is every pending entry, what follows it, and what a group has not read. With no group only the bounds
    count. Atomic over all groups. Returns how many entries went.
    """
    if max_len is None and min_id is None:
        raise InvalidArgument("max_len", None, "max_len, min_id, or both")
    key = name_word(stream, "stream")
    argv = (
        b"" if max_len is None else count_word(max_len, "max_len", least=0),
        b"" if min_id is None else id_word(min_id, "min_id"),
    )
    gone: int = yield from run_script(script("trim_safely"), (key,), argv, repeatable=True)
    return gone


def added(context: Context, key: bytes, count: int) -> Conversation[None]:
    """Counts what was added, and trims when enough has come together: at the first add, then each tenth of the limit.

    The first add counts, so that writers which live for a few entries keep a stream short too.
    """
    assert context.max_stream_len is not None
    until_trim = context.until_trim
    left = until_trim.get(key, 0) - count
    if left > 0:
        until_trim[key] = left
        return
    if len(until_trim) >= REMEMBERED_STREAMS:
        until_trim.clear()
    until_trim[key] = max(1, min(context.max_stream_len // 10, 1000))
    try:
        yield from trim_safely(context, key, max_len=context.max_stream_len)
    except MillstreamError as error:
        # The entry is stored: a trim that fails must not make its writer believe otherwise.
        context.observer("broker.trim_failed", stream=to_name(key), error=str(error))
