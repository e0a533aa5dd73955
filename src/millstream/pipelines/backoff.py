"""How long to wait between tries: pure, so that the loop that waits has nothing to decide."""

from __future__ import annotations

import random
import re

from millstream.errors import MillstreamError
from millstream.pipelines.spec.pipeline import RetrySettings

# Trying again cannot mend these: somebody must change a password, a spec or a stream. They are found by name, because
# an error that was raised in one of Spark's tasks arrives here as text.
FATAL = (
    "AuthenticationFailed",
    "PermissionDenied",
    "WrongKeyType",
    "NonDeterministicReplay",
    "StaleWriter",
    "InvalidOption",
    "InvalidArgument",
    "PayloadTooLarge",
    "UnusableRow",
    "NoWriteIdentity",
    "AnalysisException",
    "DATA_SOURCE_NOT_FOUND",
    "ProcessorFailed",
)
# Spark wraps what its writer meets in errors of its own: where one of these is inside, waiting may help after all.
PASSING = ("BrokerUnavailable", "OutOfMemory", "ServerLoading", "ReadOnlyReplica", "DeadLettersFull")
_PASSING = re.compile(rf"\b({'|'.join(PASSING)})\b")
_FATAL = re.compile(rf"\b({'|'.join(FATAL)})\b")
# Spark's conditions by their SQLSTATE: data that an expression cannot take (21, 22), a query that is wrong (42), or
# raise_error and assert_true (P0). The same rows through the same query fail again.
CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\] .*?SQLSTATE: (?:21|22|42|P0)\w{3}")


def delay_ms(settings: RetrySettings, attempt: int, chance: float | None = None) -> int:
    """The wait after the given attempt (the first is 1). ``chance`` in [0, 1) replaces the dice, for tests."""
    plain = min(float(settings.max), settings.initial * settings.multiplier ** min(attempt - 1, 64))
    spread = 2 * (random.random() if chance is None else chance) - 1  # noqa: S311  # jitter, not a secret
    return int(plain * (1 + settings.jitter * spread))


def is_fatal(error: BaseException) -> bool:
    if isinstance(error, MillstreamError):
        return type(error).__name__ in FATAL
    text = f"{type(error).__name__} {error}"
    if _PASSING.search(text) is not None:
        return False
    return _FATAL.search(text) is not None or CONDITION.search(text) is not None


def short(error: BaseException, limit: int = 300) -> str:
    """One line for people: the last line of a Python traceback inside Spark's text, where there is one."""
    text = str(error)
    found = re.findall(
        r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Failed|Denied|Unavailable|OutOfMemory|\w*Replica|Writer)?: .+)$",
        text,
        re.M,
    )
    own = [line for line in found if "Py4J" not in line and not line.startswith("org.")]
    line = own[-1] if own and "Traceback" in text else (text.strip().splitlines() or [type(error).__name__])[0]
    return line[:limit]
