"""The link over a real server: the plainest walk."""

from __future__ import annotations

from millstream import Broker, open_blocking_broker


async def test_an_entry_goes_in_and_comes_out(redis_broker: Broker) -> None:
    entry_id = await redis_broker.xadd("orders", {"total": 12, "note": "zero\0byte"})

    (entry,) = await redis_broker.xrange("orders")

    assert entry.id == entry_id
    assert entry.fields == {b"total": b"12", b"note": b"zero\0byte"}


def test_the_same_without_await(redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        entry_id = broker.xadd("orders", {"total": 12.5})
        assert broker.xread({"orders": "0"}) == {"orders": [(entry_id, {b"total": b"12.5"})]}
