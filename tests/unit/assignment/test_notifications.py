"""The queue of a member's notifications."""

from __future__ import annotations

import asyncio

import pytest

from millstream.assignment import MemberClosed, Notifications, StreamAdded
from millstream.model import EntryId


async def test_put_after_close_is_refused() -> None:
    notifications = Notifications()
    queued = StreamAdded("orders", EntryId(1, 0))
    notifications.put(queued)
    notifications.close()
    with pytest.raises(MemberClosed):
        notifications.put(StreamAdded("bills", EntryId(2, 0)))
    assert [notification async for notification in notifications] == [queued]


async def test_join_waits_until_queued_notifications_are_handled() -> None:
    notifications = Notifications()
    handled: list[str] = []
    may_go_on = asyncio.Event()

    async def handle() -> None:
        async for notification in notifications:
            await may_go_on.wait()
            handled.append(notification.stream)

    for number in range(3):
        notifications.put(StreamAdded(f"s{number}", EntryId(number + 1, 0)))
    joining = asyncio.create_task(notifications.join())
    handling = asyncio.create_task(handle())
    notifications.close()
    await asyncio.sleep(0)
    assert not joining.done()
    may_go_on.set()
    await joining
    assert handled == ["s0", "s1", "s2"]
    await handling


async def test_join_waits_for_close() -> None:
    notifications = Notifications()
    joining = asyncio.create_task(notifications.join())
    await asyncio.sleep(0)
    assert not joining.done()
    notifications.close()
    await joining
