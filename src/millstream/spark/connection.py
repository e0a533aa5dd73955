"""One broker for each address and process: Python workers live on between tasks, and so do their connections."""

from __future__ import annotations

import os
from dataclasses import replace

from millstream.broker.broker import BlockingBroker
from millstream.broker.limits import DEFAULT_LIMITS
from millstream.broker.open import open_blocking_broker
from millstream.spark.address import Address

_open: dict[tuple[int, str, int, int], BlockingBroker] = {}


def broker_at(address: Address, *, script_entries: int = DEFAULT_LIMITS.script_entries) -> BlockingBroker:
    """The process's broker for this address. Secrets are looked up each time, so that a changed password is seen."""
    key = (os.getpid(), address.resolve(), address.deadline_ms, script_entries)
    broker = _open.get(key)
    if broker is None:
        broker = _open[key] = open_blocking_broker(
            key[1], deadline_ms=address.deadline_ms, limits=replace(DEFAULT_LIMITS, script_entries=script_entries)
        )
    return broker
