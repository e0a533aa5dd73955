"""What a command names must be there: looked for before anything is done, and the answer says what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millstream.broker import BlockingBroker, Context, list_streams, open_blocking_broker, survey
from millstream.cli import show
from millstream.errors import InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream, did_you_mean
from millstream.model import GroupInfo
from millstream.observe import named, printable
from millstream.wire import Conversation

_GLOB = frozenset("*?[\\")


class NoSuchConsumer(MillstreamError):
    """The group has never heard of the consumer."""


class NoSuchEntry(MillstreamError):
    """None of the entries that were named is there."""


def is_glob(pattern: str) -> bool:
    return not _GLOB.isdisjoint(pattern)


def typed(*words: str) -> str:
    """A command as one would type it."""
    return "`" + printable(shlex.join(("millstream", *words))) + "`"


def no_stream(context: Context, stream: str) -> Conversation[NoSuchStream]:
    """For ``broker.run``: the error, with the nearest of the names that are there, for most often a letter is wrong."""
    try:
        meant = did_you_mean(stream, (yield from list_streams(context, "*")))
    except MillstreamError:
        meant = ""  # who may not list streams is told what is missing all the same
    return NoSuchStream(
        f"there is no stream {named(stream)}{meant or '.'} {typed('streams', 'ls')} lists those that exist."
    )


def streams_found(broker: BlockingBroker, pattern: str) -> list[str]:
    """The streams of a glob. A plain name is no glob: it must be there."""
    names = broker.list_streams(pattern)
    if not names and not is_glob(pattern):
        raise broker.run(no_stream, pattern)
    return names


def need_stream(broker: BlockingBroker, stream: str) -> None:
    if not broker.run(survey, [stream], memory=False):
        broker.xlen(stream)  # where another kind of key has the name, this says so
        raise broker.run(no_stream, stream)


def need_group(broker: BlockingBroker, stream: str, group: str) -> GroupInfo:
    need_stream(broker, stream)
    groups = broker.group_info(stream)
    for found in groups:
        if found.name == group:
            return found
    others = ", ".join(named(one.name) for one in groups[:10]) or "none"
    raise NoSuchGroup(
        f"{named(stream)} has no group {named(group)} (it has: {others}). "
        f"Make it with {typed('groups', 'create', stream, group, '--start', '0')}."
    )


def need_consumer(broker: BlockingBroker, stream: str, group: str, consumer: str) -> None:
    if all(one.name != consumer for one in need_group(broker, stream, group).consumers):
        raise NoSuchConsumer(
            f"group {named(group)} has no consumer {named(consumer)}. "
            f"{typed('consumers', 'ls', stream, group)} lists those that it has."
        )


def no_entry(stream: str, ids: Sequence[str], why: str) -> NoSuchEntry:
    which = "entry " + ids[0] if len(ids) == 1 else f"any of these {len(ids)} entries"
    return NoSuchEntry(f"{named(stream)}: no sign of {printable(which)}{why}. Nothing was changed.")


DEADLINE_MS = 3_000
"""People wait for an answer: a server that is away is said to be away soon."""


def old_spelling(before: str, now: str) -> None:
    """For one release a command is still known by its old name."""
    show.warning(f"warning: `millstream {before}` is now `millstream {now}`.")


def something_to_look_at(url: str) -> None:
    """A broker in memory begins empty in this process and ends with it: nobody could have put anything there."""
    if url == "local:" or (url.startswith("local://") and not url.startswith("local:///")):
        raise InvalidArgument(
            "--url",
            url,
            "another URL: a broker in memory lives within one process, so here there is nothing to look at. Name its "
            "directory (local:///path) or a server (redis://host:port; `millstream serve` starts one)",
        )


@contextmanager
def opened(url: str) -> Iterator[BlockingBroker]:
    something_to_look_at(url)
    with open_blocking_broker(url, deadline_ms=DEADLINE_MS) as broker:
        yield broker
