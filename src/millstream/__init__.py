"""millstream: reliable event streams on Redis, from an embedded broker in one process to a Spark cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from millstream.broker import BlockingBroker as BlockingBroker
    from millstream.broker import Broker as Broker
    from millstream.broker import BrokerProtocol as BrokerProtocol
    from millstream.broker import Limits as Limits
    from millstream.broker import open_blocking_broker as open_blocking_broker
    from millstream.broker import open_broker as open_broker
    from millstream.errors import MillstreamError as MillstreamError
    from millstream.messaging import Message as Message
    from millstream.messaging import Publisher as Publisher
    from millstream.messaging import Router as Router
    from millstream.messaging import Subscriber as Subscriber
    from millstream.model import Delivery as Delivery
    from millstream.model import Entry as Entry
    from millstream.model import EntryId as EntryId
    from millstream.model import TrimPolicy as TrimPolicy
    from millstream.model import replicated as replicated

_HOMES = {
    "BlockingBroker": "broker",
    "Broker": "broker",
    "BrokerProtocol": "broker",
    "Delivery": "model",
    "Entry": "model",
    "EntryId": "model",
    "Limits": "broker",
    "Message": "messaging",
    "MillstreamError": "errors",
    "Publisher": "messaging",
    "Router": "messaging",
    "Subscriber": "messaging",
    "TrimPolicy": "model",
    "open_blocking_broker": "broker",
    "open_broker": "broker",
    "replicated": "model",
}
"""Public names and the rooms they live in; a room is entered when one of its names is first asked for."""

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    value = getattr(import_module(f"millstream.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
