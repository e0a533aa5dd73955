"""What can go wrong with a pipeline as such; and what any error says, wherever it was raised: whose fault it is,
whether waiting can help, one line for people. What goes wrong with one event is a dead letter, not an error here.

Spark runs processors and sinks as one job, so a processor's error comes out of a sink's attempt, as text.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.pipelines.plan import Placed


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a spec: where it stands, and what is allowed there."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class SpecRefused(MillstreamError):
    """A spec has problems; all that were found are in ``problems``. Nothing was started."""

    problems: tuple[Problem, ...]

    def __init__(self, problems: Sequence[Problem]) -> None:
        ordered = tuple(sorted(problems, key=lambda p: (p.file, p.line)))
        heading = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
        lines = "\n".join(f"  {problem}" for problem in ordered)
        super().__init__(f"{heading} in the spec; nothing was started. Correct and run it again:\n{lines}")
        self.problems = ordered


class SparkNotStarted(MillstreamError):
    """Spark, or the Java under it, ended before it could take work. Nothing was read or written."""

    def __init__(self, why: str, log: str | None = None) -> None:
        where = f" All that it said is in {log}." if log else ""
        super().__init__(
            f"Spark did not start: {why.rstrip(' .')}.{where} Mend that (--master, spark.master and spark.conf in the "
            "file, Java on this machine), and run it again.",
            log=log,
        )


class CheckpointRefused(MillstreamError):
    """The checkpoint belongs to another pipeline, or the changed spec does not fit it. ``reasons`` says why not."""

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
    """What was asked for would take the checkpoint from a process that works with it."""

    process: int

    def __init__(self, pipeline: str, process: int, said_in: str) -> None:
        super().__init__(
            f"pipeline {pipeline!r} runs, in process {process}: nothing was removed. Stop it first. If that process is "
            f"another, remove {said_in}.",
            process=process,
        )


class SinkFailed(MillstreamError):
    """A sink that gates the checkpoint did not take a batch. The batch is not committed: a restart delivers it."""

    sink: str
    attempts: int

    def __init__(self, sink: str, attempts: int, why: str) -> None:
        super().__init__(
            f"sink {sink!r} did not take the batch in {attempts} attempt(s): {why}. "
            "The batch is not committed; mend the sink and start the pipeline again, and it is delivered.",
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
            "Give dlq.uri, or mend what it comes from, and start again.",
            event=event,
            stage=stage,
        )


class ProcessorFailed(MillstreamError):
    """A processor cannot work on a batch, and never will: trying again brings the same rows to the same query."""

    processor: str

    def __init__(self, processor: str, why: str) -> None:
        super().__init__(
            f"processor {processor} failed: {why.rstrip(' .')}. The batch is not committed; "
            "mend the processor, or what it is given, and start the pipeline again.",
            processor=processor,
        )


class DeadLettersFull(MillstreamError):
    """The dead letters are at ``max_entries`` and the overflow policy is not to drop the oldest."""

    retryable = True


class DeadLettersMissing(MillstreamError):
    """Fewer dead letters were written than events have failed. The batch is not committed, and is tried again."""

    retryable = True

    def __init__(self, expected: int, written: int) -> None:
        super().__init__(
            f"{expected} events failed, and {written} dead letters were written; the batch is tried again. Where that "
            "does not pass, a processor is no pure function: its rows change from one reading to the next.",
            expected=expected,
            written=written,
        )


class SpoolDamaged(MillstreamError):
    """A batch that waits on disk for an optional sink is not whole. It is not delivered, and not forgotten."""

    path: str

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the batch at {path} is not whole: {why}. Look at the disk; remove the directory to give the batch up.",
            path=path,
        )


class OldBatchRefused(MillstreamError):
    """A batch that 0.1.0 left half done cannot be finished by this version. Nothing of it was written anew."""

    batch: int

    def __init__(self, batch: int, why: str) -> None:
        super().__init__(
            f"batch {batch}, which 0.1.0 left half done, cannot be finished by this version: {why.rstrip(' .')}. "
            "Finish it with 0.1.0 (`millstream pipeline run --once`), then start this version.",
            batch=batch,
        )


class SourceFailed(MillstreamError):
    """The source could not be read, for longer than ``retry.deadline`` or for a reason that does not pass."""

    attempts: int

    def __init__(self, attempts: int, why: str) -> None:
        super().__init__(
            f"the source could not be read in {attempts} attempt(s): {why}. "
            "The pipeline goes on from its checkpoint when that is mended and it is started again.",
            attempts=attempts,
        )


class StopRequested(MillstreamError):
    """Somebody asked the pipeline to stop. The batch at hand is not committed, and is replayed at the next start."""


class QueryVanished(MillstreamError):
    """Spark has ended a pipeline's query without an error, and nobody here has asked for it."""

    def __init__(self) -> None:
        super().__init__("Spark ended the query with work left, and without an error. See its log, and start again.")


class SinkUnknown(MillstreamError):
    """No optional sink of this name is running here."""


class PipelineUnknown(MillstreamError):
    """No pipeline of this name is running here."""


class ReplayRefused(MillstreamError):
    """These dead letters cannot be replayed through this pipeline."""


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
_READING = re.compile(r"\bDataLost\b|millstream/(?:spark/reader|cdc/[\w/]+)\.py")
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
