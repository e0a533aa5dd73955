"""Streams behind one contract, wherever they live: the operations, the links, and ``open_broker(url)``.

In: calls with plain Python values. Out: the values of ``model/``, or typed errors.
Never a second implementation of a command: both APIs and all links run the same conversations.
"""

from millstream.broker.broker import BlockingBroker, Broker
from millstream.broker.keys import beside
from millstream.broker.limits import Limits
from millstream.broker.open import open_blocking_broker, open_broker
from millstream.broker.steps.once import Appended, BlockingOnceWriter, Digest, OnceWriter, RowsMissing

__all__ = [
    "Appended",
    "BlockingBroker",
    "BlockingOnceWriter",
    "Broker",
    "Digest",
    "Limits",
    "OnceWriter",
    "RowsMissing",
    "beside",
    "open_blocking_broker",
    "open_broker",
]
