"""Events that cannot be processed, in a stream of their own: reason, stage, payload; bounded, never silently away. And
once more: replayed from the stage that failed on, into the sinks, and out of the stream when they are there.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from millstream.errors import NoSuchStream
from millstream.model import Entry, EntryId, Observer, TrimPolicy
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.envelope_reader import Format, SourcePosition, read_documents
from millstream.pipelines.envelopes import Native
from millstream.pipelines.errors import DeadLettersFull, DeadLettersMissing, EventFailed, ReplayRefused
from millstream.pipelines.plan import PipelinePlan, apply
from millstream.pipelines.processors.fields import conceal
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.sinks import Sink, Write
from millstream.spark import read_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.broker import BlockingBroker

log = logging.getLogger("millstream.pipelines")
_SHOWN = 20


class DeadLetterWriter:
    """Written by Spark, exactly once by event and stage, like any sink; the bounds are kept from the driver.

    What a mask of the pipeline names is masked here too, also in events that failed before they came to the mask.
    """

    def __init__(self, plan: PipelinePlan, secrets: SecretFiles, observer: Observer) -> None:
        self._plan = plan
        self._secrets = secrets
        self._observer = observer
        self._settings = plan.pipeline.spec.dlq

    def probe(self) -> None:
        if self._plan.dead_letters is not None:
            with self._broker() as broker:
                broker.ping()

    def write(self, lost: DataFrame, write: Write, expected: int) -> None:
        target = self._plan.dead_letters
        if target is None:
            [first] = lost.select("id", "stage", "error").take(1)
            raise EventFailed(first["id"], first["stage"], first["error"])
        rows = self._rows(conceal(lost, self._plan.hidden), write)
        with self._broker() as broker:
            room = self._room(broker, target.stream, expected)
            if room is not None and room < expected:
                rows = self._reject(rows, room, expected)
            options = {
                **self._secrets.options(target.address),
                "stream": target.stream,
                "content": "columns",
                "delivery": write.delivery,
                "eventIdColumn": "_mark",
                "txnAppId": write.application,
                "txnVersion": str(write.version),
                "sinkId": write.sink,
            }
            if self._settings.overflow == "drop_oldest":
                options["maxlen"] = str(self._settings.max_entries)
            with tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
                report = f"{scratch}/report.json"
                rows.write.format("redis_streams").mode("append").options(**options, report=report).save()
                written = read_report(report).rows
            # One event can fail at several sinks, so there may be more; fewer would be events that are nowhere.
            if written < min(expected, expected if room is None else room):
                raise DeadLettersMissing(expected, written)
            self._age(broker, target.stream)
            entries = broker.xlen(target.stream)
        self._observer(
            "pipeline.dead_letters",
            pipeline=self._plan.pipeline.name,
            batch=write.version,
            events=expected,
            entries=entries,
            saturation=entries / self._settings.max_entries,
        )

    def _rows(self, lost: DataFrame, write: Write) -> DataFrame:
        from pyspark.sql import functions as F

        return lost.select(
            F.col("id"),
            F.col("error").alias("reason"),
            F.col("stage"),
            F.coalesce(F.col("payload"), Native().column(lost)).alias("payload"),
            F.col("table"),
            F.col("key"),
            F.lit(self._plan.pipeline.name).alias("pipeline"),
            F.lit(str(write.version)).alias("batch"),
            *([F.lit("yes").alias("masked")] if self._plan.hidden else []),
            # One event can fail at several sinks; each is a dead letter of its own.
            F.concat_ws("\x00", F.col("id"), F.col("stage")).alias("_mark"),
        )

    def _room(self, broker: BlockingBroker, stream: str, expected: int) -> int | None:
        """How many more fit; None where the oldest give way. Raises where the policy is to wait for room."""
        if self._settings.overflow == "drop_oldest":
            return None
        room = max(0, self._settings.max_entries - broker.xlen(stream))
        if room < expected and self._settings.overflow == "block":
            raise DeadLettersFull(
                f"the dead letters {stream!r} have room for {room} of {expected} more. Replay or delete some."
            )
        return room

    def _reject(self, rows: DataFrame, room: int, expected: int) -> DataFrame:
        ordered = rows.orderBy("id", "stage")
        for row in ordered.offset(room).limit(_SHOWN).select("id", "stage", "reason").collect():
            log.error(
                "dead letters are full; rejected event %s, which failed at %s: %s",
                row["id"],
                row["stage"],
                row["reason"],
            )
        log.error(
            "dead letters are full: %d of %d events were rejected, and are kept nowhere", expected - room, expected
        )
        self._observer("pipeline.dead_letters_rejected", pipeline=self._plan.pipeline.name, events=expected - room)
        return ordered.limit(room)

    def _age(self, broker: BlockingBroker, stream: str) -> None:
        oldest = broker.server_time_ms() - self._settings.max_age
        try:
            broker.xtrim(stream, TrimPolicy(min_id=EntryId(max(0, oldest)), approximate=True))
        except NoSuchStream:
            pass  # nothing was written, because everything was rejected

    def _broker(self) -> BlockingBroker:
        assert self._plan.dead_letters is not None
        return self._plan.dead_letters.address.open()


_PAGE = 1000


@dataclass(frozen=True, slots=True)
class ReplayResult:
    delivered: int
    failed_again: int


def replay_dead_letters(
    session: SparkSession, plan: PipelinePlan, *, limit: int = 10_000, secrets: SecretFiles | None = None
) -> ReplayResult:
    """Takes up to ``limit`` dead letters, oldest first. Those that fail again stay where they are.

    Exactly once by event id: what a crash interrupts can be replayed again.
    """
    target = plan.dead_letters
    if target is None:
        raise ReplayRefused("this pipeline keeps no dead letters: see dlq in its spec.")
    checkpoint = Checkpoint(plan.pipeline.checkpoint_path)
    identity = checkpoint.identity() if checkpoint.owned(plan) else None
    application = f"{identity['application'] if identity else plan.pipeline.name}.replay"
    delivered = failed = 0
    with target.address.open() as broker:
        after, left = "-", limit
        while left > 0:
            page = broker.xrange(target.stream, after, count=min(_PAGE, left))
            if not page:
                break
            left -= len(page)
            after = f"({page[-1].id}"
            for (stage, masked), letters in _by_stage(page):
                bad = _again(session, plan, stage, masked, letters, application, secrets or SecretFiles())
                done = [letter.id for letter in letters if letter.text("id") not in bad]
                failed += len(letters) - len(done)
                delivered += len(done)
                if done:
                    broker.xdel(target.stream, done)
    return ReplayResult(delivered, failed)


def _by_stage(letters: Sequence[Entry]) -> Iterator[tuple[tuple[str, bool], list[Entry]]]:
    """By the stage that failed, and by whether the letter was masked when it was written."""
    groups: dict[tuple[str, bool], list[Entry]] = {}
    for letter in letters:
        groups.setdefault((letter.text("stage"), b"masked" in letter.fields), []).append(letter)
    yield from groups.items()


def _again(
    session: SparkSession,
    plan: PipelinePlan,
    stage: str,
    masked: bool,
    letters: list[Entry],
    application: str,
    secrets: SecretFiles,
) -> set[str]:
    """Sends the letters of one stage on, and returns the ids of those that failed again."""
    from pyspark.sql import functions as F

    placed = [*plan.streaming, *plan.per_batch]
    names = [each.name for each in placed]
    sinks: Sequence[Sink] = plan.pipeline.spec.sinks
    rest = placed
    if stage.startswith("sink:"):
        rest, sinks = [], [sink for sink in sinks if sink.config.id == stage.removeprefix("sink:")]
    elif stage in names:
        rest = placed[names.index(stage) :]
    elif stage != "source":
        raise ReplayRefused(
            f"dead letters failed at {stage!r}, which this spec does not have (any more). Name it so again."
        )
    if masked:  # a second time, a hash would be the hash of a hash
        rest = [each for each in rest if each.processor.hides() is None]
    if any(each.processor.makes_events for each in rest):
        raise ReplayRefused("events cannot be added to windows that an aggregate has closed already.")
    form = _form(plan) if stage == "source" else "native"
    version = time.time_ns() // 1_000_000
    events = apply(_events(session, letters, form), rest, plan, batch_id=version, failures=True).persist()
    try:
        tenant = plan.pipeline.tenant
        fine = events.where(F.col("error").isNull())
        bad = {row["id"] for row in events.where(F.col("error").isNotNull()).select("id").collect()}
        for sink in sinks:
            lost = sink.unroutable(fine, tenant)
            bad |= set() if lost is None else {row["id"] for row in lost.select("id").collect()}
        for sink in sinks:
            write = Write(application, version, sink.config.id, "exactly_once_by_event_id", secrets)
            sink.write(sink.prepare(fine.where(~F.col("id").isin(*bad)) if bad else fine, tenant), write)
    finally:
        events.unpersist()
    return bad


def _form(plan: PipelinePlan) -> Format:
    config: Any = getattr(plan.pipeline.spec.source, "config", None)
    found: Any = getattr(config, "envelope", None) or getattr(config, "format", "auto")
    return found if found in get_args(Format) else "auto"


def _events(session: SparkSession, letters: list[Entry], form: Format) -> DataFrame:
    from pyspark.sql import functions as F

    rows = [
        (
            letter.text("id"),
            letter.text("payload"),
            letter.id.ms,
            _optional(letter, b"table"),
            _optional(letter, b"key"),
        )
        for letter in letters
    ]
    frame = session.createDataFrame(rows, "at string, text string, ts bigint, tab string, k string")
    name = F.lit("dead-letters")
    position = SourcePosition(id=F.col("at"), ts_ms=F.col("ts"), name=name, table=F.col("tab"), key=F.col("k"))
    return read_documents(frame, F.col("text"), position, form, own_ids=form == "native")


def _optional(letter: Entry, field: bytes) -> str | None:
    found = letter.fields.get(field)
    return None if found is None else found.decode()
