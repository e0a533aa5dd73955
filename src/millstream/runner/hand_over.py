"""Pending messages of a worker that died are handed over at once, instead of after ``claim_min_idle_ms``.

A worker reports the consumer names that it generated before it reads under them. The supervisor releases their pending
entries after it has seen the process end: the next sweep of any other consumer claims them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from millstream.broker import command_pipeline, open_broker
from millstream.broker.scripts import recovery
from millstream.errors import MillstreamError, NoSuchGroup, NoSuchStream
from millstream.messaging.settings import is_default_consumer

MAX_REPORTED_CONSUMERS: Final = 10_000
"""Per worker. Messages of further topics wait for ``claim_min_idle_ms``."""
TOPICS_PER_ROUND_TRIP: Final = 100
DEADLINE_MS: Final = 5_000
"""The time limit for the broker's replies: a supervisor that ends must not wait long for an unreachable broker."""


class WorkerConsumer(NamedTuple):
    """A consumer name in one topic, which only one process has ever used."""

    topic: str
    group: str
    consumer: str


class ConsumerReports:
    """Observer of a worker's broker: reports each consumer once, when it has joined its group and before it reads.

    A ``consumer=`` that the user chose is not reported: a living process may use the same name.
    """

    def __init__(self, report: Callable[[WorkerConsumer], None]) -> None:
        self._report = report
        self._reported: set[WorkerConsumer] = set()

    def __call__(self, name: str, /, **values: Any) -> None:
        if name != "messaging.subscribed" or not is_default_consumer(values["consumer"]):
            return
        consumer = WorkerConsumer(values["topic"], values["group"], values["consumer"])
        if consumer not in self._reported and len(self._reported) < MAX_REPORTED_CONSUMERS:
            self._reported.add(consumer)
            self._report(consumer)


async def release_pending(url: str, consumers: Sequence[WorkerConsumer]) -> int:
    """Makes all pending entries of these consumers claimable at once; returns how many there were.

    Call it after their process has ended. It opens a new connection, so the broker has executed all commands of the
    dead process before. If a topic fails, the other topics are still released; the first error is raised at the end.
    """
    released = 0
    errors: list[MillstreamError] = []
    async with open_broker(url, deadline_ms=DEADLINE_MS) as broker:
        for first in range(0, len(consumers), TOPICS_PER_ROUND_TRIP):
            page = consumers[first : first + TOPICS_PER_ROUND_TRIP]
            operations = [recovery.release(broker.context, *consumer) for consumer in page]
            for result in await broker.run(command_pipeline, operations):
                if isinstance(result, int):
                    released += result
                elif not isinstance(result, NoSuchStream | NoSuchGroup):
                    errors.append(result)
    if errors:
        raise errors[0]
    return released
