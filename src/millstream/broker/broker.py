"""The contract on one page: what a broker does, and what each of its methods promises.

In: plain Python values. Out: the values of ``model/``, or typed errors. Each method is bound to its operation, which is
written once, as a conversation, and run by either driver. ``blocking_broker.py`` is made from this page (``scripts/
make_blocking.py``), so that the two cannot drift apart. What only one room needs is a step (``steps/``), not a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from millstream.broker.context import Context, Step
from millstream.broker.drivers import bound_async, renamed, run_async, unfenced
from millstream.broker.links.link import Link, Listener
from millstream.broker.operations import groups, info, pending, plain_keys, streams
from millstream.broker.operations.conversion import Fields, Id, Name, Value, pattern_words
from millstream.broker.operations.durability import Wanted
from millstream.broker.steps.groups import delete_consumer
from millstream.broker.steps.once import WEEK_MS, Appended, Digest, Once, append_once
from millstream.broker.steps.once.writer import OnceWriter
from millstream.broker.steps.retention import trim_safely
from millstream.broker.steps.script import Guard
from millstream.broker.steps.unique import DAY_MS, append_unique
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


# Signatures stay as wide as the page: one parameter a line would make two pages of it.
# fmt: off


class Broker:
    """Streams, wherever they live, for event loops. Thread-safe, usable from several event loops and after a fork.

    Every method says the same five things. **Atomic**: others see all of it or nothing, and nothing of theirs comes in
    between. **Idempotent**: repeating it changes nothing more; such a call the link repeats by itself when a connection
    breaks, any other one raises then. **Blocks**: it waits for more than the server's answer. **Cancelled**: what a
    call that is cancelled or broken off may leave behind: nothing, *all* that it would have done, or a *part*; never a
    connection in disorder. **Raises**: beside what any call may raise: InvalidArgument and PayloadTooLarge (before
    anything was sent), BrokerUnavailable, BrokerClosed, AuthenticationFailed, PermissionDenied, OutOfMemory,
    WrongKeyType, ServerError; DurabilityUnavailable where ``durability`` asks for more than the server gave.
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
        """Lets go of every connection. Calls that are under way, and all later ones, raise BrokerClosed.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: all. Raises: nothing."""
        await self.link.close()

    async def run(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a step that is not on this page: ``await broker.run(leases.members, "service")``.
        Atomic: as the step says. Idempotent: so. Blocks: so. Cancelled: so. Raises: so."""
        return await run_async(self.link, step(self.context, *args, **kwargs))

    def behind(self, guard: Guard) -> Self:
        """The same broker, fenced: ``xadd``, ``xack``, ``settle`` and ``recovery`` do nothing, and raise StaleOwner,
        unless the owner record is the guard's, compared in the same atomic step. Other writes to a stream are refused.
        Close the original, not this.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing."""
        return type(self)(self.link, replace(self.context, guard=guard), self._shown)

    def listen(self, patterns: Name | Iterable[Name]) -> Listener:
        """Messages of the channels that match the globs: ``async for channel, payload in broker.listen("news.*")``.
        ``async with`` waits until the subscription stands. Messages sent while a connection is broken are missed.
        Atomic: no. Idempotent: yes. Blocks: until a message comes. Cancelled: nothing. Raises: nothing else."""
        return self.link.listen(pattern_words(patterns))

    @unfenced
    @renamed(epoch="version")
    def once_writer(
        self, stream: Name, writer: Name, version: int, *, partition: Name = "0", forget_after_ms: int = WEEK_MS,
        trim: TrimPolicy | None = None, durability: Wanted = None
    ) -> OnceWriter:
        """A writer of ``append_once`` that keeps its position and digest, from row 0 of ``version`` on.
        Atomic: as ``append_once``. Idempotent: so. Blocks: so. Cancelled: so. Raises: so."""
        once = Once(
            stream, writer, version, partition=partition, digest=Digest(), forget_after_ms=forget_after_ms, trim=trim,
            durability=durability
        )
        return OnceWriter(self, once)

    # --- entries -----------------------------------------------------------------------------------------------------

    async def xadd(
        self, stream: Name, fields: Fields, *, id: Id = "*", trim: TrimPolicy | None = None, create: bool = True,
        durability: Wanted = None
    ) -> EntryId:
        """Adds one entry; its id. ``id``: "*", "ms-*", or one that is greater than the last. With ``create=False`` a
        stream that does not exist is not made, and the answer is None.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: IdTooSmall."""
        # Where the answer comes at once, an option-less call needs no conversation: a generator costs more than XADD.
        if id == "*" and trim is None and create and durability is None and (now := self.link.now) is not None:
            stored = streams.xadd_at_once(self.context, now, stream, fields)
            if stored is not None:
                return stored
        adding = streams.xadd(self.context, stream, fields, id=id, trim=trim, create=create, durability=durability)
        return await run_async(self.link, adding)

    @unfenced
    @bound_async(streams.xadd_many)
    async def xadd_many(
        self, stream: Name, entries: Sequence[Fields], *, atomic: bool = False, trim: TrimPolicy | None = None,
        durability: Wanted = None
    ) -> list[EntryId]:
        """Adds entries in their order, pipelined; their ids. Every entry is checked before the first is sent. Where it
        fails in the middle, the error's ``ids`` holds those that were confirmed, None for the others.
        Atomic: with ``atomic``, else each entry. Idempotent: no. Blocks: no. Cancelled: perhaps all, or without
        ``atomic`` a part. Raises: nothing else."""

    @unfenced
    @renamed(epoch="version")
    @bound_async(append_once)
    async def append_once(
        self, stream: Name, writer: Name, version: int, position: int, entries: Sequence[Fields], *,
        partition: Name = "0", digest: Digest | None = None, forget_after_ms: int = WEEK_MS,
        trim: TrimPolicy | None = None, durability: Wanted = None
    ) -> Appended:
        """Appends rows ``position``... of ``version`` of a writer; those that are there already are skipped.
        ``digest`` is the writer's rolling digest before these rows, and is moved on. Without it, and not from row 0 on,
        rows are counted but not compared. A writer that was silent for ``forget_after_ms`` is forgotten.
        Atomic: each chunk of rows (``limits.script_entries``), in order. Idempotent: yes. Blocks: no. Cancelled:
        perhaps all or a part: repeat it. Raises: StaleWriter (a later version was here), NonDeterministicReplay (other
        rows than the stored ones), RowsMissing (rows before these are not stored)."""

    @unfenced
    @bound_async(append_unique)
    async def append_unique(
        self, stream: Name, entries: Sequence[tuple[str | bytes, Fields]], *, window_ms: int = DAY_MS,
        trim: TrimPolicy | None = None, durability: Wanted = None
    ) -> Appended:
        """Appends (event id, fields) pairs whose event id was not seen for ``window_ms``; None in ``ids`` for the
        others. An id is remembered for one window at least and for two at most; where callers ask for several, the
        longest one holds.
        Atomic: each chunk of entries (``limits.script_entries``), in order. Idempotent: yes, within the window. Blocks:
        no. Cancelled: perhaps all or a part: repeat it. Raises: nothing else."""

    @unfenced
    @bound_async(streams.xdel)
    async def xdel(self, stream: Name, ids: Sequence[Id] | Id) -> int:
        """Deletes entries; how many were there. Pending lists keep their ids.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @unfenced
    @bound_async(streams.xtrim)
    async def xtrim(self, stream: Name, policy: TrimPolicy) -> int:
        """Cuts the stream as told, whether or not a group still needs the entries; how many went.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @unfenced
    @bound_async(trim_safely)
    async def trim_safely(self, stream: Name, *, max_len: int | None = None, min_id: Id | None = None) -> int:
        """Drops what is beyond ``max_len`` entries or older than ``min_id``, but nothing that a group still needs:
        pending entries, what follows them, and what it has not read. With no group only the bounds count. How many
        went.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @unfenced
    @bound_async(streams.xsetid)
    async def xsetid(
        self, stream: Name, last_id: Id, *, entries_added: int | None = None, max_deleted: Id | None = None
    ) -> None:
        """Sets the stream's last id and its counters: for copies and repairs.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: perhaps all. Raises: NoSuchStream, IdTooSmall."""

    @bound_async(streams.xlen)
    async def xlen(self, stream: Name) -> int:
        """How many entries the stream holds; 0 where there is no stream.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(streams.xrange)
    async def xrange(self, stream: Name, start: Id = "-", end: Id = "+", *, count: int | None = None) -> list[Entry]:
        """Entries from ``start`` to ``end``, both included unless "(" stands before them.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(streams.xrevrange)
    async def xrevrange(self, stream: Name, end: Id = "+", start: Id = "-", *, count: int | None = None) -> list[Entry]:
        """As ``xrange``, the newest first.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(streams.xread)
    async def xread(
        self, streams: Mapping[str, Id], *, count: int | None = None, block_ms: int | None = None
    ) -> dict[str, list[Entry]]:
        """Entries after the given ids; "$" means those that arrive from now on. Streams without news are left out. On a
        cluster the streams share a hash tag.
        Atomic: yes. Idempotent: yes. Blocks: up to ``block_ms`` (None: not at all, 0: for ever). Cancelled: nothing.
        Raises: nothing else."""

    @unfenced
    @bound_async(plain_keys.delete_stream)
    async def delete_stream(self, stream: Name, *, companions: bool = False) -> bool:
        """Removes the stream with its groups; with ``companions`` every key that lies beside it too, those first.
        False: none was there.
        Atomic: each key. Idempotent: no. Blocks: no. Cancelled: perhaps all or a part: call again. Raises: nothing
        else."""

    # --- groups and their consumers ----------------------------------------------------------------------------------

    @bound_async(groups.create_group)
    async def create_group(
        self, stream: Name, group: Name, *, start: Id, exist_ok: bool = True, entries_read: int | None = None
    ) -> bool:
        """Makes the group, and the stream where there is none. ``start``: "0" everything, "$" from now on, or an id.
        False: it was there, and is left as it is, its position too.
        Atomic: yes. Idempotent: with ``exist_ok``. Blocks: no. Cancelled: perhaps all. Raises: GroupExists (without
        ``exist_ok``)."""

    @bound_async(groups.delete_group)
    async def delete_group(self, stream: Name, group: Name) -> bool:
        """Destroys the group and its pending list. False where there was none.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchStream."""

    @bound_async(groups.set_group_position)
    async def set_group_position(
        self, stream: Name, group: Name, position: Id, *, entries_read: int | None = None
    ) -> None:
        """Moves the group: the next read starts after ``position`` ("$": the end). Pending entries stay pending.
        Without ``entries_read`` the server cannot tell the lag any more until the group has caught up.
        Atomic: yes. Idempotent: yes, but for "$". Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup,
        NoSuchStream."""

    @bound_async(groups.create_consumer)
    async def create_consumer(self, stream: Name, group: Name, consumer: Name) -> bool:
        """Makes the consumer known before it reads. False if it was known.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup, NoSuchStream."""

    @bound_async(delete_consumer)
    async def delete_consumer(
        self, stream: Name, group: Name, consumer: Name, *, to: Name | None = None, discard: bool = False
    ) -> int:
        """Removes a consumer; 0 where there is none. With ``to`` its pending entries move there first, with their idle
        times and delivery counts: how many. With ``discard`` they leave the pending list for good: how many.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: ConsumerHasPending (with neither),
        NoSuchGroup."""

    @bound_async(groups.xreadgroup)
    async def xreadgroup(
        self, stream: Name, group: Name, consumer: Name, *, count: int = 1, block_ms: int | None = None,
        noack: bool = False
    ) -> list[Delivery]:
        """Entries that no consumer of the group was given before; they are pending until acknowledged.
        Atomic: yes. Idempotent: no. Blocks: up to ``block_ms`` (None: not at all, 0: for ever). Cancelled: perhaps
        entries that nobody saw: pending, so that ``read_history`` and ``xautoclaim`` find them; with ``noack`` lost.
        Raises: NoSuchGroup."""

    @bound_async(groups.xreadgroup_many)
    async def xreadgroup_many(
        self, streams: Iterable[Name], group: Name, consumer: Name, *, count: int = 1, block_ms: int | None = None,
        noack: bool = False
    ) -> dict[str, list[Delivery]]:
        """As ``xreadgroup`` from several streams, up to ``count`` of each. On a cluster they share a hash tag.
        Atomic: yes. Idempotent: no. Blocks: as ``xreadgroup``. Cancelled: as ``xreadgroup``. Raises: NoSuchGroup."""

    @bound_async(groups.read_history)
    async def read_history(
        self, stream: Name, group: Name, consumer: Name, *, after: Id = "0", count: int = 100
    ) -> list[Delivery]:
        """This consumer's own pending entries after ``after``. It counts as a delivery of each; a deleted entry has no
        fields.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(groups.xack)
    async def xack(
        self, stream: Name, group: Name, ids: Sequence[Id] | Id, *, fenced: bool = False, consumer: Name | None = None
    ) -> int:
        """Takes entries off the pending list, whoever owns them; how many were on it, 0 on a missing group. With
        ``fenced`` only those that ``consumer`` owns, checked in the same step: a stale owner's late acknowledgement
        does nothing.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup (with ``fenced``)."""

    # --- pending entries ---------------------------------------------------------------------------------------------

    @bound_async(pending.xpending)
    async def xpending(self, stream: Name, group: Name) -> PendingSummary:
        """How many entries are pending, the smallest and the greatest id, and the count of each consumer that has any.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchGroup."""

    @bound_async(pending.xpending_range)
    async def xpending_range(
        self, stream: Name, group: Name, *, start: Id = "-", end: Id = "+", count: int = 100,
        consumer: Name | None = None, min_idle_ms: int | None = None, with_entries: bool = False
    ) -> list[PendingEntry]:
        """Pending entries between two ids, of one consumer or of all, those that were idle long enough.
        ``with_entries`` reads their fields too, a moment later; None for those that were deleted.
        Atomic: yes, but for ``with_entries``. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchGroup."""

    @bound_async(pending.xclaim)
    async def xclaim(
        self, stream: Name, group: Name, consumer: Name, ids: Sequence[Id] | Id, *, min_idle_ms: int,
        idle_ms: int | None = None, time_ms: int | None = None, retry_count: int | None = None, force: bool = False,
        last_id: Id | None = None
    ) -> list[Delivery]:
        """Makes ``consumer`` the owner of pending entries that were idle long enough; their delivery counts go up.
        Entries that were deleted meanwhile leave the pending list, and the answer.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(pending.xclaim_ids)
    async def xclaim_ids(
        self, stream: Name, group: Name, consumer: Name, ids: Sequence[Id] | Id, *, min_idle_ms: int,
        idle_ms: int | None = None, time_ms: int | None = None, retry_count: int | None = None, force: bool = False,
        last_id: Id | None = None
    ) -> list[EntryId]:
        """As ``xclaim`` with JUSTID: ids alone, and delivery counts stay.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(pending.xautoclaim)
    async def xautoclaim(
        self, stream: Name, group: Name, consumer: Name, *, min_idle_ms: int, start: Id = "0-0", count: int = 100
    ) -> Claimed:
        """Claims up to ``count`` entries that were idle long enough, from ``start`` on; delivery counts go up. Keep the
        cursor for the next call: one call looks at no more than ten times ``count`` entries.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    @bound_async(pending.xautoclaim_ids)
    async def xautoclaim_ids(
        self, stream: Name, group: Name, consumer: Name, *, min_idle_ms: int, start: Id = "0-0", count: int = 100
    ) -> tuple[EntryId, list[EntryId], list[EntryId]]:
        """As ``xautoclaim`` with JUSTID: (cursor, claimed ids, deleted ids), and delivery counts stay.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: NoSuchGroup."""

    # --- information -------------------------------------------------------------------------------------------------

    @bound_async(info.stream_info)
    async def stream_info(self, stream: Name) -> StreamInfo:
        """XINFO STREAM.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchStream."""

    @bound_async(info.group_info)
    async def group_info(self, stream: Name) -> list[GroupInfo]:
        """The stream's groups, each with its consumers. A group that is deleted meanwhile is left out.
        Atomic: no, counts may be a moment apart. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises:
        NoSuchStream."""

    @bound_async(info.consumer_info)
    async def consumer_info(self, stream: Name, group: Name) -> list[ConsumerInfo]:
        """The consumers of one group.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: NoSuchGroup, NoSuchStream."""

    @bound_async(info.list_streams)
    async def list_streams(self, pattern: str = "*") -> list[str]:
        """Names of all streams that match the glob, sorted; on a cluster those of all nodes.
        Atomic: no, a stream that is made or deleted meanwhile may or may not be there. Idempotent: yes. Blocks: no.
        Cancelled: nothing. Raises: nothing else."""

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
        """INFO's lines as names and values.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    # --- the few plain keys that lie beside streams ------------------------------------------------------------------

    @bound_async(plain_keys.get)
    async def get(self, key: Name) -> bytes | None:
        """The string at ``key``.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.set)
    async def set(self, key: Name, value: Value, *, px: int | None = None, nx: bool = False, xx: bool = False) -> bool:
        """Sets a string that lives ``px`` ms. False where ``nx`` (only if absent) or ``xx`` (only if there) refused.
        Atomic: yes. Idempotent: without ``nx``. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.delete)
    async def delete(self, *keys: Name) -> int:
        """Removes keys of any type; how many were there.
        Atomic: each key. Idempotent: no. Blocks: no. Cancelled: perhaps all, on a cluster a part. Raises: nothing
        else."""

    @bound_async(plain_keys.exists)
    async def exists(self, key: Name) -> bool:
        """Whether there is a key of this name, of any type.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.expire_ms)
    async def expire_ms(self, key: Name, ms: int) -> bool:
        """Gives a key ``ms`` milliseconds to live. False where there is no such key.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.ttl_ms)
    async def ttl_ms(self, key: Name) -> int | None:
        """How long the key still lives; None: for ever, or it is not there.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.hget)
    async def hget(self, key: Name, field: Name) -> bytes | None:
        """One field of the hash at ``key``.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.hgetall)
    async def hgetall(self, key: Name) -> dict[bytes, bytes]:
        """The hash at ``key``; empty where there is none.
        Atomic: yes. Idempotent: yes. Blocks: no. Cancelled: nothing. Raises: nothing else."""

    @bound_async(plain_keys.hset)
    async def hset(self, key: Name, fields: Mapping[str, Value]) -> int:
        """Sets fields of the hash at ``key``; how many are new.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.hdel)
    async def hdel(self, key: Name, *fields: Name) -> int:
        """Removes fields; how many were there.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""

    @bound_async(plain_keys.publish)
    async def publish(self, channel: Name, payload: Value) -> int:
        """Sends a message to whoever listens now; how many that were, on this node.
        Atomic: yes. Idempotent: no. Blocks: no. Cancelled: perhaps all. Raises: nothing else."""
