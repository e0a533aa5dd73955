"""Announces the partitions of a topic, so that each gets an owner.

A key always belongs to the same partition, and a partition has one owner at a time. So messages of a key are handled in
order across all processes, and the partitions are balanced over the members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from secrets import token_hex
from typing import Any

from millstream.assignment.announcement import Announcement, add_announcements, balancer_stream
from millstream.assignment.errors import MalformedAnnouncement, MalformedOwnerRecord
from millstream.assignment.leases import OwnerRecord
from millstream.assignment.membership import living, parse_members
from millstream.broker import Broker, companion_key
from millstream.broker.scripts import leases
from millstream.errors import MillstreamError
from millstream.messaging import partition_streams

LOCK_MS = 10_000
"""Time to live of the lock under which partitions are announced; announcing 10,000 of them takes about a second."""
LOCK_RETRY_S = 0.05
_PAGE = 1000


async def announce_partitions(broker: Broker, service: str, topic: str, partitions: int) -> None:
    """Announces every partition that is not announced yet. Idempotent, also if several processes call it."""
    await announce_streams(broker, balancer_stream(service), partition_streams(topic, partitions), {"topic": topic})


async def announce_streams(
    broker: Broker, balancer: str, streams: Collection[str], info: Mapping[str, Any]
) -> set[str]:
    """Announces the streams that are neither announced nor owned; returns the names that were announced before.

    The entries of the load-balancer stream decide, not a marker of earlier announcements: announcements can be deleted
    or trimmed. The owner of a stream announces it again by itself, while it lives.
    """
    announced = await announced_streams(broker, balancer)
    if await _without_owner(broker, balancer, set(streams) - announced):
        # Processes that start at the same time would each announce every partition.
        lock, holder = companion_key(balancer, "announcing"), token_hex(8)
        try:
            # The lock is on the server, so its release cannot set an asyncio.Event. Inside ``try``, because the server
            # may have executed a request that is cancelled before its reply.
            while await broker.run(leases.lock_keys, [lock], holder, ttl_ms=LOCK_MS) != [True]:
                await broker.run(leases.limit_locks, [lock], ttl_ms=LOCK_MS)
                await asyncio.sleep(LOCK_RETRY_S)
            announced = await announced_streams(broker, balancer)
            missing = await _without_owner(broker, balancer, set(streams) - announced)
            announcements = [Announcement(name, info) for name in streams if name in missing]
            await broker.run(add_announcements, balancer, announcements)
        finally:
            await broker.run(leases.unlock_keys, [lock], holder)
    return announced


async def announced_streams(broker: Broker, balancer: str) -> set[str]:
    """The names of all streams that are announced on a load-balancer stream."""
    names: set[str] = set()
    start = "-"
    while page := await broker.xrange(balancer, start, count=_PAGE):
        for entry in page:
            try:
                names.add(Announcement.parse(entry.fields).stream)
            except MalformedAnnouncement:
                continue  # a member moves it to the dead letters
        start = f"({page[-1].id}"
    return names


async def _without_owner(broker: Broker, balancer: str, streams: Collection[str]) -> set[str]:
    if not streams:
        return set()
    names = list(streams)
    now_ms, _, rows = await broker.run(leases.members, balancer)
    alive = living(parse_members(rows)[0], now_ms)
    records, _ = await broker.run(leases.read_leases, names)
    ownerless = set()
    for name, record in zip(names, records, strict=True):
        if isinstance(record, MillstreamError):
            raise record
        try:
            owner = OwnerRecord.parse(record).member
        except MalformedOwnerRecord:
            owner = ""  # it is announced, so that members see it and log what is wrong with it
        if owner not in alive:
            ownerless.add(name)
    return ownerless
