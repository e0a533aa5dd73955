"""With keyspace events a take-over does not wait for the next scan."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from millstream import Message, open_blocking_broker, open_broker
from millstream.assignment import Announcement, AssignmentClient, Settings, assigned_subscriber
from millstream.assignment.member import AssignmentMember
from millstream.assignment.operator import announce_stream
from millstream.errors import AuthenticationFailed, PermissionDenied, WrongKeyType
from millstream.testing import RedisProcess, eventually
from millstream.wire.commands import Command
from support.dead_members import crash, lease_runs_out

RARELY = Settings(lease_ms=60_000, renew_interval_ms=200, sweep_interval_ms=600_000)
OFTEN = Settings(lease_ms=60_000, renew_interval_ms=200, sweep_interval_ms=50)


async def test_expired_lock_starts_a_scan() -> None:
    with RedisProcess(["--notify-keyspace-events", "Ex"]) as server:
        async with open_broker(f"{server.url}/3") as broker:
            dying = AssignmentClient(broker, "svc", member="dying", settings=OFTEN)
            successor = AssignmentClient(broker, "svc", member="successor", settings=RARELY)

            async def drain(client: AssignmentClient) -> None:
                async for _ in client.start():
                    pass

            tasks = [asyncio.create_task(drain(dying))]
            await dying.announce("s")
            await eventually(lambda: "s" in dying.owned, what="the first one to own it")
            tasks.append(asyncio.create_task(drain(successor)))
            await eventually(lambda: successor._settled, what="the successor to have joined, and to have looked once")

            async def listens() -> bool:
                return bool(await broker.transport.call(Command((b"PUBSUB", b"NUMPAT"))))

            await eventually(listens, what="the successor to listen")
            await crash(dying)
            await lease_runs_out(dying)
            await eventually(
                lambda: "s" in successor.owned, what="the successor to take over, long before its next sweep"
            )
            await successor.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if dying._listening is not None:
                dying._listening.cancel()


async def test_close_ends_the_scan_of_a_member_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()
    place = AssignmentMember.place

    async def slow(self: AssignmentMember, capacity: int) -> bool:
        looking.set()
        await go_on.wait()
        return await place(self, capacity)

    monkeypatch.setattr(AssignmentMember, "place", slow)
    with RedisProcess() as server:
        async with open_broker(server.url) as broker:
            client = AssignmentClient(broker, "svc", member="m", settings=RARELY)
            client.start()
            await looking.wait()
            closing = asyncio.create_task(client.close())
            # Its other loop, which waits for its interval, has ended by then.
            await eventually(lambda: client._tasks[0].done(), what="the renewing to end")
            go_on.set()
            await eventually(closing.done, what="the member to be closed, long before its next sweep")
            await closing


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisProcess]:
    """A server with users without sufficient permissions, and a list under the key of a service's load-balancer
    stream."""
    with RedisProcess(["--requirepass", "boss"]) as server:
        with open_blocking_broker(f"redis://:boss@127.0.0.1:{server.port}") as boss:
            for rule in ("reader on >secret ~* &* +@read +@connection", "half on >secret ~* &* +@all -xreadgroup"):
                boss.transport.call(Command((b"ACL", b"SETUSER", *rule.encode().split())))
            announce_stream(boss, "svc", Announcement("s"))
            boss.transport.call(Command((b"RPUSH", b"listed-input", b"x")))
        yield server


@pytest.mark.parametrize("awaited", [True, False], ids=["start is awaited", "start is iterated"])
@pytest.mark.parametrize("takeover", ["automatic", "notify"])
@pytest.mark.parametrize(
    ("user", "service", "error"),
    [
        ("wrong:secret", "svc", AuthenticationFailed),
        ("reader:secret", "svc", PermissionDenied),
        ("half:secret", "svc", PermissionDenied),
        (":boss", "listed", WrongKeyType),
    ],
    ids=["a wrong password", "no permission to write", "no permission to read announcements", "a list in its place"],
)
async def test_member_with_a_wrong_password_raises_at_once(
    guarded: RedisProcess, user: str, service: str, error: type[Exception], takeover: str, awaited: bool
) -> None:
    """The iterator ends instead of waiting for notifications that never arrive."""
    async with open_broker(f"redis://{user}@127.0.0.1:{guarded.port}") as broker:
        client = AssignmentClient(broker, service, member="a", settings=Settings(takeover=takeover))

        async def iterate() -> None:
            async for _ in client.start():
                pass

        with pytest.raises(error):
            await asyncio.wait_for(client.start() if awaited else iterate(), 60)
        await client.close()


@pytest.mark.parametrize("service", ["svc", "listed"])
async def test_subscriber_with_a_wrong_password_raises(guarded: RedisProcess, service: str) -> None:
    async def handle(message: Message) -> None: ...

    user, error = ("reader:secret", PermissionDenied) if service == "svc" else (":boss", WrongKeyType)
    async with open_broker(f"redis://{user}@127.0.0.1:{guarded.port}") as broker:
        assigned = assigned_subscriber(broker, service, handle, group="g", member="a")
        with pytest.raises(error):
            await asyncio.wait_for(assigned.run(), 60)
        await assigned.close()


async def test_start_returns_after_the_first_placement(redis_url: str) -> None:
    async with open_broker(redis_url) as broker:
        client = AssignmentClient(broker, "svc", member="a", settings=RARELY)
        await client.announce("s")
        notifications = await asyncio.wait_for(client.start(), 60)
        assert client.owned.keys() == {"s"}
        assert [item.stream for item in [await anext(notifications)]] == ["s"]
        await client.close()
        assert [notification async for notification in notifications] == []
