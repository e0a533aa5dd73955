"""How a write was split into tasks, stored next to the stream, to reject a replay that is split differently.

Rows are recognised by their position within a task. If Spark splits a replay into fewer tasks, a task has rows of
another task after its own, and they would be added a second time.

Only the driver keeps the record, when all tasks have succeeded. A task cannot know that its input was complete: if the
processor in front of it fails, its input ends early without an error, and Spark runs the task again. When the driver
commits, it records how many tasks there were and how many rows each of them had. A task of a later replay refuses rows
beyond that before it writes them.

If the first attempt was not committed, the driver finds a mismatch when it commits the replay, after the rows were
written, and the write fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from millstream.broker import BlockingBroker, companion_key
from millstream.broker.failures import typed_error
from millstream.errors import NonDeterministicReplay
from millstream.wire import Args, Batch, ErrorReply, to_bytes

_TASKS: Final = b"tasks"


class WrittenPosition(NamedTuple):
    """A writer's rows of one version in one stream."""

    stream: str
    writer: str
    version: int


class RowsGiven(NamedTuple):
    """A task's report to the driver: how many rows it had for one position, whether or not they were stored before."""

    position: WrittenPosition
    rows: int


class TaskRecord:
    """One task's view of the record of one stream. Used in the task, which only reads it."""

    def __init__(self, broker: BlockingBroker, position: WrittenPosition, partition: int | str) -> None:
        """Raises NonDeterministicReplay if the write was committed with fewer tasks than this one's number."""
        self._position = position
        self._partition = partition
        self._rows = 0
        key = _key(position)
        [reply] = _call(broker, key, [(b"HMGET", key, to_bytes(str(partition)), _TASKS)], atomic=False)
        tasks = _of_version(reply[1], position.version)
        committed = tasks is not None and isinstance(partition, int)
        if tasks is not None and isinstance(partition, int) and partition >= tasks:
            raise _recut(position, f"it was written by {tasks} task(s), and this is task {partition}")
        # A task that is not in a committed record had no rows.
        self._expected = (_of_version(reply[0], position.version) or 0) if committed else None

    def add(self, count: int) -> None:
        """Call before ``count`` rows are written. Raises NonDeterministicReplay if the committed write had fewer."""
        if self._expected is not None and self._rows + count > self._expected:
            why = f"task {self._partition} had {self._expected} rows, and the replay brings more"
            raise _recut(self._position, why)
        self._rows += count

    def rows_given(self) -> RowsGiven:
        return RowsGiven(self._position, self._rows)


def record_tasks(
    broker: BlockingBroker,
    rows_by_position: Mapping[WrittenPosition, Mapping[int, int]],
    tasks: int,
    forget_after_ms: int,
) -> None:
    """On the driver, when all tasks have succeeded. ``rows_by_position``: position to task number to rows.

    Raises NonDeterministicReplay if more rows of the same version are stored for a task than it had, or if a task with
    a higher number stored rows. Then this write is a replay that is split into other tasks, and some rows may be stored
    twice.
    """
    for position, rows in rows_by_position.items():
        markers, key = companion_key(position.stream, f"once:{position.writer}"), _key(position)
        [reply] = _call(broker, markers, [(b"HGETALL", markers)], atomic=False)
        for field, marker in zip(reply[::2], reply[1::2], strict=True):
            stored = _of_version(marker, position.version)
            if stored is None or not field.isdigit():
                continue
            partition = int(field)
            if partition >= tasks:
                why = f"task {partition} wrote rows before, and now there are {tasks} task(s)"
            elif stored > rows.get(partition, 0):
                why = f"task {partition} stored {stored} rows before, and now it had {rows.get(partition, 0)}"
            else:
                continue
            raise _recut(position, why + "; rows may be stored twice")
        counts = {_TASKS: tasks, **{b"%d" % partition: count for partition, count in rows.items()}}
        fields = [item for name, count in counts.items() for item in (name, b"%d %d" % (position.version, count))]
        expiry = (b"PEXPIRE", key, b"%d" % forget_after_ms)
        _call(broker, key, [(b"DEL", key), (b"HSET", key, *fields), expiry], atomic=True)


def _key(position: WrittenPosition) -> bytes:
    return companion_key(position.stream, f"once.tasks:{position.writer}")


def _of_version(text: bytes | None, version: int) -> int | None:
    """The second number of ``version number ...`` if it is about this version."""
    if text is None:
        return None
    recorded, number = text.split(b" ")[:2]
    return int(number) if int(recorded) == version else None


def _recut(position: WrittenPosition, why: str) -> NonDeterministicReplay:
    return NonDeterministicReplay(
        f"writer {position.writer!r} repeats version {position.version} in stream {position.stream!r} with rows that "
        f"are split into other tasks: {why}. Split the rows into the same partitions as before, for example with the "
        "same number of cores and the same spark.sql.files settings, or use delivery=exactly_once_by_event_id.",
        version=position.version,
    )


def _call(broker: BlockingBroker, key: bytes, commands: list[Args], *, atomic: bool) -> list[Any]:
    replies = broker.transport.call_many(Batch(commands, key, atomic=atomic, repeatable=True))
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise typed_error(reply)
    return list(replies)
