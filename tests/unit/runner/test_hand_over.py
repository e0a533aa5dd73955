"""Which consumers a worker reports, and what happens to the supervisor's other topics if one fails."""

from __future__ import annotations

from uuid import uuid4

import pytest

from millstream import open_broker
from millstream.errors import WrongKeyType
from millstream.messaging.settings import default_consumer
from millstream.runner.hand_over import ConsumerReports, WorkerConsumer, release_pending


def test_generated_names_are_reported_once_and_chosen_names_never() -> None:
    reported: list[WorkerConsumer] = []
    observer = ConsumerReports(reported.append)
    own = default_consumer()
    for name in (own, own, f"{own}-2", "chosen", f"{own}x"):
        observer("messaging.subscribed", topic="orders", group="billing", consumer=name)
        observer("messaging.received", topic="orders", group="billing", consumer=name, entries=1)
    assert reported == [WorkerConsumer("orders", "billing", own), WorkerConsumer("orders", "billing", f"{own}-2")]


async def test_topic_that_fails_does_not_stop_the_release_of_others() -> None:
    url = f"local://{uuid4().hex}"
    async with open_broker(url) as broker:
        await broker.set("no stream", b"x")
        for topic in ("a", "b"):
            await broker.xadd(topic, {"n": 1})
            await broker.create_group(topic, "g", start="0")
            await broker.xreadgroup(topic, "g", "dead", count=1)
        topics = ("a", "no stream", "deleted", "b")
        with pytest.raises(WrongKeyType):
            await release_pending(url, [WorkerConsumer(topic, "g", "dead") for topic in topics])
        for topic in ("a", "b"):
            (pending,) = await broker.xpending_range(topic, "g")
            assert (pending.consumer, pending.times_delivered) == ("dead", 1)
            assert pending.idle_ms > 3_600_000
        assert await release_pending(url, [WorkerConsumer(topic, "g", "dead") for topic in ("a", "deleted", "b")]) == 2
