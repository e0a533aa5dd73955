"""The adapter for the Haxe stream broker has the signatures and results of the Haxe interface."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from uuid import uuid4

import pytest

from millstream import open_blocking_broker
from millstream.haxe import StreamBroker

SIGNATURES = {
    "xadd": ["stream", "data"],
    "createGroup": ["stream", "group", "startId='$'"],
    "deleteGroup": ["stream", "group"],
    "deleteConsumer": ["stream", "group", "consumer"],
    "xreadgroup": ["group", "consumer", "stream", "count=1", "blockMs=None"],
    "xack": ["stream", "group", "messageIds"],
    "xpending": ["stream", "group", "consumer=None"],
    "xautoclaim": ["stream", "group", "consumer", "minIdleMs", "count=1"],
    "xlen": ["stream"],
    "xtrim": ["stream", "maxLen"],
    "getGroupInfo": ["stream"],
}
"""As in the Haxe interface: ``count:Int = 1, ?blockMs:Null<Int>``."""


@pytest.mark.parametrize("method", SIGNATURES)
def test_signature_is_that_of_the_haxe_interface(method: str) -> None:
    parameters = list(inspect.signature(getattr(StreamBroker, method)).parameters.values())[1:]
    empty = inspect.Parameter.empty
    assert [p.name if p.default is empty else f"{p.name}={p.default!r}" for p in parameters] == SIGNATURES[method]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_adapter_has_no_other_public_methods() -> None:
    assert {name for name in vars(StreamBroker) if not name.startswith("_")} == SIGNATURES.keys()


@pytest.fixture(params=["local", "redis"])
def broker(request: pytest.FixtureRequest) -> Iterator[StreamBroker]:
    url = f"local://{uuid4().hex}" if request.param == "local" else request.getfixturevalue("redis_url")
    with open_blocking_broker(url) as blocking:
        yield StreamBroker(blocking)


def test_nested_data_is_read_as_it_was_written(broker: StreamBroker) -> None:
    data = {"type": "email", "data": {"to": ["a", "b"]}, "createdAt": 1.5, "urgent": True}
    broker.createGroup("tasks", "workers", "0")
    entry_id = broker.xadd("tasks", data)
    [message] = broker.xreadgroup("workers", "worker-1", "tasks", 10, 0)
    assert (message.id, message.data) == (entry_id, data)
    assert broker.xpending("tasks", "workers", "worker-1") == [message]
    assert broker.xpending("tasks", "workers", "worker-2") == []
    assert broker.xack("tasks", "workers", [message.id]) == 1
    assert broker.xack("tasks", "workers", []) == 0


def test_group_starts_at_new_messages_by_default(broker: StreamBroker) -> None:
    broker.xadd("tasks", {"n": 1})
    broker.createGroup("tasks", "workers")
    assert broker.xreadgroup("workers", "worker-1", "tasks", 10, 0) == []


def test_block_ms_zero_returns_at_once_and_a_positive_value_ends(broker: StreamBroker) -> None:
    broker.createGroup("tasks", "workers", "0")
    assert broker.xreadgroup("workers", "worker-1", "tasks", 1, 0) == []
    assert broker.xreadgroup("workers", "worker-1", "tasks", 1, 20) == []


@pytest.mark.parametrize(("block_ms", "passed_on"), [(None, 0), (0, None), (5000, 5000)])
def test_block_ms_is_translated(block_ms: int | None, passed_on: int | None) -> None:
    class Recording:
        def xreadgroup(self, *args: object, **options: object) -> list[object]:
            self.call = (args, options)
            return []

    recording = Recording()
    StreamBroker(recording).xreadgroup("workers", "worker-1", "tasks", 3, block_ms)  # type: ignore[arg-type]
    assert recording.call == (("tasks", "workers", "worker-1"), {"count": 3, "block_ms": passed_on})


def test_auto_claim_examines_the_whole_pending_list(broker: StreamBroker) -> None:
    broker.createGroup("tasks", "workers", "0")
    for number in range(250):
        broker.xadd("tasks", {"n": number})
    broker.xreadgroup("workers", "worker-1", "tasks", 250, 0)
    assert broker.xautoclaim("tasks", "workers", "worker-2", 3_600_000, 10) == []
    claimed = broker.xautoclaim("tasks", "workers", "worker-2", 0, 200)
    assert [message.data["n"] for message in claimed] == list(range(200))
    assert len(broker.xpending("tasks", "workers")) == 250
    assert broker.deleteConsumer("tasks", "workers", "worker-2") == 200


def test_information_and_trimming(broker: StreamBroker) -> None:
    broker.createGroup("tasks", "workers", "0")
    ids = [broker.xadd("tasks", {"n": number}) for number in range(5)]
    broker.xreadgroup("workers", "worker-1", "tasks", 2, 0)
    [group] = broker.getGroupInfo("tasks")
    assert (group.name, group.lastDeliveredId, group.totalPending) == ("workers", ids[1], 2)
    [consumer] = group.consumers
    assert (consumer.name, consumer.pending) == ("worker-1", 2)
    assert consumer.lastActivity > 0
    assert broker.xtrim("tasks", 3) == 2
    assert broker.xlen("tasks") == 3
    broker.deleteGroup("tasks", "workers")
    assert broker.getGroupInfo("tasks") == []
