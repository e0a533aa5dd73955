"""Commands and events over the embedded broker, our server and a real redis-server.

No ``from __future__ import annotations`` here: handlers inside tests are registered by their annotations.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from millstream import Broker, open_broker
from millstream.cqrs import CommandBus, CommandRouter, Depends, DuplicateHandler, EventBus, EventRouter, HandlerRefused
from millstream.errors import InvalidArgument
from millstream.messaging.dead_letters import DeadLetters
from millstream.messaging.message import Message
from millstream.messaging.middleware import correlation, retry
from millstream.messaging.publisher import Publisher
from millstream.messaging.router import Router
from millstream.model import Backoff
from millstream.testing import eventually

QUICK: dict[str, Any] = {"backoff": Backoff(initial_ms=1, max_ms=5)}


class CreateUser(BaseModel):
    name: str


class DeleteUser(BaseModel):
    name: str


class UserCreated(BaseModel):
    name: str


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url) as opened:
        yield opened


async def test_a_command_is_done_once_by_one_of_the_instances(broker: Broker) -> None:
    done: list[str] = []

    def service(consumer: str) -> CommandBus:
        bus = CommandBus(broker, consumer=consumer, **QUICK)

        @bus.handler
        async def create(command: CreateUser) -> None:
            done.append(command.name)

        return bus

    async with service("one"), service("two") as bus:
        for n in range(20):
            await bus.send(CreateUser(name=str(n)))
        await eventually(lambda: len(done) == 20, what="all were done")
    assert sorted(done, key=int) == [str(n) for n in range(20)]
    assert await broker.list_streams("command.*") == ["command.CreateUser"]


async def test_a_command_sent_before_its_first_handler_is_done(broker: Broker) -> None:
    async with CommandBus(broker) as sender:
        await sender.send(CreateUser(name="early"))
    bus = CommandBus(broker, **QUICK)
    done: list[str] = []

    @bus.handler
    async def create(command: CreateUser) -> None:
        done.append(command.name)

    async with bus:
        await eventually(lambda: done == ["early"], what="it was done")


async def test_every_handler_gets_every_event_however_many_instances_run(broker: Broker) -> None:
    heard: list[tuple[str, str, str]] = []

    def service(name: str, consumer: str) -> EventBus:
        bus = EventBus(broker, service=name, group_start="0", consumer=consumer, **QUICK)

        @bus.handler
        async def welcome(event: UserCreated) -> None:
            heard.append((name, "welcome", event.name))

        @bus.handler
        def count(event: UserCreated) -> None:
            heard.append((name, "count", event.name))

        return bus

    async with service("mail", "1") as bus, service("mail", "2"), service("audit", "1"):
        for n in range(5):
            await bus.publish(UserCreated(name=str(n)))
        await eventually(lambda: len(heard) == 20, what="four handlers, five events")
    assert len(set(heard)) == 20
    groups = {info.name for info in await broker.group_info("event.UserCreated")}
    assert groups == {"mail.welcome", "mail.count", "audit.welcome", "audit.count"}


async def test_a_command_leads_to_an_event_under_the_same_correlation(broker: Broker) -> None:
    router = Router(broker)
    router.use(correlation())
    commands = CommandBus(broker, **QUICK)
    events = EventBus(broker, service="users", group_start="0", **QUICK)
    received: list[tuple[str, str]] = []

    @commands.handler
    async def create(command: CreateUser) -> None:
        await events.publish(UserCreated(name=command.name))

    @events.handler
    async def welcome(event: UserCreated, message: Message) -> None:
        received.append((event.name, message.metadata["correlation_id"]))

    router.include(commands, events)
    async with router:
        uuid = await commands.send(CreateUser(name="Ann"))
        await eventually(lambda: received, what="the event")
    assert received == [("Ann", uuid)]
    await commands.close()
    await events.close()


async def test_dependencies_are_injected_and_cleaned_up_before_the_acknowledgement(broker: Broker) -> None:
    bus = CommandBus(broker, **QUICK)
    steps: list[str] = []

    def config() -> str:
        assert threading.current_thread() is not threading.main_thread()
        return "db"

    async def transaction(config: Annotated[str, Depends(config)]) -> AsyncIterator[str]:
        steps.append(f"begin {config}")
        try:
            yield "tx"
        except OSError:
            steps.append("rollback")
            raise
        steps.append("commit")
        assert (await broker.xpending("command.CreateUser", "handlers")).count == 1

    @bus.handler
    async def create(command: CreateUser, tx: Annotated[str, Depends(transaction)]) -> None:
        if "rollback" not in steps:
            raise OSError("down")

    async with bus:
        await bus.send(CreateUser(name="Ann"))
        await eventually(lambda: steps[-1:] == ["commit"], what="the second try")
    assert steps == ["begin db", "rollback", "begin db", "commit"]


async def test_entry_that_is_no_command_is_dead_lettered_at_once(broker: Broker) -> None:
    bus = CommandBus(broker, **QUICK)
    done: list[str] = []

    @bus.handler(middleware=[retry(5)])
    async def create(command: CreateUser) -> None:
        done.append(command.name)

    async with bus, Publisher(broker) as publisher:
        await publisher.publish("command.CreateUser", Message(b'{"surname": 1}'))
        await bus.send(CreateUser(name="good"))
        await eventually(lambda: done == ["good"], what="the good one")
        letters = DeadLetters(broker, "command.CreateUser")
        await eventually(letters.count, what="the bad one to be dead-lettered")
    (letter,) = await letters.list()
    assert letter.details is not None
    assert letter.details.deliveries == 1
    assert letter.error_type.endswith("CannotUnmarshal")


async def test_options_reach_the_subscriber_and_the_codec_both_ways(broker: Broker) -> None:
    bus = CommandBus(broker, codec="watermill", **QUICK)
    running = 0
    maximum = 0

    @bus.handler(max_in_flight=1)
    async def create(command: CreateUser) -> None:
        nonlocal running, maximum
        running += 1
        maximum = max(maximum, running)
        await asyncio.sleep(0)
        running -= 1

    async with bus:
        for n in range(10):
            await bus.send(CreateUser(name=str(n)), key="k", metadata={"tenant": "a"})
        pending = bus.topic_of(CreateUser), "handlers"
        await eventually(lambda: _done(broker, *pending, 10), what="all were done")
    assert maximum == 1
    (first, *_) = await broker.xrange("command.CreateUser")
    assert set(first.fields) == {b"_watermill_message_uuid", b"metadata", b"payload"}


async def test_routers_are_included_with_their_middleware(broker: Broker) -> None:
    order: list[str] = []

    def marks(name: str) -> Any:
        def middleware(handler: Any) -> Any:
            async def handle(message: Message) -> Any:
                order.append(name)
                return await handler(message)

            return handle

        return middleware

    users, admin = CommandRouter(), CommandRouter()
    users.use(marks("users"))
    admin.use(marks("admin"))

    @users.handler
    async def create(command: CreateUser) -> None:
        order.append("create")

    admin.include(users)
    bus = CommandBus(broker, **QUICK)
    bus.include(admin)
    async with bus:
        await bus.send(CreateUser(name="Ann"))
        await eventually(lambda: "create" in order, what="the handler")
    assert order == ["admin", "users", "create"]


async def test_dependencies_can_be_replaced(broker: Broker) -> None:
    bus = CommandBus(broker, **QUICK)
    used: list[str] = []

    def database() -> str:
        return "real"

    @bus.handler
    async def create(command: CreateUser, database: Annotated[str, Depends(database)]) -> None:
        used.append(database)

    bus.dependency_overrides[database] = lambda: "fake"
    async with bus:
        await bus.send(CreateUser(name="Ann"))
        await eventually(lambda: used == ["fake"], what="the handler")


async def test_two_handlers_for_one_command_are_refused_wherever_they_come_from(broker: Broker) -> None:
    bus = CommandBus(broker)

    @bus.handler
    async def first(command: CreateUser) -> None: ...

    with pytest.raises(DuplicateHandler, match=r"command CreateUser.*first.*second"):

        @bus.handler
        async def second(command: CreateUser) -> None: ...

    other = CommandRouter()

    @other.handler
    async def third(command: CreateUser) -> None: ...

    with pytest.raises(DuplicateHandler, match=r"first.*third"):
        bus.include(other)
    assert len(bus.registered()) == 1


async def test_event_handlers_of_one_name_would_share_a_group_and_are_refused(broker: Broker) -> None:
    bus = EventBus(broker, service="s", group_start="0")

    def make() -> Any:
        async def on_created(event: UserCreated) -> None: ...

        return on_created

    bus.handler(make())
    with pytest.raises(DuplicateHandler, match="name="):
        bus.handler(make())
    bus.handler(name="another")(make())
    other = EventRouter()
    other.handler(make())
    with pytest.raises(DuplicateHandler):
        bus.include(other)


async def test_mistakes_are_refused_at_registration_and_name_the_place(broker: Broker) -> None:
    async def untyped(command) -> None: ...  # type: ignore[no-untyped-def]

    async def create(command: CreateUser) -> None: ...

    bus = CommandBus(broker)
    with pytest.raises(HandlerRefused, match=r"untyped \(line \d+\).*no annotation"):
        bus.handler(untyped)
    with pytest.raises(HandlerRefused, match=r"create \(line \d+\).*NACK_ON_ERROR"):
        bus.handler(ack_policy="perhaps")(create)
    with pytest.raises(HandlerRefused, match=r"create \(line \d+\).*flat, json"):
        CommandBus(broker, codec="protobuf").handler(create)
    with pytest.raises(HandlerRefused, match=r"create \(line \d+\).*topic"):
        CommandBus(broker, topic=lambda name: "").handler(create)
    assert bus.registered() == []


async def _done(broker: Broker, topic: str, group: str, count: int) -> bool:
    infos = [info for info in await broker.group_info(topic) if info.name == group]
    return bool(infos) and infos[0].pending == 0 and infos[0].entries_read == count


class UserDeleted(BaseModel):
    name: str


async def test_handler_on_a_topic_of_several_event_types_gets_its_own_type(broker: Broker) -> None:
    heard: list[tuple[str, str]] = []
    bus = EventBus(broker, service="crm", group_start="0", topic=lambda _: "users", **QUICK)

    @bus.handler
    async def welcome(event: UserCreated) -> None:
        heard.append(("welcome", event.name))

    @bus.handler
    async def farewell(event: UserDeleted) -> None:
        heard.append(("farewell", event.name))

    async with bus:
        for n in range(5):
            await bus.publish(UserCreated(name=f"c{n}"))
            await bus.publish(UserDeleted(name=f"d{n}"))
        await eventually(lambda: len(heard) >= 10, what="each has heard of its own")

        async def all_settled() -> bool:
            infos = await broker.group_info("users")
            return all(info.pending == 0 and info.lag == 0 for info in infos)

        await eventually(all_settled, what="nothing is pending")
        assert await DeadLetters(broker, "users").count() == 0
        with pytest.raises(InvalidArgument, match="names the class"):
            await bus.publish(UserCreated(name="x"), metadata={"name": "UserDeleted"})
    assert sorted(heard) == sorted([("welcome", f"c{n}") for n in range(5)] + [("farewell", f"d{n}") for n in range(5)])


async def test_command_of_another_type_is_dead_lettered(broker: Broker) -> None:
    bus = CommandBus(broker, topic=lambda _: "work", **QUICK)

    @bus.handler
    async def create(command: CreateUser) -> None: ...

    async with bus:
        await bus.send(DeleteUser(name="ann"))
        letters = DeadLetters(broker, "work")
        await eventually(letters.count, what="it to be dead-lettered")
        assert "names the type DeleteUser" in (await letters.list())[0].details.error  # type: ignore[union-attr]


async def test_a_plain_entry_with_a_field_called_name_is_an_event_of_its_topic(broker: Broker) -> None:
    heard: list[str] = []
    bus = EventBus(broker, service="crm", group_start="0", **QUICK)

    @bus.handler
    async def welcome(event: UserCreated) -> None:
        heard.append(event.name)

    async with bus:
        await broker.xadd("event.UserCreated", {"name": "Ann"})
        await eventually(lambda: heard == ["Ann"], what="it is heard of")
