"""The broker behind ``--url``, for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.broker.broker import BlockingBroker
from millstream.broker.open import open_blocking_broker

DEADLINE_MS = 3_000
"""People wait for an answer: a server that is away is said to be away soon."""


@contextmanager
def opened(url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(url, deadline_ms=DEADLINE_MS) as broker:
        yield broker
