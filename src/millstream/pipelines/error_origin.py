"""What an error says, wherever it was raised: whose fault it is, whether waiting can help, one line for people.

Spark runs processors and sinks as one job, so a processor's error comes out of a sink's attempt. Pure: what is known
arrives as text."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import NamedTuple

from millstream.errors import MillstreamError
from millstream.pipelines.plan import Placed

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
    "DataLost",
    "SpoolDamaged",
    "InvalidChangeOption",
    "SourceRefused",
    "PositionLost",
    "SnapshotLost",
    "UnreadableMessage",
)
# Spark wraps what its writer meets in errors of its own: where one of these is inside, waiting may help after all.
PASSING = (
    "BrokerUnavailable",
    "OutOfMemory",
    "ServerLoading",
    "ReadOnlyReplica",
    "DeadLettersFull",
    "SourceUnreachable",
    # Spark gives a Python worker ten seconds to start, which a busy machine does not always keep.
    "Python worker failed to connect back",
)
_PASSING = re.compile(rf"\b({'|'.join(PASSING)})\b")
_READING = re.compile(r"\bDataLost\b|millstream/(?:spark/(?:reader|pages)|cdc/[\w/]+)\.py")
_FATAL = re.compile(rf"\b({'|'.join(FATAL)})\b")
# Spark's conditions by their SQLSTATE: data that an expression cannot take (21, 22), a query that is wrong (42), or
# raise_error and assert_true (P0). The same rows through the same query fail again.
CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\] .*?SQLSTATE: (?:21|22|42|P0)\w{3}")


def is_fatal(error: BaseException) -> bool:
    if isinstance(error, MillstreamError):
        return type(error).__name__ in FATAL
    text = f"{type(error).__name__} {error}"
    if _PASSING.search(text) is not None:
        return False
    return _FATAL.search(text) is not None or CONDITION.search(text) is not None


def may_pass(error: BaseException) -> bool:
    """Whether the error names something that passes by itself: a server that is away, loading, full."""
    return not is_fatal(error) and _PASSING.search(f"{type(error).__name__} {error}") is not None


def is_source_fault(error: BaseException) -> bool:
    """Whether an attempt of a sink failed because its rows could not be read. Tasks tell where by their traceback."""
    return _READING.search(f"{type(error).__name__} {error}") is not None


def is_disk_full(error: BaseException) -> bool:
    """Of this process, or of one of Spark's tasks, whose error arrives as text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in ("No space left on device", "Disk quota exceeded"))


def short(error: BaseException, limit: int = 300) -> str:
    """One line for people: the last line of a Python traceback inside Spark's text, where there is one."""
    text = str(error).partition("=== Streaming Query ===")[0]  # what follows is Spark's own account of the query
    found = re.findall(
        r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Failed|Denied|Unavailable|OutOfMemory|\w*Replica|Writer)?: .+)$",
        text,
        re.M,
    )
    own = [line for line in found if "Py4J" not in line and not line.startswith("org.")]
    line = own[-1] if own and "Traceback" in text else (text.strip().splitlines() or [type(error).__name__])[0]
    return line[:limit]


# Of a condition, what quotes no value of the row.
_NAME = re.compile(r"(\[[A-Z0-9_.]+\]).*(SQLSTATE: \w+)", re.S)
_FROM_A_TASK = re.compile(r"ProcessorFailed: processor (.+?) failed: (.*?)(?:\. The batch is not committed|$)", re.M)


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
    guilty = [each for each in placed if each.processor.quoted_in(text)]
    if not guilty and sink_involved:
        return None
    names = [called(each) for each in guilty or placed]
    if not names:
        return None
    masked = any(each.processor.hides() is not None for each in placed)
    why = _NAME.sub(r"\1 \2", condition[0]) if masked else condition[0]
    return ErrorOrigin(names[0] if len(names) == 1 else f"(one of {', '.join(names)})", why)


def called(placed: Placed) -> str:
    return f"{placed.name!r} ({placed.processor.kind_name})"


def cause(error: BaseException) -> str:
    condition = CONDITION.search(str(error))
    return short(error) if condition is None else condition[0]
