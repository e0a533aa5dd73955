"""Moves delayed messages into their streams when they are due. Every running publisher and subscriber does it."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from millstream.broker.scripts import delayed
from millstream.errors import BrokerClosed, MillstreamError
from millstream.messaging.failure import text_of
from millstream.model import Backoff, monotonic_ms

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

log = logging.getLogger(__name__)

RETRY_BACKOFF = Backoff(initial_ms=500, max_ms=5_000)


class DelayedPublisher:
    """One task for all topics with messages that this process has delayed. It sleeps until the next one is due."""

    def __init__(self, broker: BrokerProtocol) -> None:
        self._broker = broker
        self._due_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        """Consecutive failures, by topic."""
        self._nudge = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def due_in(self, topic: str, delay_ms: float) -> None:
        at = monotonic_ms() + delay_ms
        if at < self._due_at.get(topic, float("inf")):
            self._due_at[topic] = at
            self._nudge.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="millstream delayed publisher")

    async def close(self) -> None:
        """Messages that are not due yet stay in their companion key; other processes publish them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._due_at:
            topic = min(self._due_at, key=lambda topic: self._due_at[topic])
            wait_ms = self._due_at[topic] - monotonic_ms()
            if wait_ms > 0:
                self._nudge.clear()
                try:
                    async with asyncio.timeout(wait_ms / 1000):
                        await self._nudge.wait()
                except TimeoutError:
                    pass
                continue
            del self._due_at[topic]
            try:
                _, next_ms = await self._broker.run(delayed.publish_due, topic)
                self._failures.pop(topic, None)
            except BrokerClosed:
                return
            except MillstreamError as error:
                log.warning("publishing delayed messages to %s: %s", topic, error)
                next_ms = self._failed(topic)
            except Exception as error:  # after any error: due messages must not wait until another message is delayed
                log.exception("publishing delayed messages to %s failed", topic)
                self._broker.context.observer(
                    "messaging.part_restarted",
                    part="delayed publisher",
                    error=text_of(error),
                    error_type=type(error).__name__,
                )
                next_ms = self._failed(topic)
            if next_ms is not None:
                self.due_in(topic, next_ms)

    def _failed(self, topic: str) -> int:
        """The time until the next attempt, in milliseconds."""
        self._failures[topic] = self._failures.get(topic, 0) + 1
        return RETRY_BACKOFF.delay_ms(self._failures[topic], random.random())  # noqa: S311 (jitter, not a secret)
