"""Errors of pipelines, and the classification of any error: source, processor or sink; transient or permanent; a
one-line summary. An event that cannot be processed becomes a dead letter, not one of these errors.

Spark runs processors and sinks as one job, so a processor's error appears as text in the error of a sink's attempt.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from millstream.errors import MillstreamError
from millstream.storage import StorageFull

if TYPE_CHECKING:
    from millstream.pipelines.plan import Placed


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a spec: its place in the file, and what is allowed there."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class SpecRefused(MillstreamError):
    """A spec has problems; ``problems`` has all of them. Nothing was started."""

    problems: tuple[Problem, ...]

    def __init__(self, problems: Sequence[Problem]) -> None:
        ordered = tuple(sorted(problems, key=lambda p: (p.file, p.line)))
        heading = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
        lines = "\n".join(f"  {problem}" for problem in ordered)
        super().__init__(f"{heading} in the spec; nothing was started. Correct and run it again:\n{lines}")
        self.problems = ordered


class AccessRefused(SpecRefused):
    """Servers refused the user or the password of the spec; there are no other problems. Nothing was started."""


class SparkNotStarted(MillstreamError):
    """Spark, or its JVM, ended before it could run a query. Nothing was read or written."""

    def __init__(self, why: str, log: str | None = None) -> None:
        where = f" Its output is in {log}." if log else ""
        super().__init__(
            f"Spark did not start: {why.rstrip(' .')}.{where} Check --master, spark.master and spark.conf in the "
            "file, and Java on this machine, and run it again.",
            log=log,
        )


class CheckpointRefused(MillstreamError):
    """The checkpoint belongs to another pipeline, or the changed spec does not fit it; see ``reasons``."""

    reasons: tuple[str, ...]

    def __init__(self, path: str, reasons: Sequence[str]) -> None:
        lines = "\n".join(f"  {reason}" for reason in reasons)
        super().__init__(
            f"the checkpoint at {path} does not fit this spec:\n{lines}", path=path, reasons=tuple(reasons)
        )


class NoSuchCheckpoint(MillstreamError):
    """The pipeline has not been started yet, or its checkpoint was removed before."""

    def __init__(self, pipeline: str, path: str) -> None:
        super().__init__(f"pipeline {pipeline!r} has no checkpoint at {path}: nothing was removed.", path=path)


class PipelineRuns(MillstreamError):
    """The command would remove the checkpoint of a running process."""

    process: int

    def __init__(self, pipeline: str, process: int, said_in: str) -> None:
        super().__init__(
            f"pipeline {pipeline!r} runs, in process {process}: nothing was removed. Stop it first. If that process is "
            f"another, remove {said_in}.",
            process=process,
        )


class CheckpointLocked(MillstreamError):
    """Another run holds this checkpoint. ``host``, ``process`` and ``since`` describe it, as far as they are known."""

    host: str | None
    process: int | None
    since: str | None

    def __init__(self, path: str, host: str | None, process: int | None, since: str | None) -> None:
        super().__init__(
            f"checkpoint {path} is in use by process {process or 'unknown'} on host {host or 'unknown'} since "
            f"{since or 'an unknown time'}. Stop that run first, or give this pipeline a checkpoint of its own.",
            host=host,
            process=process,
            since=since,
        )


class LeaseLost(MillstreamError):
    """Another process took over the pipeline. This one has committed nothing since, and has ended the pipeline."""

    host: str
    process: str
    since: str

    def __init__(self, pipeline: str, host: str, process: str, since: str) -> None:
        super().__init__(
            f"pipeline {pipeline!r} was taken over by process {process} on host {host} (running since {since}), "
            "because this process did not renew its lease in time: it was paused, or could not reach Redis. It has "
            "committed nothing since then. To keep a standby, start this process again with --standby.",
            host=host,
            process=process,
            since=since,
        )


class LeaseUnverified(MillstreamError):
    """Redis could not confirm the lease for longer than ``retry.deadline``. The batch is not committed."""

    def __init__(self, pipeline: str, address: str, why: str) -> None:
        super().__init__(
            f"pipeline {pipeline!r} could not verify its lease at {address}: {why}. The batch is not committed. "
            "Start the pipeline again when that Redis answers.",
        )


class SinkFailed(MillstreamError):
    """A sink that gates the checkpoint did not accept a batch. The batch is not committed: a restart delivers it."""

    sink: str
    attempts: int

    def __init__(self, sink: str, attempts: int, why: str) -> None:
        super().__init__(
            f"sink {sink!r} did not take the batch in {attempts} attempt(s): {why}. "
            "The batch is not committed. Correct the sink and start the pipeline again; then the batch is delivered.",
            sink=sink,
            attempts=attempts,
        )


class EventFailed(MillstreamError):
    """An event cannot be processed, and the pipeline keeps no dead letters. The batch is not committed."""

    event: str
    stage: str

    def __init__(self, event: str, stage: str, reason: str) -> None:
        super().__init__(
            f"event {event} failed at {stage}: {reason}; and this pipeline keeps no dead letters. "
            "Give dlq.uri, or correct the input, and start again.",
            event=event,
            stage=stage,
        )


class ProcessorFailed(MillstreamError):
    """A processor failed permanently on a batch: a retry would run the same query on the same rows."""

    processor: str

    def __init__(self, processor: str, why: str) -> None:
        super().__init__(
            f"processor {processor} failed: {why.rstrip(' .')}. The batch is not committed; "
            "correct the processor, or its input, and start the pipeline again.",
            processor=processor,
        )


class DeadLettersFull(MillstreamError):
    """The dead-letter stream has ``max_entries``, and the overflow policy does not drop the oldest ones."""

    retryable = True


class DeadLettersMissing(MillstreamError):
    """Fewer dead letters were written than events failed. The batch is not committed, and is retried."""

    retryable = True

    def __init__(self, expected: int, written: int) -> None:
        super().__init__(
            f"{expected} events failed, and {written} dead letters were written; the batch is retried. If the error "
            "remains, a processor is not a pure function: its rows change from one reading to the next.",
            expected=expected,
            written=written,
        )


class SinkQueueDamaged(MillstreamError):
    """A batch that waits on disk for an optional sink is incomplete. It is kept, and not delivered."""

    path: str

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the batch at {path} is incomplete: {why}. Check the disk; remove the directory to drop the batch.",
            path=path,
        )


class SourceFailed(MillstreamError):
    """The source could not be read for longer than ``retry.deadline``, or because of a permanent error."""

    attempts: int

    def __init__(self, attempts: int, why: str) -> None:
        super().__init__(
            f"the source could not be read in {attempts} attempt(s): {why}. "
            "Correct that and start the pipeline again; it continues from its checkpoint.",
            attempts=attempts,
        )


class StopRequested(MillstreamError):
    """A stop was requested. The current batch is not committed, and is replayed at the next start."""


class BatchStillRuns(MillstreamError):
    """The pipeline was stopped without its current batch, which has not ended yet. ``batch`` is its number."""

    batch: int

    def __init__(self, pipeline: str, batch: int) -> None:
        super().__init__(
            f"pipeline {pipeline!r} was stopped, but its batch {batch} has not ended yet: a sink or a processor hangs. "
            "Try again later, or start the process again.",
            batch=batch,
        )


class QueryVanished(MillstreamError):
    """Spark ended a pipeline's query without an error and without a request to stop."""

    def __init__(self) -> None:
        super().__init__("Spark ended the query with work left, and without an error. See its log, and start again.")


class SinkUnknown(MillstreamError):
    """No optional sink of this name is running here."""


class PipelineUnknown(MillstreamError):
    """No pipeline of this name is running here."""


class ReplayRefused(MillstreamError):
    """These dead letters cannot be replayed through this pipeline."""


# Permanent errors: an operator must change a password, a spec or a stream. They are recognized by name, because an
# error that was raised in one of Spark's tasks arrives here as text.
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
    "SinkQueueDamaged",
    "InvalidChangeOption",
    "SourceRefused",
    "PositionLost",
    "SnapshotLost",
    "TableChanged",
    "UnreadableMessage",
    "GroupInUse",
)
# Spark wraps the errors of its writer. If one of these is inside, the error is transient.
PASSING = (
    "BrokerUnavailable",
    "OutOfMemory",
    "ServerLoading",
    "ReadOnlyReplica",
    "DeadLettersFull",
    "SourceUnreachable",
    # Spark gives a Python worker ten seconds to start, which a busy machine does not always keep.
    "Python worker failed to connect back",
    # The checkpoint's store: our own error, and what Spark reports of HDFS and S3.
    "StorageUnavailable",
    "StorageFull",
    "Call From",  # every failed call of Hadoop: connection refused, reset, timed out
    "ConnectException",
    "SocketException",
    "SocketTimeoutException",
    "NoRouteToHostException",
    "End of File Exception between",
    "Failed on local exception",
    "SafeModeException",
    "StandbyException",
    "could only be written to",
    "BlockMissingException",
    "SdkClientException",
    "AWSClientIOException",
    "AWSServiceIOException",
    # A full store or disk, until the operator has freed space.
    "No space left on device",
    "Disk quota exceeded",
    "DSQuotaExceededException",
    "NSQuotaExceededException",
    # Their texts, of which Spark's StreamingQueryException keeps only the first line.
    "The DiskSpace quota",
    "The NameSpace quota",
)
_PASSING = re.compile(rf"\b({'|'.join(PASSING)})\b")
_READING = re.compile(r"\bDataLost\b|millstream/(?:spark/reader|cdc/[\w/]+)\.py")
_FATAL = re.compile(rf"\b({'|'.join(FATAL)})\b")
_OWN_LINE = re.compile(
    rf"\bmillstream(?:\.\w+)*\.((?:{'|'.join((*FATAL, *PASSING, 'DurabilityUnavailable'))}): [^\n]+)"
)
# Spark's conditions by their SQLSTATE: data that an expression cannot take (21, 22), a query that is wrong (42), or
# raise_error and assert_true (P0). The same rows through the same query fail again.
CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\] .*?SQLSTATE: (?:21|22|42|P0)\w{3}", re.S)


def is_fatal(error: BaseException) -> bool:
    if isinstance(error, MillstreamError):
        return type(error).__name__ in FATAL
    text = f"{type(error).__name__} {error}"
    if _PASSING.search(text) is not None:
        return False
    return _FATAL.search(text) is not None or CONDITION.search(text) is not None


def is_transient(error: BaseException) -> bool:
    """Whether the error is transient: a server that is unreachable, loading or full."""
    return not is_fatal(error) and _PASSING.search(f"{type(error).__name__} {error}") is not None


def is_source_fault(error: BaseException) -> bool:
    """Whether an attempt of a sink failed because its rows could not be read, as the task's traceback shows."""
    return _READING.search(f"{type(error).__name__} {error}") is not None


_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "QuotaExceededException",
    "The DiskSpace quota",
    "The NameSpace quota",
)


def is_disk_full(error: BaseException) -> bool:
    """Whether a disk is full, for this process or for a task of Spark, whose error arrives as text."""
    if isinstance(error, StorageFull) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return True
    return any(phrase in str(error) for phrase in _FULL)


_OF_THE_CALL = re.compile(r"\AAn error occurred while calling \S+\n: (?:[\w$]+\.)*(?=\w)")
"""The first line of py4j's text, which names only the call. The exception of the JVM is in the second line."""


def short(error: BaseException, limit: int = 300) -> str:
    """The error in one line: the last line of a Python traceback inside Spark's text, if there is one."""
    text = str(error).partition("=== Streaming Query ===")[0]  # Spark's description of the query follows
    lines = re.findall(
        r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Failed|Denied|Unavailable|OutOfMemory|\w*Replica|Writer)?: .+)$",
        text,
        re.M,
    )
    own = [line for line in lines if "Py4J" not in line and not line.startswith("org.")]
    first_lines = _OF_THE_CALL.sub("", text.strip()).splitlines() or [type(error).__name__]
    return (own[-1] if own and "Traceback" in text else first_lines[0])[:limit]


# The parts of a condition that quote no value of the row.
_NAME = re.compile(r"(\[[A-Z0-9_.]+\]).*(SQLSTATE: \w+)", re.S)
_FROM_A_TASK = re.compile(r"ProcessorFailed: processor (.+?) failed: (.*?)(?:\. The batch is not committed|$)", re.M)


_ANY_CONDITION = re.compile(r"(\[[A-Z][A-Z0-9_.]+\]) .*?(SQLSTATE: \w{5})", re.S)
_CLASS = re.compile(r"^(?:Caused by: )?(?:[\w.$]+\.)?(\w+(?:Error|Exception))\b", re.M)


def without_values(error: BaseException) -> str:
    """The error in one line that quotes no value of an event, for a pipeline that masks fields.

    Our own errors quote none. Of any other error only the type is used: its text may quote the value that failed.
    """
    if isinstance(error, MillstreamError):
        return short(error)
    text = str(error)
    own = _OWN_LINE.search(text)
    if own is not None:
        return own[1][:300]
    condition = _ANY_CONDITION.search(text)
    if condition is not None:
        return f"{condition[1]} {condition[2]}"
    kinds = _CLASS.findall(text)
    return kinds[-1] if kinds else type(error).__name__


class ErrorOrigin(NamedTuple):
    processor: str
    why: str


def origin_of(error: BaseException, placed: Sequence[Placed], *, sink_involved: bool) -> ErrorOrigin | None:
    """The processor that failed permanently, and the reason; None if none did, or it is not certain.

    A sink has expressions, too. If no sink was involved, an error in data is a processor's, even if the text does not
    name it.
    """
    text = str(error)
    match = _FROM_A_TASK.search(text)
    if match is not None:
        return ErrorOrigin(match[1], match[2].strip())
    condition = CONDITION.search(text)
    if condition is None:
        return None
    guilty = [stage for stage in placed if stage.processor.quoted_in(text)]
    if not guilty and sink_involved:
        return None
    names = [called(stage) for stage in guilty or placed]
    if not names:
        return None
    masked = any(stage.processor.hides() is not None for stage in placed)
    why = _NAME.sub(r"\1 \2", condition[0]) if masked else " ".join(condition[0].split())
    return ErrorOrigin(names[0] if len(names) == 1 else f"(one of {', '.join(names)})", why)


def called(placed: Placed) -> str:
    return f"{placed.name!r} ({placed.processor.kind_name})"


def cause(error: BaseException) -> str:
    condition = CONDITION.search(str(error))
    return short(error) if condition is None else condition[0]
