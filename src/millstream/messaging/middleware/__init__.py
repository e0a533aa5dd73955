"""Middleware: functions from handler to handler, one per file. Options are checked when the middleware is created.

The first middleware is the outermost. A recommended order: recoverer, metrics, correlation, poison_queue, deduplicate,
circuit_breaker, retry, throttle, timeout.
"""

from millstream.messaging.middleware.circuit_breaker import Circuit, circuit_breaker
from millstream.messaging.middleware.correlation import correlated, correlation
from millstream.messaging.middleware.deduplicate import deduplicate
from millstream.messaging.middleware.faults import duplicate, fail_randomly
from millstream.messaging.middleware.metrics import metrics
from millstream.messaging.middleware.poison_queue import poison_queue
from millstream.messaging.middleware.recoverer import recoverer
from millstream.messaging.middleware.retry import retry
from millstream.messaging.middleware.throttle import RateLimit, throttle
from millstream.messaging.middleware.timeout import timeout

__all__ = [
    "Circuit",
    "RateLimit",
    "circuit_breaker",
    "correlated",
    "correlation",
    "deduplicate",
    "duplicate",
    "fail_randomly",
    "metrics",
    "poison_queue",
    "recoverer",
    "retry",
    "throttle",
    "timeout",
]
