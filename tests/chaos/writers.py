"""The components that write, one class each: what each sent, what was confirmed, and what is stored.

A writer records tokens in the ledger before a call and after its reply. If the contract lets a caller repeat a failed
call (``append_once``, an idempotency key), the writer repeats it with the same rows; otherwise it continues with other
rows. An exception that is not a MillstreamError is a defect of ours, and is recorded.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar

import pyarrow as pa

from millstream import BlockingBroker, Broker
from millstream.broker import Digest
from millstream.errors import DurabilityUnavailable, MillstreamError
from millstream.messaging import Message, Publisher
from millstream.messaging.codecs import codec
from millstream.model import Durability
from millstream.spark.bulk import BulkOnce, UniformRows
from millstream.testing import DeliveryLedger
from millstream.testing.ledger import Balance

FIELD = b"token"
PAUSE_S = 0.005


def published(entries: Sequence[dict[bytes, bytes]]) -> list[str]:
    """The tokens of entries that a publisher wrote."""
    return [codec("flat").decode(fields).payload.decode() for fields in entries]


class Writer(ABC):
    """Writes batches of tokens to a stream of its own until ``stop``."""

    kind: ClassVar[str]
    repeats: ClassVar[bool] = False
    """Whether a failed call may be repeated: then it is, with the same rows, until it succeeds."""
    tasks: ClassVar[int] = 1
    batch: ClassVar[int] = 5

    def __init__(self, broker: Broker, *, name: str = "", durability: Durability | None = None) -> None:
        self.broker = broker
        self.stream = name or self.kind
        self.durability = durability
        self.ledger = DeliveryLedger()
        self.errors: Counter[str] = Counter()
        self.refused: list[MillstreamError] = []
        """Permanent errors that the broker raised."""
        self.passing: list[MillstreamError] = []
        """Transient errors that it raised: the deadline had passed, or the call may not be repeated."""
        self.foreign: list[BaseException] = []
        self._numbers = count()
        self._stop = False

    @abstractmethod
    async def write(self, tokens: list[str]) -> None:
        """One call. Returns when it was answered."""

    def open(self) -> None:  # noqa: B027  # most have nothing to open, or to close
        """Opens the objects that the calls share."""

    async def close(self) -> None:  # noqa: B027
        """Closes the objects that the calls share."""

    async def run(self) -> None:
        """Until ``stop``. Call ``close`` after its entries were checked: until then it moves delayed messages."""
        self.open()
        await asyncio.gather(*(self._go_on() for _ in range(self.tasks)))

    async def _go_on(self) -> None:
        while not self._stop:
            await self.write_some()
            await asyncio.sleep(PAUSE_S)

    async def write_some(self) -> bool:
        """Writes the next tokens; whether that was confirmed."""
        tokens = [f"{self.stream}:{next(self._numbers)}" for _ in range(self.batch)]
        self.ledger.sending(*tokens)
        while True:
            try:
                await self.write(tokens)
            except MillstreamError as error:
                self.errors[type(error).__name__] += 1
                # Stored, but not on enough replicas yet: the repeated call stores nothing and waits for the replicas.
                if not error.retryable and not (self.repeats and isinstance(error, DurabilityUnavailable)):
                    self.refused.append(error)
                    return False
                self.passing.append(error)
                if not self.repeats or self._stop:
                    return False
                await asyncio.sleep(PAUSE_S)
            except Exception as error:
                self.foreign.append(error)
                if not self.repeats or self._stop:
                    return False
                await asyncio.sleep(PAUSE_S)
            else:
                self.ledger.confirmed(*tokens)
                return True

    def stop(self) -> None:
        self._stop = True

    async def stored(self, broker: Broker) -> list[str]:
        """The tokens that its stream holds, read over a connection without faults."""
        return [entry.fields[FIELD].decode() for entry in await broker.xrange(self.stream)]

    @property
    def answered(self) -> int:
        """Tokens that were confirmed."""
        return self.ledger.balance(()).confirmed

    async def balance(self, broker: Broker) -> Balance:
        return self.ledger.balance(await self.stored(broker))


def rows(tokens: list[str]) -> list[dict[str, str]]:
    return [{"token": token} for token in tokens]


class PublisherWriter(Writer):
    """Several tasks share one publisher, so that the next batch fills while one is in flight."""

    kind = "publisher"
    tasks = 16
    batch = 20

    def __init__(self, broker: Broker, **options: Any) -> None:
        super().__init__(broker, **options)
        self.ids: dict[str, object] = {}

    def open(self) -> None:
        self.publisher = Publisher(self.broker, durability=self.durability, retry_ms=60_000)

    async def close(self) -> None:
        await self.publisher.close()

    async def write(self, tokens: list[str]) -> None:
        ids = await self.publisher.publish(self.stream, *(Message(token.encode()) for token in tokens))
        assert len(ids) == len(tokens)
        known = [entry_id for entry_id in ids if entry_id is not None]
        assert known == sorted(set(known)), f"ids that cannot be of these messages: {ids}"
        self.ids.update(zip(tokens, ids, strict=True))

    async def stored(self, broker: Broker) -> list[str]:
        entries = await broker.xrange(self.stream)
        tokens = published([entry.fields for entry in entries])
        for token, entry in zip(tokens, entries, strict=True):
            confirmed = self.ids.get(token)
            assert confirmed in (None, entry.id), f"{token} was confirmed as {confirmed}, and is {entry.id}"
        return tokens


class UniqueWriter(PublisherWriter):
    """Publishes with an idempotency key: any number of tries, one entry."""

    kind = "idempotency"
    batch = 5
    repeats = True
    tasks = 2

    async def write(self, tokens: list[str]) -> None:
        messages = [Message(token.encode()) for token in tokens]
        await self.publisher.publish(self.stream, *messages, idempotency_key=tokens[0])


class LaterWriter(PublisherWriter):
    """Publishes with a delay: each confirmed message is stored later."""

    kind = "delays"
    batch = 5
    tasks = 2

    async def write(self, tokens: list[str]) -> None:
        await self.publisher.publish(self.stream, *(Message(token.encode()) for token in tokens), delay_ms=20)


class OnceWriter(Writer):
    """``once_writer``: it keeps its position; the same rows are given again after an error."""

    kind = "once_writer"
    repeats = True

    def open(self) -> None:
        self.once = self.broker.once_writer(self.stream, "w", 1, durability=self.durability)

    async def write(self, tokens: list[str]) -> None:
        appended = await self.once.append(rows(tokens))
        assert len(appended.ids) == appended.added + appended.skipped == len(tokens)


class AppendOnceWriter(Writer):
    """``append_once`` with a position that its caller keeps."""

    kind = "append_once"
    repeats = True

    def __init__(self, broker: Broker, **options: Any) -> None:
        super().__init__(broker, **options)
        self.position = 0

    async def write(self, tokens: list[str]) -> None:
        await self.broker.append_once(self.stream, "w", 1, self.position, rows(tokens), durability=self.durability)
        self.position += len(tokens)


class XaddWriter(Writer):
    """One XADD at a time, never repeated: each confirmed entry is stored once."""

    kind = "xadd"
    batch = 1

    async def write(self, tokens: list[str]) -> None:
        await self.broker.xadd(self.stream, {"token": tokens[0]})


class TransactionWriter(Writer):
    """``xadd_many`` in one transaction: all or nothing."""

    kind = "transaction"

    async def write(self, tokens: list[str]) -> None:
        ids = await self.broker.xadd_many(self.stream, rows(tokens), atomic=True)
        assert None not in ids


class BatchWriter(Writer):
    """``xadd_many`` as a pipeline: in order, not atomic."""

    kind = "batch"

    async def write(self, tokens: list[str]) -> None:
        ids = await self.broker.xadd_many(self.stream, rows(tokens))
        assert None not in ids


class BlockingOnceWriter(Writer):
    """The same as ``once_writer`` over the blocking transport, which Spark's tasks use."""

    kind = "blocking_once"
    repeats = True

    def __init__(self, broker: Broker, *, blocking: BlockingBroker, **options: Any) -> None:
        super().__init__(broker, **options)
        self.blocking = blocking
        self.once = blocking.once_writer(self.stream, "w", 1, durability=self.durability)

    async def write(self, tokens: list[str]) -> None:
        await asyncio.to_thread(self.once.append, rows(tokens))


class SparkSinkWriter(BlockingOnceWriter):
    """What a task of Spark's sink does with the rows of a batch: fenced native appends in one transaction."""

    kind = "spark sink"

    def __init__(self, broker: Broker, *, blocking: BlockingBroker, **options: Any) -> None:
        super().__init__(broker, blocking=blocking, **options)
        self._bulk = BulkOnce(self.stream, "w", 1, digest=Digest())

    async def write(self, tokens: list[str]) -> None:
        columns = [pa.array([token.encode() for token in tokens], pa.binary())]
        new, known = await asyncio.to_thread(
            self.blocking.run, self._bulk.append_uniform, UniformRows([FIELD], columns)
        )
        assert new + known == len(tokens)


ASYNC_WRITERS: tuple[Callable[..., Writer], ...] = (
    PublisherWriter,
    UniqueWriter,
    LaterWriter,
    OnceWriter,
    AppendOnceWriter,
    XaddWriter,
    TransactionWriter,
    BatchWriter,
)
