"""Messages that get handled. In: payloads with metadata. Out: handlers that ran, outputs, dead letters.

Speaks to streams through the broker's operations alone; a Redis command never appears here.
"""

from millstream.messaging.burial import Burial, read_burial
from millstream.messaging.codec import Codec
from millstream.messaging.errors import (
    AlreadySettled,
    AlreadySubscribed,
    DeliveriesExhausted,
    HandlerCancelled,
    NothingToSettle,
    PublisherClosed,
    Rejected,
    RetryLater,
    Undecodable,
)
from millstream.messaging.message import Handler, Message, Middleware
from millstream.messaging.outcome import Ack, AckPolicy, Bury, Outcome, Retry
from millstream.messaging.publisher import Publisher
from millstream.messaging.settings import Backoff, SubscriberSettings
from millstream.messaging.signals import run_until_signalled
from millstream.messaging.subscriber import Subscriber

__all__ = [
    "Ack",
    "AckPolicy",
    "AlreadySettled",
    "AlreadySubscribed",
    "Backoff",
    "Burial",
    "Bury",
    "Codec",
    "DeliveriesExhausted",
    "Handler",
    "HandlerCancelled",
    "Message",
    "Middleware",
    "NothingToSettle",
    "Outcome",
    "Publisher",
    "PublisherClosed",
    "Rejected",
    "Retry",
    "RetryLater",
    "Subscriber",
    "SubscriberSettings",
    "Undecodable",
    "read_burial",
    "run_until_signalled",
]
