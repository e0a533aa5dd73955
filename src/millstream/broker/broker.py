"""The broker contract: every operation, and what it promises.

Each method is bound to its operation in ``operations/`` or ``scripts/``, a generator that does no I/O; a transport runs
it. ``scripts/make_blocking.py`` generates ``blocking_broker.py`` from this file, so that both classes have the same
methods. Operations that only one package needs are not methods: they are called with ``broker.run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from millstream.broker.context import Context, OperationFunction
from millstream.broker.drivers import bound_async, run_async, unfenced
from millstream.broker.operations import groups, info, pending, plain_keys, streams
from millstream.broker.operations.conversion import Fields, Id, Name, Value, pattern_args
from millstream.broker.operations.durability import Wanted
from millstream.broker.scripts.append_once import WEEK_MS, Appended, Digest, Once, append_once
from millstream.broker.scripts.append_once.writer import OnceWriter
from millstream.broker.scripts.append_unique import DAY_MS, append_unique
from millstream.broker.scripts.groups import delete_consumer
from millstream.broker.scripts.retention import trim_safely
from millstream.broker.scripts.script import Fence, HasFence
from millstream.broker.transport.interface import Listener, Transport
from millstream.model import (
    Claimed,
    ConsumerInfo,
    Delivery,
    Entry,
    EntryId,
    GroupInfo,
    PendingEntry,
    PendingSummary,
    StreamInfo,
    TrimPolicy,
)

P = ParamSpec("P")
R = TypeVar("R")


class Broker:
    """Streams on any transport, for event loops. Thread-safe, usable from several event loops and after a fork.

    Every method states five promises:

    - **Atomic**: other clients see all of its effects or none, and none of their commands runs in between.
    - **Idempotent**: repeating the call changes nothing more. The transport repeats such a call by itself if the
      connection breaks; any other call raises.
    - **Blocks**: whether the call waits for more than the server's reply.
    - **Cancelled**: what may have been applied if the call is cancelled or interrupted: *nothing*, *all* of its
      effects, or a *part* of them. The connections stay usable.
    - **Raises**: errors besides those that any call may raise. These are InvalidArgument and PayloadTooLarge (before
      anything is sent), BrokerUnavailable, BrokerClosed, AuthenticationFailed, PermissionDenied, OutOfMemory,
      WrongKeyType, ServerError; and DurabilityUnavailable if ``durability`` asks for more than the server can give."""

    def __init__(self, transport: Transport, context: Context, name: str = "") -> None:
        self.transport = transport
        self.context = context
        self._name = name

    def __repr__(self) -> str:
        return f"<Broker {self._name}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections. Calls in progress and all later calls raise BrokerClosed.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: all. Raises: nothing."""
        await self.transport.close()

    async def run(self, operation: OperationFunction[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs an operation that has no method here: ``await broker.run(leases.members, "service")``.

        Atomic: as the operation. Idempotent: as the operation. Blocks: as the operation. Cancelled: as the operation.
        Raises: as the operation."""
        return await run_async(self.transport, operation(self.context, *args, **kwargs))

    def fenced(self, token: Fence | HasFence) -> Self:
        """A broker whose writes are fenced by ``token``, over the same transport.

        ``xadd``, ``xack``, ``settle`` and ``recovery`` compare the owner record in the same atomic step; if it is
        another, they write nothing and raise StaleOwner. Other writes to a stream are rejected with InvalidArgument.
        Close the original broker, not this one.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing."""
        fence = token if isinstance(token, Fence) else token.fence()
        return type(self)(self.transport, replace(self.context, fence=fence), self._name)

    def listen(self, patterns: Name | Iterable[Name]) -> Listener:
        """Messages of the channels that match the glob patterns, as (channel, payload) pairs.

            async with broker.listen("news.*") as messages:
                async for channel, payload in messages: ...

        ``async with`` waits until the subscription is confirmed. Messages that are published while a connection is
        broken are missed.

        Atomic: no. Idempotent: yes. Blocks: until a message arrives. Cancelled: nothing. Raises: nothing else."""
        return self.transport.listen(pattern_args(patterns))

    @unfenced
    def once_writer(
        self,
        stream: Name,
        writer: Name,
        version: int,
        *,
        partition: Name = "0",
        forget_after_ms: int = WEEK_MS,
        trim: TrimPolicy | None = None,
        durability: Wanted = None,
    ) -> OnceWriter:
        """A writer for ``append_once`` that keeps its position and digest, starting at row 0 of ``version``.

        Atomic: as ``append_once``. Idempotent: as ``append_once``. Blocks: as ``append_once``. Cancelled: as
        ``append_once``. Raises: as ``append_once``."""
        once = Once(
            stream,
            writer,
            version,
            partition=partition,
            digest=Digest(),
            forget_after_ms=forget_after_ms,
            trim=trim,
            durability=durability,
        )
        return OnceWriter(self, once)

    # --- entries -----------------------------------------------------------------------------------------------------

    async def xadd(
        self,
        stream: Name,
        fields: Fields,
        *,
        id: Id = "*",
        trim: TrimPolicy | None = None,
        create: bool = True,
        durability: Wanted = None,
    ) -> EntryId:
        """Adds one entry and returns its id.

        ``id`` is "*", "ms-*", or an id greater than the last one. With ``create=False`` a missing stream is not
        created, and the result is None.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: IdTooSmall."""
        # An embedded transport replies synchronously. There a plain call skips the generator, which costs more than
        # XADD itself.
        if id == "*" and trim is None and create and durability is None and (now := self.transport.now) is not None:
            stored_id = streams.xadd_immediately(self.context, now, stream, fields)
            if stored_id is not None:
                return stored_id
        operation = streams.xadd(self.context, stream, fields, id=id, trim=trim, create=create, durability=durability)
        return await run_async(self.transport, operation)

    @unfenced
    @bound_async(streams.xadd_many)
    async def xadd_many(
        self,
        stream: Name,
        entries: Sequence[Fields],
        *,
        atomic: bool = False,
        trim: TrimPolicy | None = None,
        durability: Wanted = None,
    ) -> list[EntryId]:
        """Adds entries in order, pipelined, and returns their ids.

        Every entry is checked before the first is sent. If some entries fail, the error's ``ids`` holds the ids of
        those that were confirmed, and None for the others.

        Atomic: with ``atomic``, else each entry. Idempotent: no. Blocks: no. Cancelled: perhaps all, or without
        ``atomic`` a part. Raises: nothing else."""

    @unfenced
    @bound_async(append_once)
    async def append_once(
        self,
        stream: Name,
        writer: Name,
        version: int,
        position: int,
        entries: Sequence[Fields],
        *,
        partition: Name = "0",
        digest: Digest | None = None,
        forget_after_ms: int = WEEK_MS,
        trim: TrimPolicy | None = None,
        durability: Wanted = None,
    ) -> Appended:
        """Appends rows of ``version`` of a writer, the first being row ``position``; rows that are stored already are
        skipped.

        ``digest`` is the writer's rolling digest up to ``position``; the call adds these rows to it. Without a digest,
        and if ``position`` is not 0, stored rows are counted but not compared. A writer that has appended nothing for
        ``forget_after_ms`` is forgotten.

        Atomic: each chunk of rows (``limits.script_entries``), in order. Idempotent: yes. Blocks: no. Cancelled:
        perhaps all or a part: repeat it. Raises: StaleWriter (a newer version has written), NonDeterministicReplay (the
        stored rows are different), RowsMissing (earlier rows are not stored)."""

    @unfenced
    @bound_async(append_unique)
    async def append_unique(
        self,
        stream: Name,
        entries: Sequence[tuple[str | bytes, Fields]],
        *,
        window_ms: int = DAY_MS,
        trim: TrimPolicy | None = None,
        durability: Wanted = None,
    ) -> Appended:
        """Appends each (event id, fields) pair, unless its event id was already appended in the last ``window_ms``.

        The result's ``ids`` has None for each pair that was not appended. An event id is stored for at least one window
        and at most two. If callers pass different windows, the longest is used.

        Atomic: each chunk of entries (``limits.script_entries``), in order. Idempotent: yes, within the window. Blocks:
        no. Cancelled: perhaps all or a part: repeat it. Raises: nothing else."""

    @unfenced
    @bound_async(streams.xdel)
    async def xdel(self, stream: Name, ids: Sequence[Id] | Id) -> int:
        """Deletes entries and returns how many existed. Their ids stay in the pending lists.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @unfenced
    @bound_async(streams.xtrim)
    async def xtrim(self, stream: Name, policy: TrimPolicy) -> int:
        """Trims the stream by ``policy``, even entries that a group still needs. Returns the number of deleted entries.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @unfenced
    @bound_async(trim_safely)
    async def trim_safely(self, stream: Name, *, max_len: int | None = None, min_id: Id | None = None) -> int:
        """Trims entries beyond ``max_len`` or older than ``min_id``, except those that a group still needs.

        A group needs its oldest pending entry and all entries after it, and all entries that it has not read. Without a
        group only the bounds count. Nothing is deleted for an hour after consumers had to recreate a group, and while a
        group is missing that a live worker with a retention policy declares. Returns the number of deleted entries.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @unfenced
    @bound_async(streams.xsetid)
    async def xsetid(
        self, stream: Name, last_id: Id, *, entries_added: int | None = None, max_deleted: Id | None = None
    ) -> None:
        """Sets the stream's last id and its counters, for copies and repairs.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: perhaps all. Raises: NoSuchStream, IdTooSmall."""

    @bound_async(streams.xlen)
    async def xlen(self, stream: Name) -> int:
        """The number of entries in the stream; 0 if it does not exist.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(streams.xrange)
    async def xrange(self, stream: Name, start: Id = "-", end: Id = "+", *, count: int | None = None) -> list[Entry]:
        """Entries from ``start`` to ``end``, both inclusive unless prefixed with "(".

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(streams.xrevrange)
    async def xrevrange(self, stream: Name, end: Id = "+", start: Id = "-", *, count: int | None = None) -> list[Entry]:
        """As ``xrange``, newest first.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(streams.xread)
    async def xread(
        self, streams: Mapping[str, Id], *, count: int | None = None, block_ms: int | None = None
    ) -> dict[str, list[Entry]]:
        """Entries after the given ids; "$" means entries that are added from now on.

        Streams without new entries are left out. On a cluster all streams must share a hash tag.

        Atomic: yes. Idempotent: yes. Blocks: up to ``block_ms`` (None: not at all, 0: without a time limit). Cancelled:
        nothing. Raises: nothing else."""

    @unfenced
    @bound_async(plain_keys.delete_stream)
    async def delete_stream(self, stream: Name, *, companions: bool = False) -> bool:
        """Deletes the stream and its groups; with ``companions`` also its companion keys, which are deleted first.

        Returns False if the stream did not exist.

        Atomic: each key. Idempotent: no. Blocks: no. Cancelled: perhaps all or a part: call again. Raises: nothing
        else."""

    # --- groups and their consumers ----------------------------------------------------------------------------------

    @bound_async(groups.create_group)
    async def create_group(
        self, stream: Name, group: Name, *, start: Id, exist_ok: bool = True, entries_read: int | None = None
    ) -> bool:
        """Creates the group, and the stream if it does not exist. Returns False if the group existed.

        ``start`` is "0" for all entries, "$" for entries from now on, or an id. An existing group is left unchanged,
        including its position.

        Atomic: yes. Idempotent: with ``exist_ok``. Blocks: no. Cancelled: perhaps all. Raises: GroupExists (without
        ``exist_ok``)."""

    @bound_async(groups.delete_group)
    async def delete_group(self, stream: Name, group: Name) -> bool:
        """Deletes the group, its pending list and its due times. Returns False if it did not exist.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchStream."""

    @bound_async(groups.set_group_position)
    async def set_group_position(
        self, stream: Name, group: Name, position: Id, *, entries_read: int | None = None
    ) -> None:
        """Moves the group: its next read starts after ``position`` ("$": the end). Pending entries stay pending.

        Without ``entries_read`` the server cannot report the lag until the group has caught up.

        Atomic: yes. Idempotent: yes, except with "$". Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup,
        NoSuchStream."""

    @bound_async(groups.create_consumer)
    async def create_consumer(self, stream: Name, group: Name, consumer: Name) -> bool:
        """Adds the consumer to the group before its first read. Returns False if it existed.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup, NoSuchStream."""

    @bound_async(delete_consumer)
    async def delete_consumer(
        self, stream: Name, group: Name, consumer: Name, *, to: Name | None = None, discard: bool = False
    ) -> int:
        """Deletes a consumer; returns the number of entries that were pending for it.

        With ``to`` its pending entries are first moved to that consumer, with their idle times and delivery counts.
        With ``discard`` they are removed from the pending list. The result is 0 if the consumer does not exist.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: ConsumerHasPending (with neither),
        NoSuchGroup."""

    @bound_async(groups.xreadgroup)
    async def xreadgroup(
        self,
        stream: Name,
        group: Name,
        consumer: Name,
        *,
        count: int = 1,
        block_ms: int | None = None,
        noack: bool = False,
    ) -> list[Delivery]:
        """Delivers entries that no consumer of the group has received yet. They are pending until acknowledged.

        Atomic: yes. Idempotent: no. Blocks: up to ``block_ms`` (None: not at all, 0: without a time limit). Cancelled:
        perhaps all: entries may be pending that the caller did not receive, ``read_history`` and ``xautoclaim`` return
        them; with ``noack`` they are lost. Raises: NoSuchGroup."""

    @bound_async(groups.xreadgroup_many)
    async def xreadgroup_many(
        self,
        streams: Iterable[Name],
        group: Name,
        consumer: Name,
        *,
        count: int = 1,
        block_ms: int | None = None,
        noack: bool = False,
    ) -> dict[str, list[Delivery]]:
        """As ``xreadgroup`` for several streams, up to ``count`` entries of each. On a cluster they must share a hash
        tag.

        Atomic: yes. Idempotent: no. Blocks: as ``xreadgroup``. Cancelled: as ``xreadgroup``. Raises: NoSuchGroup."""

    @bound_async(groups.read_history)
    async def read_history(
        self, stream: Name, group: Name, consumer: Name, *, after: Id = "0", count: int = 100
    ) -> list[Delivery]:
        """This consumer's own pending entries after ``after``. Counts as a delivery of each.

        A deleted entry has no fields.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(groups.xack)
    async def xack(
        self, stream: Name, group: Name, ids: Sequence[Id] | Id, *, fenced: bool = False, consumer: Name | None = None
    ) -> int:
        """Removes entries from the pending list, whichever consumer owns them; returns how many were pending.

        The result is 0 if the group does not exist. With ``fenced`` only entries that ``consumer`` owns are
        acknowledged, checked in the same atomic step, so that a late acknowledgement of a previous owner has no effect.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup (with ``fenced``)."""

    # --- pending entries ---------------------------------------------------------------------------------------------

    @bound_async(pending.xpending)
    async def xpending(self, stream: Name, group: Name) -> PendingSummary:
        """The number of pending entries, the smallest and greatest id, and the count of each consumer that has any.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchGroup."""

    @bound_async(pending.xpending_range)
    async def xpending_range(
        self,
        stream: Name,
        group: Name,
        *,
        start: Id = "-",
        end: Id = "+",
        count: int = 100,
        consumer: Name | None = None,
        min_idle_ms: int | None = None,
        with_entries: bool = False,
    ) -> list[PendingEntry]:
        """Pending entries between two ids, of one consumer or of all, that were idle for at least ``min_idle_ms``.

        ``with_entries`` also reads their fields, in a second step; the fields of deleted entries are None.

        Atomic: yes, except ``with_entries``. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchGroup."""

    @bound_async(pending.xclaim)
    async def xclaim(
        self,
        stream: Name,
        group: Name,
        consumer: Name,
        ids: Sequence[Id] | Id,
        *,
        min_idle_ms: int,
        idle_ms: int | None = None,
        time_ms: int | None = None,
        retry_count: int | None = None,
        force: bool = False,
        last_id: Id | None = None,
    ) -> list[Delivery]:
        """Makes ``consumer`` the owner of pending entries that were idle long enough; increments their delivery counts.

        Entries that were deleted are removed from the pending list and are not returned.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(pending.xclaim_ids)
    async def xclaim_ids(
        self,
        stream: Name,
        group: Name,
        consumer: Name,
        ids: Sequence[Id] | Id,
        *,
        min_idle_ms: int,
        idle_ms: int | None = None,
        time_ms: int | None = None,
        retry_count: int | None = None,
        force: bool = False,
        last_id: Id | None = None,
    ) -> list[EntryId]:
        """As ``xclaim`` with JUSTID: returns only ids and does not change delivery counts.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(pending.xautoclaim)
    async def xautoclaim(
        self, stream: Name, group: Name, consumer: Name, *, min_idle_ms: int, start: Id = "0-0", count: int = 100
    ) -> Claimed:
        """Claims up to ``count`` entries from ``start`` on that were idle long enough; increments their delivery
        counts.

        Pass the cursor to the next call: one call examines at most ten times ``count`` entries.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(pending.xautoclaim_ids)
    async def xautoclaim_ids(
        self, stream: Name, group: Name, consumer: Name, *, min_idle_ms: int, start: Id = "0-0", count: int = 100
    ) -> tuple[EntryId, list[EntryId], list[EntryId]]:
        """As ``xautoclaim`` with JUSTID: (cursor, claimed ids, deleted ids). Does not change delivery counts.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    # --- information -------------------------------------------------------------------------------------------------

    @bound_async(info.stream_info)
    async def stream_info(self, stream: Name) -> StreamInfo:
        """The counters, ids, and first and last entry of the stream (XINFO STREAM).

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchStream."""

    @bound_async(info.group_info)
    async def group_info(self, stream: Name) -> list[GroupInfo]:
        """The stream's groups, each with its consumers. A group that is deleted during the call is left out.

        Atomic: no, counts may be read at slightly different times. Idempotent: yes. Blocks: no. Cancelled: nothing.
        Raises: NoSuchStream."""

    @bound_async(info.consumer_info)
    async def consumer_info(self, stream: Name, group: Name) -> list[ConsumerInfo]:
        """The consumers of one group.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchGroup, NoSuchStream."""

    @bound_async(info.list_streams)
    async def list_streams(self, pattern: str = "*") -> list[str]:
        """The sorted names of all streams that match the glob; on a cluster those of all nodes.

        Atomic: no, a stream that is created or deleted during the call may be included or not. Idempotent: yes. Blocks:
        no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(info.ping)
    async def ping(self) -> None:
        """Returns when the server has answered.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(info.server_time_ms)
    async def server_time_ms(self) -> int:
        """The server's wall clock.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(info.server_info)
    async def server_info(self, section: str = "default") -> dict[str, str]:
        """The lines of INFO as names and values.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    # --- plain keys, such as companion keys of streams ---------------------------------------------------------------

    @bound_async(plain_keys.get)
    async def get(self, key: Name) -> bytes | None:
        """The string at ``key``.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.set)
    async def set(self, key: Name, value: Value, *, px: int | None = None, nx: bool = False, xx: bool = False) -> bool:
        """Sets a string that expires after ``px`` ms. Returns False if ``nx`` or ``xx`` prevented it.

        ``nx`` sets only a key that does not exist, ``xx`` only one that exists.

        Atomic: yes. Idempotent: yes, except with ``nx``. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.delete)
    async def delete(self, *keys: Name) -> int:
        """Deletes keys of any type; returns how many existed.

        Atomic: each key. Idempotent: no. Blocks: no. Cancelled: perhaps all, on a cluster a part. Raises: nothing else.
        """

    @bound_async(plain_keys.exists)
    async def exists(self, key: Name) -> bool:
        """Whether a key of this name exists, of any type.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.expire_ms)
    async def expire_ms(self, key: Name, ms: int) -> bool:
        """Makes a key expire after ``ms`` milliseconds. Returns False if it does not exist.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.ttl_ms)
    async def ttl_ms(self, key: Name) -> int | None:
        """The time to live of the key; None if it does not expire or does not exist.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.hget)
    async def hget(self, key: Name, field: Name) -> bytes | None:
        """One field of the hash at ``key``.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.hgetall)
    async def hgetall(self, key: Name) -> dict[bytes, bytes]:
        """The hash at ``key``; empty if it does not exist.

        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.hset)
    async def hset(self, key: Name, fields: Mapping[str, Value]) -> int:
        """Sets fields of the hash at ``key``; returns how many are new.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.hdel)
    async def hdel(self, key: Name, *fields: Name) -> int:
        """Deletes fields; returns how many existed.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.publish)
    async def publish(self, channel: Name, payload: Value) -> int:
        """Publishes a message to a channel; returns the number of current subscribers on this node.

        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""
