"""The components that read, one class each, next to the writers: the input, what was handled, and the outputs.

A part works through a connection with planted faults; its results are checked through another connection without
faults. A subscriber that ends with an error is recorded, and restarted when the fault has ended, as a supervisor does.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from typing import ClassVar

from chaos.writers import SparkSinkWriter, Writer, published
from millstream import Broker, open_blocking_broker
from millstream.assignment import Announcement, AssignedSubscriber, Settings
from millstream.broker import companion_key
from millstream.errors import MillstreamError
from millstream.messaging import DeadLetters, Message, Publisher, Subscriber
from millstream.testing import eventually

GROUP = "g"
SETTLED_S = 60.0


class Part(ABC):
    """Call ``begin``, ``work`` any number of times, ``lift`` when the fault has ended, and ``verdict`` at the end."""

    kind: ClassVar[str]
    blocks: ClassVar[bool] = False
    """Whether it reads with a blocking command."""
    transactions: ClassVar[bool] = False
    """Whether it sends MULTI."""

    def __init__(
        self, broker: Broker, url: str, steady: Broker, name: str, *, patient: bool, group_lost: bool = False
    ) -> None:
        """``patient``: entries that are being retried are not claimed. ``group_lost``: the server replies that
        the group does not exist."""
        self.broker = broker
        self.url = url
        """The URL of the broker, for parts that need another transport."""
        self.steady = steady
        self.name = name
        self.patient = patient
        self.group_lost = group_lost
        self.raised: list[MillstreamError] = []
        """Errors that callers received."""
        self.foreign: list[BaseException] = []
        """Errors that are not a MillstreamError: a caller must never receive one."""

    @abstractmethod
    async def begin(self) -> None: ...

    @abstractmethod
    async def work(self) -> None:
        """Does some more work, with or without the fault."""

    @abstractmethod
    async def lift(self) -> None:
        """The fault has ended: restart what it has stopped."""

    @abstractmethod
    async def verdict(self) -> str:
        """Describes what is wrong; empty if everything is right."""


class WritingPart(Part):
    """A writer of ``chaos.writers`` as a part."""

    writer_class: ClassVar[type[Writer]]

    async def begin(self) -> None:
        self.writer = self.make()
        self.writer.open()

    def make(self) -> Writer:
        return self.writer_class(self.broker, name=self.name)

    async def work(self) -> None:
        for _ in range(4):
            await self.writer.write_some()

    async def lift(self) -> None:
        self.raised = [*self.writer.refused, *self.writer.passing]
        self.foreign = self.writer.foreign

    async def verdict(self) -> str:
        """Each confirmed token is stored once; each other token at most once."""

        async def all_there() -> bool:
            return not (await self.writer.balance(self.steady)).lost

        try:
            await eventually(all_there, timeout_s=10)  # delayed messages are stored later
        except TimeoutError:
            pass
        balance = await self.writer.balance(self.steady)
        await self.writer.close()
        if not balance.confirmed:
            return "nothing was confirmed"
        return "" if balance.exactly_once else str(balance)


def writing(writer: type[Writer]) -> type[WritingPart]:
    attributes = {"kind": writer.kind, "writer_class": writer, "transactions": writer.kind == "transaction"}
    return type(f"{writer.__name__}Part", (WritingPart,), attributes)


class SparkSinkPart(WritingPart):
    """A task of Spark's sink over the blocking transport, without a Spark session."""

    kind = SparkSinkWriter.kind
    transactions = True

    def make(self) -> Writer:
        self._blocking = open_blocking_broker(self.url, deadline_ms=30_000)
        return SparkSinkWriter(self.broker, blocking=self._blocking, name=self.name)

    async def verdict(self) -> str:
        wrong = await super().verdict()
        self._blocking.close()
        return wrong


class ReadingPart(Part):
    """Messages are published over the steady broker, and handled by the part."""

    blocks = True

    def __init__(
        self, broker: Broker, url: str, steady: Broker, name: str, *, patient: bool, group_lost: bool = False
    ) -> None:
        super().__init__(broker, url, steady, name, patient=patient, group_lost=group_lost)
        self.sent: list[str] = []
        self.handled: Counter[str] = Counter()
        self.ended = 0
        """How often it was restarted."""
        self._lifted = asyncio.Event()
        self._stopping = False
        self._running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self._publisher = Publisher(self.steady)
        await self.work()
        self._running = asyncio.create_task(self._supervise())
        await eventually(lambda: len(self.handled) == len(self.sent), what="the first messages", timeout_s=SETTLED_S)

    async def work(self) -> None:
        tokens = [f"{self.name}:{len(self.sent) + n}" for n in range(10)]
        await self._publisher.publish(self.name, *(Message(token.encode()) for token in tokens))
        self.sent += tokens

    async def handle(self, message: Message) -> Message | None:
        self.handled[message.payload.decode()] += 1
        return Message(message.payload)

    @abstractmethod
    async def consume(self) -> None:
        """Runs until it is closed or raises a permanent error."""

    @abstractmethod
    async def stop(self) -> None: ...

    async def _supervise(self) -> None:
        """Restarts a consumer that ended with an error, after the fault has ended."""
        while not self._stopping:
            try:
                await self.consume()
            except MillstreamError as error:
                self.raised.append(error)
            except Exception as error:
                self.foreign.append(error)
            else:
                return
            self.ended += 1
            await self._lifted.wait()
            await asyncio.sleep(0.05)

    async def lift(self) -> None:
        self._lifted.set()
        await self.work()

    async def verdict(self) -> str:
        complaints: list[str] = []
        try:
            await eventually(self.settled, what="everything settled", timeout_s=SETTLED_S)
        except TimeoutError as error:
            complaints.append(str(error))
        self._stopping = True
        await self.stop()
        if self._running is not None:
            await self._running
        await self._publisher.close()
        if missing := set(self.sent) - await self.finished():
            complaints.append(f"{len(missing)} never handled")
        if self.patient and (twice := {token: n for token, n in self.handled.items() if n > 1}):
            complaints.append(f"handled again: {twice}")
        complaints += await self.complaints()
        return "; ".join(complaints)

    async def settled(self) -> bool:
        for stream in self.streams:
            groups = [group for group in await self.steady.group_info(stream) if group.name == GROUP]
            if not groups or groups[0].pending or groups[0].lag:
                return False
        return set(self.sent) <= await self.finished()

    async def finished(self) -> set[str]:
        return set(self.handled)

    @property
    def streams(self) -> list[str]:
        return [self.name]

    async def complaints(self) -> list[str]:
        """Describes further problems of this part."""
        return []

    def once(self, count: int) -> bool:
        """Whether the count is right. A lost group is recreated at an earlier position: then more than one is right."""
        return count == 1 or (count > 1 and self.group_lost)

    async def tokens(self, stream: str) -> Counter[str]:
        return Counter(published([entry.fields for entry in await self.steady.xrange(stream)]))


class SubscriberPart(ReadingPart):
    """A subscriber whose handler returns an output: it is stored once, together with the acknowledgement."""

    kind = "outputs"

    async def consume(self) -> None:
        self.subscriber = self.make()
        await self.subscriber.consume(self.name, self.handle, publish_to=f"{{{self.name}}}.out")

    def make(self, **options: int) -> Subscriber:
        return Subscriber(
            self.broker,
            group=GROUP,
            group_start="0",
            block_ms=100,
            claim_min_idle_ms=20_000 if self.patient else 1_500,
            claim_interval_ms=100,
            **options,  # type: ignore[arg-type]  # numbers all of them
        )

    async def stop(self) -> None:
        await self.subscriber.close()

    async def complaints(self) -> list[str]:
        outputs = await self.tokens(f"{{{self.name}}}.out")
        wrong = {token: outputs[token] for token in self.sent if not self.once(outputs[token])}
        return [f"outputs that are not there once: {wrong}"] if wrong else []


class DeadLetterPart(SubscriberPart):
    """A subscriber whose handler always fails: every message is dead-lettered once."""

    kind = "dead letters"

    async def consume(self) -> None:
        self.subscriber = self.make(max_deliveries=1)
        await self.subscriber.consume(self.name, self.fail)

    async def fail(self, message: Message) -> None:
        self.handled[message.payload.decode()] += 1
        raise ValueError("planted")

    async def finished(self) -> set[str]:
        """Handled or dead-lettered: a last delivery whose outcome was lost is dead-lettered without another one."""
        return set(self.handled) | (await self.dead_lettered()).keys()

    async def dead_lettered(self) -> Counter[str]:
        letters = await DeadLetters(self.steady, self.name).list(limit=1000)
        return Counter(published([letter.fields for letter in letters]))

    async def complaints(self) -> list[str]:
        dead_lettered = await self.dead_lettered()
        wrong = {token: dead_lettered[token] for token in self.sent if not self.once(dead_lettered[token])}
        return [f"not dead-lettered once: {wrong}"] if wrong else []


class ReplayPart(Part):
    """Dead letters are replayed: each is added to the stream once and removed from the dead letters."""

    kind = "replay"

    async def begin(self) -> None:
        self.sent = [f"{self.name}:{n}" for n in range(30)]
        dead_lettering = Subscriber(self.steady, group=GROUP, group_start="0", block_ms=50, max_deliveries=1)

        async def fail(message: Message) -> None:
            raise ValueError("planted")

        running = asyncio.create_task(dead_lettering.consume(self.name, fail))
        async with Publisher(self.steady) as publisher:
            await publisher.publish(self.name, *(Message(token.encode()) for token in self.sent))
        self.dlq = companion_key(self.name, "dlq")

        async def all_dead_lettered() -> bool:
            return await self.steady.xlen(self.dlq) == len(self.sent)

        await eventually(all_dead_lettered, what="all to be dead-lettered", timeout_s=SETTLED_S)
        await dead_lettering.close()
        await running
        self._planted = False

    async def work(self) -> None:
        if not self._planted:
            self._planted = True  # the first call comes before the fault: there is one replay, and it meets the fault
            return
        await self._replay()

    async def lift(self) -> None:
        await self._replay()

    async def _replay(self) -> None:
        try:
            await DeadLetters(self.broker, self.name).replay()
        except MillstreamError as error:
            self.raised.append(error)
        except Exception as error:
            self.foreign.append(error)

    async def verdict(self) -> str:
        remaining = await self.steady.xlen(self.dlq)
        there = Counter(published([entry.fields for entry in await self.steady.xrange(self.name)]))
        wrong = {token: there[token] for token in self.sent if there[token] != 2}
        return f"{remaining} letters left, there other than twice: {wrong}" if remaining or wrong else ""


class AssignedPart(ReadingPart):
    """An assigned subscriber on two streams, which it owns by lease."""

    kind = "assignment"

    async def begin(self) -> None:
        for stream in self.streams:
            await self.steady.xadd(f"{self.name}-input", Announcement(stream).fields())
        await super().begin()

    @property
    def streams(self) -> list[str]:
        return [f"{self.name}-a", f"{self.name}-b"]

    async def work(self) -> None:
        for stream in self.streams:
            tokens = [f"{stream}:{len(self.sent) + n}" for n in range(5)]
            await self._publisher.publish(stream, *(Message(token.encode()) for token in tokens))
            self.sent += tokens

    async def consume(self) -> None:
        self.assigned = AssignedSubscriber(
            self.broker,
            self.name,
            self.handle,
            group=GROUP,
            member="m",
            settings=Settings(lease_ms=20_000 if self.patient else 2_000, renew_interval_ms=300, sweep_interval_ms=100),
            block_ms=100,
            claim_min_idle_ms=20_000 if self.patient else 1_500,
            claim_interval_ms=100,
        )
        await self.assigned.run()

    async def stop(self) -> None:
        await self.assigned.close()
