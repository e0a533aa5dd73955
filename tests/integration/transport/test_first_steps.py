"""Basic operations over a transport to a real server."""

from __future__ import annotations

from millstream import Broker, open_blocking_broker


async def test_entry_is_added_and_read(redis_broker: Broker) -> None:
    entry_id = await redis_broker.xadd("orders", {"total": 12, "note": "zero\0byte"})

    (entry,) = await redis_broker.xrange("orders")

    assert entry.id == entry_id
    assert entry.fields == {b"total": b"12", b"note": b"zero\0byte"}


def test_sharing_with_the_blocking_broker(redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        entry_id = broker.xadd("orders", {"total": 12.5})
        assert broker.xread({"orders": "0"}) == {"orders": [(entry_id, {b"total": b"12.5"})]}
