"""The contract: every operation of a broker, for event loops and for threads. One line each, so they cannot drift."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from millstream.broker.context import Context
from millstream.broker.drivers import asynchronous, blocking, run_async, run_blocking, with_short_way
from millstream.broker.links.link import BlockingLink, BlockingListener, Link, Listener
from millstream.broker.once import WEEK_MS, BlockingOnceWriter, Digest, OnceWriter
from millstream.broker.operations import (
    groups,
    info,
    keyed,
    leasing,
    once,
    pending,
    progress,
    reading,
    retention,
    settling,
    survey,
    trimming,
    unique,
    writing,
)
from millstream.broker.operations.arguments import Name, name_word, sequence
from millstream.broker.operations.durable import Wanted
from millstream.broker.steps.script import Guard
from millstream.model.trim import TrimPolicy
from millstream.wire.commands import Conversation

P = ParamSpec("P")
R = TypeVar("R")


class Broker:
    """Streams, wherever they live, for event loops.

    Thread-safe, usable from several event loops and after a fork. A cancelled call may or may not have been executed
    by the server; it never leaves a connection in disorder.
    """

    def __init__(self, link: Link, context: Context, shown: str = "") -> None:
        self.link = link
        self.context = context
        self._shown = shown

    def __repr__(self) -> str:
        return f"<Broker {self._shown}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Idempotent. Calls that are under way, and all later ones, raise BrokerClosed."""
        await self.link.close()

    async def run(
        self, operation: Callable[Concatenate[Context, P], Conversation[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Runs an operation of your own, written as a conversation, as the ones below are."""
        return await run_async(self.link, operation(self.context, *args, **kwargs))

    def once_writer(
        self,
        stream: Name,
        writer: Name,
        epoch: int,
        *,
        partition: Name = "0",
        forget_after_ms: int = WEEK_MS,
        trim: TrimPolicy | None = None,
        durability: Wanted = None,
    ) -> OnceWriter:
        """A writer of ``append_once`` that keeps its position and digest, from row 0 of version ``epoch`` on."""
        options: dict[str, Any] = {"forget_after_ms": forget_after_ms, "trim": trim, "durability": durability}
        return OnceWriter(self, once.Once(stream, writer, epoch, partition=partition, digest=Digest(), **options))

    def behind(self, guard: Guard) -> Self:
        """The same broker over the same link, which settles deliveries only while the owner record is the guard's.

        Otherwise it raises StaleOwner, and nothing is done, in the same atomic step. Close the original, not this.
        """
        return type(self)(self.link, replace(self.context, guard=guard), self._shown)

    def listen(self, patterns: Name | Iterable[Name]) -> Listener:
        """Messages of the channels that match the globs: ``async for channel, payload in broker.listen("news.*")``.

        ``async with`` waits until the subscription stands. Messages sent while a connection is broken are missed.
        """
        return self.link.listen(_patterns(patterns))

    xadd = with_short_way(writing.xadd_at_once, writing.xadd)
    xadd_many = asynchronous(writing.xadd_many)
    append_once = asynchronous(once.append_once)
    append_unique = asynchronous(unique.append_unique)
    xdel = asynchronous(writing.xdel)
    xtrim = asynchronous(writing.xtrim)
    xsetid = asynchronous(writing.xsetid)
    trim_safely = asynchronous(trimming.trim_safely)

    xlen = asynchronous(reading.xlen)
    xrange = asynchronous(reading.xrange)
    xrevrange = asynchronous(reading.xrevrange)
    xread = asynchronous(reading.xread)

    create_group = asynchronous(groups.create_group)
    delete_group = asynchronous(groups.delete_group)
    set_group_position = asynchronous(groups.set_group_position)
    advance_group = asynchronous(progress.advance_group)
    create_consumer = asynchronous(groups.create_consumer)
    delete_consumer = asynchronous(groups.delete_consumer)
    xreadgroup = asynchronous(groups.xreadgroup)
    xreadgroup_many = asynchronous(groups.xreadgroup_many)
    read_history = asynchronous(groups.read_history)
    xack = asynchronous(groups.xack)

    xpending = asynchronous(pending.xpending)
    xpending_range = asynchronous(pending.xpending_range)
    xclaim = asynchronous(pending.xclaim)
    xclaim_ids = asynchronous(pending.xclaim_ids)
    xautoclaim = asynchronous(pending.xautoclaim)
    xautoclaim_ids = asynchronous(pending.xautoclaim_ids)

    stream_info = asynchronous(info.stream_info)
    group_info = asynchronous(info.group_info)
    consumer_info = asynchronous(info.consumer_info)
    list_streams = asynchronous(info.list_streams)
    ping = asynchronous(info.ping)
    server_time_ms = asynchronous(info.server_time_ms)
    server_info = asynchronous(info.server_info)
    server_version = asynchronous(info.server_version)
    server_setting = asynchronous(info.server_setting)

    get = asynchronous(keyed.get)
    set = asynchronous(keyed.set)
    delete = asynchronous(keyed.delete)
    exists = asynchronous(keyed.exists)
    expire_ms = asynchronous(keyed.expire_ms)
    ttl_ms = asynchronous(keyed.ttl_ms)
    hget = asynchronous(keyed.hget)
    hgetall = asynchronous(keyed.hgetall)
    hset = asynchronous(keyed.hset)
    hdel = asynchronous(keyed.hdel)
    publish = asynchronous(keyed.publish)
    delete_stream = asynchronous(keyed.delete_stream)
    survey = asynchronous(survey.survey)

    ack_held = asynchronous(settling.ack_held)
    touch = asynchronous(settling.touch)
    charge = asynchronous(settling.charge)
    hand_back = asynchronous(settling.hand_back)
    delay = asynchronous(settling.delay)
    bury = asynchronous(settling.bury)
    ack_with_outputs = asynchronous(settling.ack_with_outputs)
    sweep = asynchronous(settling.sweep)
    take_due = asynchronous(settling.take_due)
    publish_later = asynchronous(settling.publish_later)
    publish_due = asynchronous(settling.publish_due)
    put_group_back = asynchronous(settling.put_group_back)

    retain = asynchronous(retention.retain)
    retention_losses = asynchronous(retention.retention_losses)
    stream_bytes = asynchronous(retention.stream_bytes)

    member_beat = asynchronous(leasing.member_beat)
    members = asynchronous(leasing.members)
    read_leases = asynchronous(leasing.read_leases)
    take_leases = asynchronous(leasing.take_leases)
    release_leases = asynchronous(leasing.release_leases)
    release_lease = asynchronous(leasing.release_lease)
    lock_keys = asynchronous(leasing.lock_keys)
    unlock_keys = asynchronous(leasing.unlock_keys)
    entries_at = asynchronous(leasing.entries_at)
    finish_announcement = asynchronous(leasing.finish_announcement)
    bury_announcement = asynchronous(leasing.bury_announcement)
    guarded_xadd = asynchronous(leasing.guarded_xadd)
    guarded_xack = asynchronous(leasing.guarded_xack)


class BlockingBroker:
    """Streams, wherever they live, for threads. Thread-safe, and usable after a fork."""

    def __init__(self, link: BlockingLink, context: Context, shown: str = "") -> None:
        self.link = link
        self.context = context
        self._shown = shown

    def __repr__(self) -> str:
        return f"<BlockingBroker {self._shown}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Calls that are under way, and all later ones, raise BrokerClosed."""
        self.link.close()

    def run(
        self, operation: Callable[Concatenate[Context, P], Conversation[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Runs an operation of your own, written as a conversation, as the ones below are."""
        return run_blocking(self.link, operation(self.context, *args, **kwargs))

    def once_writer(
        self,
        stream: Name,
        writer: Name,
        epoch: int,
        *,
        partition: Name = "0",
        forget_after_ms: int = WEEK_MS,
        trim: TrimPolicy | None = None,
        durability: Wanted = None,
    ) -> BlockingOnceWriter:
        """A writer of ``append_once`` that keeps its position and digest, from row 0 of version ``epoch`` on."""
        options: dict[str, Any] = {"forget_after_ms": forget_after_ms, "trim": trim, "durability": durability}
        return BlockingOnceWriter(
            self, once.Once(stream, writer, epoch, partition=partition, digest=Digest(), **options)
        )

    def behind(self, guard: Guard) -> Self:
        """As for Broker."""
        return type(self)(self.link, replace(self.context, guard=guard), self._shown)

    def listen(self, patterns: Name | Iterable[Name]) -> BlockingListener:
        """As ``Broker.listen``, with ``with`` and ``for``."""
        return self.link.listen(_patterns(patterns))

    xadd = blocking(writing.xadd)
    xadd_many = blocking(writing.xadd_many)
    append_once = blocking(once.append_once)
    append_unique = blocking(unique.append_unique)
    xdel = blocking(writing.xdel)
    xtrim = blocking(writing.xtrim)
    xsetid = blocking(writing.xsetid)
    trim_safely = blocking(trimming.trim_safely)

    xlen = blocking(reading.xlen)
    xrange = blocking(reading.xrange)
    xrevrange = blocking(reading.xrevrange)
    xread = blocking(reading.xread)

    create_group = blocking(groups.create_group)
    delete_group = blocking(groups.delete_group)
    set_group_position = blocking(groups.set_group_position)
    advance_group = blocking(progress.advance_group)
    create_consumer = blocking(groups.create_consumer)
    delete_consumer = blocking(groups.delete_consumer)
    xreadgroup = blocking(groups.xreadgroup)
    xreadgroup_many = blocking(groups.xreadgroup_many)
    read_history = blocking(groups.read_history)
    xack = blocking(groups.xack)

    xpending = blocking(pending.xpending)
    xpending_range = blocking(pending.xpending_range)
    xclaim = blocking(pending.xclaim)
    xclaim_ids = blocking(pending.xclaim_ids)
    xautoclaim = blocking(pending.xautoclaim)
    xautoclaim_ids = blocking(pending.xautoclaim_ids)

    stream_info = blocking(info.stream_info)
    group_info = blocking(info.group_info)
    consumer_info = blocking(info.consumer_info)
    list_streams = blocking(info.list_streams)
    ping = blocking(info.ping)
    server_time_ms = blocking(info.server_time_ms)
    server_info = blocking(info.server_info)
    server_version = blocking(info.server_version)
    server_setting = blocking(info.server_setting)

    get = blocking(keyed.get)
    set = blocking(keyed.set)
    delete = blocking(keyed.delete)
    exists = blocking(keyed.exists)
    expire_ms = blocking(keyed.expire_ms)
    ttl_ms = blocking(keyed.ttl_ms)
    hget = blocking(keyed.hget)
    hgetall = blocking(keyed.hgetall)
    hset = blocking(keyed.hset)
    hdel = blocking(keyed.hdel)
    publish = blocking(keyed.publish)
    delete_stream = blocking(keyed.delete_stream)
    survey = blocking(survey.survey)

    ack_held = blocking(settling.ack_held)
    touch = blocking(settling.touch)
    charge = blocking(settling.charge)
    hand_back = blocking(settling.hand_back)
    delay = blocking(settling.delay)
    bury = blocking(settling.bury)
    ack_with_outputs = blocking(settling.ack_with_outputs)
    sweep = blocking(settling.sweep)
    take_due = blocking(settling.take_due)
    publish_later = blocking(settling.publish_later)
    publish_due = blocking(settling.publish_due)
    put_group_back = blocking(settling.put_group_back)

    retain = blocking(retention.retain)
    retention_losses = blocking(retention.retention_losses)
    stream_bytes = blocking(retention.stream_bytes)

    member_beat = blocking(leasing.member_beat)
    members = blocking(leasing.members)
    read_leases = blocking(leasing.read_leases)
    take_leases = blocking(leasing.take_leases)
    release_leases = blocking(leasing.release_leases)
    release_lease = blocking(leasing.release_lease)
    lock_keys = blocking(leasing.lock_keys)
    unlock_keys = blocking(leasing.unlock_keys)
    entries_at = blocking(leasing.entries_at)
    finish_announcement = blocking(leasing.finish_announcement)
    bury_announcement = blocking(leasing.bury_announcement)
    guarded_xadd = blocking(leasing.guarded_xadd)
    guarded_xack = blocking(leasing.guarded_xack)


def _patterns(given: Name | Iterable[Name]) -> list[bytes]:
    many = [given] if isinstance(given, (str, bytes)) else sequence(given, "patterns", "patterns")
    return [name_word(one, "patterns") for one in many]
