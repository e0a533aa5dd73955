"""One broker for each address and process: Python workers live on between tasks, and so do their connections."""

from __future__ import annotations

import os
from dataclasses import replace

from millstream.broker.broker import BlockingBroker
from millstream.broker.limits import DEFAULT_LIMITS, Limits
from millstream.broker.links.addresses import redacted
from millstream.broker.open import open_blocking_broker
from millstream.errors import AuthenticationFailed, BrokerUnavailable
from millstream.spark.address import Address

_open: dict[tuple[int, str, int, Limits], BlockingBroker] = {}
_reached: set[BlockingBroker] = set()


def broker_at(address: Address, *, script_entries: int = DEFAULT_LIMITS.script_entries) -> BlockingBroker:
    """The process's broker for this address. Secrets are looked up each time, so that a changed password is seen."""
    limits = replace(
        DEFAULT_LIMITS, script_entries=script_entries, connect_ms=address.connect_ms, answer_ms=address.answer_ms
    )
    key = (os.getpid(), address.resolve(), address.deadline_ms, limits)
    broker = _open.get(key)
    if broker is None:
        # Only the sink's own options shorten a stream.
        broker = _open[key] = open_blocking_broker(
            key[1], deadline_ms=address.deadline_ms, limits=limits, max_stream_len=None
        )
    return broker


def reached_broker(address: Address) -> BlockingBroker:
    """``broker_at`` for the driver's first contact: an error comes before any data moves, and names the option.

    Once for each address and process: who was reached once is not asked again.
    """
    broker = broker_at(address)
    if broker in _reached:
        return broker
    try:
        broker.ping()
    except BrokerUnavailable as error:
        raise BrokerUnavailable(f"option url: {redacted(address.url)} does not answer. {error}") from error
    except AuthenticationFailed as error:
        names = "url, username, passwordFile or passwordEnv"
        raise AuthenticationFailed(f"options {names}: {redacted(address.url)} refused the login. {error}") from error
    _reached.add(broker)
    return broker
