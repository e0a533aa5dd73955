"""Messages that get handled. In: payloads with metadata. Out: handlers that ran, outputs, dead letters.

Speaks to streams through the broker's operations alone; a Redis command never appears here.
"""

from millstream.messaging.calls import call
from millstream.messaging.codecs import Codec, codec, codec_names
from millstream.messaging.dead_letters import (
    DeadLetter,
    DeadLetters,
    FailureGroup,
    NoSuchDeadLetter,
    Replayed,
    Selection,
    dead_letter_streams,
)
from millstream.messaging.dependencies import Depends, Plan, plan_handler
from millstream.messaging.errors import (
    AlreadySettled,
    AlreadySubscribed,
    CannotUnmarshal,
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
from millstream.messaging.failure import Burial, place_of, read_burial, text_of, traceback_of, type_of
from millstream.messaging.handler import (
    Handler,
    HandlerRefused,
    Middleware,
    Output,
    callable_name,
    callable_place,
)
from millstream.messaging.marshaler import BODY_NAME, Marshaler, PydanticMarshaler
from millstream.messaging.message import KEY, Message
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
from millstream.messaging.partitions import (
    OutputTopic,
    PartitionedTopic,
    check_partitions,
    partition_of,
    partition_streams,
)
from millstream.messaging.publisher import Publisher
from millstream.messaging.retention import Janitor, RetentionPolicy, StreamReport
from millstream.messaging.route import DuplicateRoute, Route, make_subscriber, refuse_shared_groups
from millstream.messaging.router import AlreadyRunning, Router
from millstream.messaging.settings import HandlerOptions, SubscriberOptions, SubscriberSettings, check_topic
from millstream.messaging.subscriber import Subscriber
from millstream.messaging.supervision import keep_running, run_until_signalled
from millstream.model import Backoff

__all__ = [
    "BODY_NAME",
    "KEY",
    "Ack",
    "AckPolicy",
    "AlreadyRunning",
    "AlreadySettled",
    "AlreadySubscribed",
    "Backoff",
    "Burial",
    "Bury",
    "CannotUnmarshal",
    "Codec",
    "DeadLetter",
    "DeadLetters",
    "DeliveriesExhausted",
    "Depends",
    "DuplicateRoute",
    "FailureGroup",
    "Handler",
    "HandlerCancelled",
    "HandlerCrashed",
    "HandlerOptions",
    "HandlerRefused",
    "Janitor",
    "Marshaler",
    "Message",
    "Middleware",
    "NoSuchDeadLetter",
    "NothingToSettle",
    "Outcome",
    "Output",
    "OutputTopic",
    "PartitionedTopic",
    "Plan",
    "Publisher",
    "PublisherClosed",
    "PydanticMarshaler",
    "Rejected",
    "Replayed",
    "RetentionPolicy",
    "Retry",
    "RetryLater",
    "Route",
    "Router",
    "Selection",
    "StreamReport",
    "Subscriber",
    "SubscriberOptions",
    "SubscriberSettings",
    "TooLateToSettle",
    "Undecodable",
    "call",
    "callable_name",
    "callable_place",
    "check_partitions",
    "check_topic",
    "circuit_breaker",
    "codec",
    "codec_names",
    "correlated",
    "correlation",
    "dead_letter_streams",
    "deduplicate",
    "duplicate",
    "fail_randomly",
    "keep_running",
    "make_subscriber",
    "metrics",
    "partition_of",
    "partition_streams",
    "place_of",
    "plan_handler",
    "poison_queue",
    "read_burial",
    "recoverer",
    "refuse_shared_groups",
    "retry",
    "run_until_signalled",
    "text_of",
    "throttle",
    "timeout",
    "traceback_of",
    "type_of",
]
