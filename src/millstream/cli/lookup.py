"""Checks that the streams, groups, consumers and entries of a command exist, before the command changes anything.

The errors name the command to type next.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millstream.broker import BlockingBroker, Context, open_blocking_broker
from millstream.broker.operations.info import list_streams, read_stream_stats
from millstream.broker.transport.targets import redacted
from millstream.errors import InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream, did_you_mean
from millstream.model import GroupInfo
from millstream.observe.format import named, printable
from millstream.wire import Operation

_GLOB = frozenset("*?[\\")


class NoSuchConsumer(MillstreamError):
    """The group has no such consumer."""


class NoSuchEntry(MillstreamError):
    """None of the given entries exists."""


def is_glob(pattern: str) -> bool:
    return not _GLOB.isdisjoint(pattern)


def command_text(*arguments: str) -> str:
    """Format a millstream command for use in a message."""
    return "`" + printable(shlex.join(("millstream", *arguments))) + "`"


def no_stream(context: Context, stream: str) -> Operation[NoSuchStream]:
    """Return the error, for ``broker.run``. It suggests the existing stream with the most similar name."""
    try:
        suggestion = did_you_mean(stream, (yield from list_streams(context, "*")))
    except MillstreamError:
        suggestion = ""  # this user may not list streams
    return NoSuchStream(
        f"there is no stream {named(stream)}{suggestion or '.'} {command_text('streams', 'ls')} lists the streams."
    )


def streams_found(broker: BlockingBroker, pattern: str) -> list[str]:
    """Return the streams that match a glob. A plain name must exist."""
    names = broker.list_streams(pattern)
    if not names and not is_glob(pattern):
        raise broker.run(no_stream, pattern)
    return names


def need_stream(broker: BlockingBroker, stream: str) -> None:
    if not broker.run(read_stream_stats, [stream], memory=False):
        broker.xlen(stream)  # raises WrongKeyType if the key is no stream
        raise broker.run(no_stream, stream)


def need_group(broker: BlockingBroker, stream: str, group: str) -> GroupInfo:
    need_stream(broker, stream)
    groups = broker.group_info(stream)
    for info in groups:
        if info.name == group:
            return info
    existing = ", ".join(named(info.name) for info in groups[:10]) or "none"
    raise NoSuchGroup(
        f"{named(stream)} has no group {named(group)} (it has: {existing}). "
        f"Create it with {command_text('groups', 'create', stream, group, '--start', '0')}."
    )


def need_consumer(broker: BlockingBroker, stream: str, group: str, consumer: str) -> None:
    if all(info.name != consumer for info in need_group(broker, stream, group).consumers):
        raise NoSuchConsumer(
            f"group {named(group)} has no consumer {named(consumer)}. "
            f"{command_text('consumers', 'ls', stream, group)} lists its consumers."
        )


def no_entry(stream: str, ids: Sequence[str], where: str) -> NoSuchEntry:
    which = ids[0] if len(ids) == 1 else f"with one of these {len(ids)} ids"
    return NoSuchEntry(f"{named(stream)}: there is no entry {printable(which)}{where}. Nothing was changed.")


DEADLINE_MS = 3_000
"""Short, because a user waits: an unreachable server is reported soon."""


def refuse_memory_broker(url: str) -> None:
    """Refuse the URL of an in-memory broker: it starts empty in this process, so a command would never see data."""
    if url == "local:" or (url.startswith("local://") and not url.startswith("local:///")):
        raise InvalidArgument(
            "--url",
            redacted(url),
            "another URL: an in-memory broker exists only within one process, and is empty here. Use a "
            "directory (local:///path) or a server (redis://host:port; `millstream serve` starts one)",
        )


@contextmanager
def opened(url: str) -> Iterator[BlockingBroker]:
    refuse_memory_broker(url)
    with open_blocking_broker(url, deadline_ms=DEADLINE_MS) as broker:
        yield broker
