"""Messages that get handled. In: payloads with metadata. Out: handlers that ran, outputs, dead letters.

Speaks to streams through the broker's operations alone; a Redis command never appears here.
"""

from millstream.messaging.burial import Burial, read_burial
from millstream.messaging.codecs import Codec, codec, codec_names
from millstream.messaging.dead_letters import DeadLetter, DeadLetters, Selection
from millstream.messaging.errors import (
    AlreadySettled,
    AlreadySubscribed,
    DeliveriesExhausted,
    HandlerCancelled,
    HandlerCrashed,
    NothingToSettle,
    PublisherClosed,
    Rejected,
    RetryLater,
    TooLateToSettle,
    Undecodable,
)
from millstream.messaging.handler import Handler, HandlerRefused, Middleware
from millstream.messaging.message import Message
from millstream.messaging.middleware import (
    circuit_breaker,
    correlated,
    correlation,
    deduplicate,
    duplicate,
    fail_randomly,
    metrics,
    poison_queue,
    recoverer,
    retry,
    throttle,
    timeout,
)
from millstream.messaging.outcome import Ack, AckPolicy, Bury, Outcome, Retry
from millstream.messaging.publisher import Publisher
from millstream.messaging.retention import Janitor, RetentionPolicy
from millstream.messaging.route import DuplicateRoute
from millstream.messaging.router import AlreadyRunning, Router
from millstream.messaging.settings import SubscriberSettings
from millstream.messaging.signals import run_until_signalled
from millstream.messaging.subscriber import Subscriber
from millstream.model import Backoff

__all__ = [
    "Ack",
    "AckPolicy",
    "AlreadyRunning",
    "AlreadySettled",
    "AlreadySubscribed",
    "Backoff",
    "Burial",
    "Bury",
    "Codec",
    "DeadLetter",
    "DeadLetters",
    "DeliveriesExhausted",
    "DuplicateRoute",
    "Handler",
    "HandlerCancelled",
    "HandlerCrashed",
    "HandlerRefused",
    "Janitor",
    "Message",
    "Middleware",
    "NothingToSettle",
    "Outcome",
    "Publisher",
    "PublisherClosed",
    "Rejected",
    "RetentionPolicy",
    "Retry",
    "RetryLater",
    "Router",
    "Selection",
    "Subscriber",
    "SubscriberSettings",
    "TooLateToSettle",
    "Undecodable",
    "circuit_breaker",
    "codec",
    "codec_names",
    "correlated",
    "correlation",
    "deduplicate",
    "duplicate",
    "fail_randomly",
    "metrics",
    "poison_queue",
    "read_burial",
    "recoverer",
    "retry",
    "run_until_signalled",
    "throttle",
    "timeout",
]
