"""The contract: every operation of a broker, for event loops and for threads. One line each, so they cannot drift."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from millstream.broker.context import Context
from millstream.broker.drivers import asynchronous, blocking, run_async, run_blocking, with_short_way
from millstream.broker.links.link import BlockingLink, BlockingListener, Link, Listener
from millstream.broker.operations import groups, info, pending, plain_keys, streams
from millstream.broker.operations.arguments import Name, name_word, sequence
from millstream.broker.operations.durability import Wanted
from millstream.broker.steps import delayed, leases, recovery, retention, settle, unique
from millstream.broker.steps import groups as moving
from millstream.broker.steps.leases import call as leases_call
from millstream.broker.steps.once import WEEK_MS, BlockingOnceWriter, Digest, OnceWriter
from millstream.broker.steps.once import call as once
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

    xadd = with_short_way(streams.xadd_at_once, streams.xadd)
    xadd_many = asynchronous(streams.xadd_many)
    append_once = asynchronous(once.append_once)
    append_unique = asynchronous(unique.append_unique)
    xdel = asynchronous(streams.xdel)
    xtrim = asynchronous(streams.xtrim)
    xsetid = asynchronous(streams.xsetid)
    trim_safely = asynchronous(retention.trim_safely)

    xlen = asynchronous(streams.xlen)
    xrange = asynchronous(streams.xrange)
    xrevrange = asynchronous(streams.xrevrange)
    xread = asynchronous(streams.xread)

    create_group = asynchronous(groups.create_group)
    delete_group = asynchronous(groups.delete_group)
    set_group_position = asynchronous(groups.set_group_position)
    advance_group = asynchronous(moving.advance_group)
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

    get = asynchronous(plain_keys.get)
    set = asynchronous(plain_keys.set)
    delete = asynchronous(plain_keys.delete)
    exists = asynchronous(plain_keys.exists)
    expire_ms = asynchronous(plain_keys.expire_ms)
    ttl_ms = asynchronous(plain_keys.ttl_ms)
    hget = asynchronous(plain_keys.hget)
    hgetall = asynchronous(plain_keys.hgetall)
    hset = asynchronous(plain_keys.hset)
    hdel = asynchronous(plain_keys.hdel)
    publish = asynchronous(plain_keys.publish)
    delete_stream = asynchronous(plain_keys.delete_stream)
    survey = asynchronous(info.survey)

    ack_held = asynchronous(settle.ack_held)
    touch = asynchronous(settle.heartbeat)
    charge = asynchronous(settle.count_delivery)
    hand_back = asynchronous(settle.hand_back)
    delay = asynchronous(settle.delay)
    bury = asynchronous(settle.bury)
    ack_with_outputs = asynchronous(settle.ack_with_outputs)
    sweep = asynchronous(recovery.sweep)
    take_due = asynchronous(recovery.take_due)
    publish_later = asynchronous(delayed.publish_later)
    publish_due = asynchronous(delayed.publish_due)
    put_group_back = asynchronous(moving.put_group_back)

    retain = asynchronous(retention.retain)
    retention_losses = asynchronous(retention.losses)
    stream_bytes = asynchronous(retention.stream_bytes)

    member_beat = asynchronous(leases.heartbeat)
    members = asynchronous(leases.members)
    read_leases = asynchronous(leases.read_leases)
    take_leases = asynchronous(leases.take_leases)
    release_leases = asynchronous(leases.release_leases)
    release_lease = asynchronous(leases.release_lease)
    lock_keys = asynchronous(leases.lock_keys)
    unlock_keys = asynchronous(leases.unlock_keys)
    entries_at = asynchronous(leases.entries_at)
    finish_announcement = asynchronous(leases.finish_announcement)
    bury_announcement = asynchronous(leases.bury_announcement)
    guarded_xadd = asynchronous(leases_call.guarded_xadd)
    guarded_xack = asynchronous(leases_call.guarded_xack)


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

    xadd = blocking(streams.xadd)
    xadd_many = blocking(streams.xadd_many)
    append_once = blocking(once.append_once)
    append_unique = blocking(unique.append_unique)
    xdel = blocking(streams.xdel)
    xtrim = blocking(streams.xtrim)
    xsetid = blocking(streams.xsetid)
    trim_safely = blocking(retention.trim_safely)

    xlen = blocking(streams.xlen)
    xrange = blocking(streams.xrange)
    xrevrange = blocking(streams.xrevrange)
    xread = blocking(streams.xread)

    create_group = blocking(groups.create_group)
    delete_group = blocking(groups.delete_group)
    set_group_position = blocking(groups.set_group_position)
    advance_group = blocking(moving.advance_group)
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

    get = blocking(plain_keys.get)
    set = blocking(plain_keys.set)
    delete = blocking(plain_keys.delete)
    exists = blocking(plain_keys.exists)
    expire_ms = blocking(plain_keys.expire_ms)
    ttl_ms = blocking(plain_keys.ttl_ms)
    hget = blocking(plain_keys.hget)
    hgetall = blocking(plain_keys.hgetall)
    hset = blocking(plain_keys.hset)
    hdel = blocking(plain_keys.hdel)
    publish = blocking(plain_keys.publish)
    delete_stream = blocking(plain_keys.delete_stream)
    survey = blocking(info.survey)

    ack_held = blocking(settle.ack_held)
    touch = blocking(settle.heartbeat)
    charge = blocking(settle.count_delivery)
    hand_back = blocking(settle.hand_back)
    delay = blocking(settle.delay)
    bury = blocking(settle.bury)
    ack_with_outputs = blocking(settle.ack_with_outputs)
    sweep = blocking(recovery.sweep)
    take_due = blocking(recovery.take_due)
    publish_later = blocking(delayed.publish_later)
    publish_due = blocking(delayed.publish_due)
    put_group_back = blocking(moving.put_group_back)

    retain = blocking(retention.retain)
    retention_losses = blocking(retention.losses)
    stream_bytes = blocking(retention.stream_bytes)

    member_beat = blocking(leases.heartbeat)
    members = blocking(leases.members)
    read_leases = blocking(leases.read_leases)
    take_leases = blocking(leases.take_leases)
    release_leases = blocking(leases.release_leases)
    release_lease = blocking(leases.release_lease)
    lock_keys = blocking(leases.lock_keys)
    unlock_keys = blocking(leases.unlock_keys)
    entries_at = blocking(leases.entries_at)
    finish_announcement = blocking(leases.finish_announcement)
    bury_announcement = blocking(leases.bury_announcement)
    guarded_xadd = blocking(leases_call.guarded_xadd)
    guarded_xack = blocking(leases_call.guarded_xack)


def _patterns(given: Name | Iterable[Name]) -> list[bytes]:
    many = [given] if isinstance(given, (str, bytes)) else sequence(given, "patterns", "patterns")
    return [name_word(one, "patterns") for one in many]
