"""What an error says, wherever it was raised: whose fault it is, whether waiting can help, one line for people.

Spark runs processors and sinks as one job, so a processor's error comes out of a sink's attempt. Pure: what is known
arrives as text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from millstream.errors import MillstreamError
from millstream.pipelines.plan import Placed
from millstream.pipelines.processors import Sql
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


_FROM_A_TASK = re.compile(r"ProcessorFailed: processor (.+?) failed: (.*?)(?:\. The batch is not committed|$)", re.M)
_SQL_CONTEXT = re.compile(r"^== SQL[^\n]*==\n(.+?)(?:^\s*\^|\Z)", re.M | re.S)


class ErrorOrigin(NamedTuple):
    processor: str
    why: str


def origin_of(error: BaseException, placed: Sequence[Placed], *, sink_involved: bool) -> ErrorOrigin | None:
    """The processor that failed for good, and why; None where it was none of them, or is not certain.

    A sink has expressions of its own. Where none was involved, an error in data is some processor's, even where the
    text does not say whose.
    """
    text = str(error)
    told = _FROM_A_TASK.search(text)
    if told is not None:
        return ErrorOrigin(told[1], told[2].strip())
    condition = CONDITION.search(text)
    if condition is None:
        return None
    guilty = [each for each in placed if isinstance(each.processor, Sql) and _quotes(text, each.processor.query)]
    if not guilty and sink_involved:
        return None
    names = [called(each) for each in guilty or placed]
    if not names:
        return None
    return ErrorOrigin(names[0] if len(names) == 1 else f"(one of {', '.join(names)})", condition[0])


def called(placed: Placed) -> str:
    return f"{placed.name!r} ({placed.processor.kind_name})"


def cause(error: BaseException) -> str:
    condition = CONDITION.search(str(error))
    return short(error) if condition is None else condition[0]


def _quotes(text: str, query: str) -> bool:
    """Whether the piece of SQL that Spark shows with its error stands in this query."""
    lines = [line.strip() for found in _SQL_CONTEXT.findall(text) for line in found.splitlines()]
    return any(line and line in query for line in lines)
