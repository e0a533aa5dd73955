"""Publishes messages, runs handlers on them, and stores outputs and dead letters.

Uses streams only through the operations of the broker; this package contains no Redis command.
"""

from millstream.messaging.changes import ChangeEvent, ChangeSource
from millstream.messaging.codecs import Codec
from millstream.messaging.consumer import Subscriber
from millstream.messaging.dead_letters import DeadLetter, DeadLetters
from millstream.messaging.dependencies import Depends
from millstream.messaging.errors import (
    AlreadySettled,
    AlreadySubscribed,
    CannotUnmarshal,
    DeliveriesExhausted,
    Rejected,
    RetryLater,
)
from millstream.messaging.handler import Handler, HandlerRefused, Middleware, Output
from millstream.messaging.marshaler import Marshaler, PydanticMarshaler
from millstream.messaging.message import Message
from millstream.messaging.middleware import (
    circuit_breaker,
    correlation,
    deduplicate,
    duplicate,
    fail_randomly,
    poison_queue,
    recoverer,
    retry,
    throttle,
    timeout,
)
from millstream.messaging.outcome import Ack, AckPolicy, DeadLetterOutcome, Outcome, Retry
from millstream.messaging.partitions import PartitionedTopic, partition_of, partition_streams
from millstream.messaging.publisher import Publisher
from millstream.messaging.retention import Janitor, RetentionPolicy
from millstream.messaging.router import AlreadyRunning, Router
from millstream.messaging.supervision import run_until_signalled
from millstream.model import Backoff

__all__ = [
    "Ack",
    "AckPolicy",
    "AlreadyRunning",
    "AlreadySettled",
    "AlreadySubscribed",
    "Backoff",
    "CannotUnmarshal",
    "ChangeEvent",
    "ChangeSource",
    "Codec",
    "DeadLetter",
    "DeadLetterOutcome",
    "DeadLetters",
    "DeliveriesExhausted",
    "Depends",
    "Handler",
    "HandlerRefused",
    "Janitor",
    "Marshaler",
    "Message",
    "Middleware",
    "Outcome",
    "Output",
    "PartitionedTopic",
    "Publisher",
    "PydanticMarshaler",
    "Rejected",
    "RetentionPolicy",
    "Retry",
    "RetryLater",
    "Router",
    "Subscriber",
    "circuit_breaker",
    "correlation",
    "deduplicate",
    "duplicate",
    "fail_randomly",
    "partition_of",
    "partition_streams",
    "poison_queue",
    "recoverer",
    "retry",
    "run_until_signalled",
    "throttle",
    "timeout",
]
