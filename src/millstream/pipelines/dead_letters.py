"""Dead letters: a bounded stream of events that could not be processed, with reason, stage and payload.

A replay processes them again, from the stage that failed, and deletes those that the sinks have stored.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from millstream.errors import NoSuchStream
from millstream.model import Entry, EntryId, Observer, TrimPolicy
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.envelope_reader import Format, SourcePosition, read_documents
from millstream.pipelines.envelopes import Native
from millstream.pipelines.errors import DeadLettersFull, DeadLettersMissing, EventFailed, ReplayRefused
from millstream.pipelines.events import EXCERPT_LENGTH, REFUSED
from millstream.pipelines.plan import PipelinePlan, apply
from millstream.pipelines.processors.fields import HASHES, VALUE_WITHHELD, conceal
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.sinks import Sink, Write
from millstream.spark.sink_options import read_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.broker import BlockingBroker

log = logging.getLogger("millstream.pipelines")
_SHOWN = 20
_MAX_LETTER_BYTES = 60 << 20


class DeadLetterWriter:
    """Writes dead letters through Spark, exactly once by event and stage. The driver enforces the limits of the stream.

    The fields of the pipeline's masks are masked, also in events that failed before they reached the mask.
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
        rows = self._rows(conceal(lost, self._plan.hidden_by_stage(), self._plan.hidden), write)
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
                "fence": write.fence(target.address),
            }
            if self._settings.overflow == "drop_oldest":
                options["maxlen"] = str(self._settings.max_entries)
            with tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
                report = f"{scratch}/report.json"
                rows.write.format("redis_streams").mode("append").options(**options, report=report).save()
                written = read_report(report).rows
            # One event can fail at several sinks, so there may be more. If there are fewer, events are lost.
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

        payload, key = F.coalesce(F.col("payload"), Native().column(lost)), F.col("key")
        size = F.coalesce(F.octet_length(payload), F.lit(0)) + F.coalesce(F.octet_length(key), F.lit(0))
        # A dead letter that does not fit into an entry would stop the pipeline. It has an excerpt, and is not replayed.
        fits = size <= _MAX_LETTER_BYTES
        too_large = F.concat(F.lit(f"{REFUSED}its dead letter has "), size.cast("string"), F.lit(" bytes; "), "error")
        return lost.select(
            F.col("id"),
            F.when(fits, F.col("error")).otherwise(too_large).alias("reason"),
            F.col("stage"),
            F.when(fits, payload).otherwise(F.substring(payload, 1, EXCERPT_LENGTH)).alias("payload"),
            F.col("table"),
            F.when(fits, key).otherwise(F.substring(key, 1, EXCERPT_LENGTH)).alias("key"),
            # Values that a replay cannot read from the payload.
            F.col("name").alias("source"),
            F.col("ts_ms").cast("string").alias("ts_ms"),
            F.col("stream"),
            F.lit(self._plan.pipeline.tenant).alias("tenant"),
            F.lit(self._plan.pipeline.name).alias("pipeline"),
            F.lit(str(write.version)).alias("batch"),
            *([F.lit("yes").alias("masked"), F.col(HASHES).alias("hashes")] if self._plan.hidden else []),
            # One event can fail at several sinks, in several pipelines that share the stream, and again after a
            # reset; each failure is a dead letter of its own.
            F.concat_ws(
                "\x00",
                F.lit(self._plan.pipeline.tenant),
                F.lit(write.application),
                F.col("id"),
                F.col("stage"),
            ).alias("_mark"),
        )

    def _room(self, broker: BlockingBroker, stream: str, expected: int) -> int | None:
        """How many more fit; None if the oldest are dropped. Raises if the policy is to block."""
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
        log.error("dead letters are full: %d of %d events were rejected and are lost", expected - room, expected)
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
    """``kept``: for each reason, the number of dead letters that were not replayed and remain in the stream."""

    delivered: int
    failed_again: int
    kept: Mapping[str, int] = field(default_factory=dict)


def replay_dead_letters(
    session: SparkSession, plan: PipelinePlan, *, limit: int = 10_000, secrets: SecretFiles | None = None
) -> ReplayResult:
    """Replays up to ``limit`` dead letters of this pipeline, oldest first. Letters that fail again remain, and so do
    those that cannot be replayed, and those of other pipelines and tenants that share the stream.

    Exactly once by event id, so an interrupted replay can be repeated.
    """
    target = plan.dead_letters
    if target is None:
        raise ReplayRefused("this pipeline has no dead letters: see dlq in its spec.")
    checkpoint = Checkpoint.of(plan.pipeline)
    identity = checkpoint.identity() if checkpoint.owned(plan) else None
    owner = identity["application"] if identity else f"{plan.pipeline.tenant}:{plan.pipeline.name}"
    application = f"{owner}.replay"
    delivered = failed = 0
    kept_by_reason: Counter[str] = Counter()
    with target.address.open() as broker:
        after, remaining = "-", limit
        while remaining > 0:
            page = broker.xrange(target.stream, after, count=_PAGE)
            if not page:
                break
            after = f"({page[-1].id}"
            own: list[Entry] = []
            for letter in page:
                if not is_own_letter(letter, plan):
                    continue
                why = _not_replayable(plan, letter.text("stage"))
                if why is not None:
                    kept_by_reason[why] += 1
                elif len(own) < remaining:
                    own.append(letter)
            remaining -= len(own)
            for (stage, masked), letters in _by_stage(own):
                # A letter that does not contain the input itself remains: sinks must not receive a placeholder as data.
                bad = {letter.text("id") for letter in letters if _is_incomplete(letter, masked)}
                complete = [letter for letter in letters if letter.text("id") not in bad]
                if complete:
                    bad |= _again(session, plan, stage, masked, complete, application, secrets or SecretFiles())
                done = [letter.id for letter in letters if letter.text("id") not in bad]
                failed += len(letters) - len(done)
                delivered += len(done)
                if done:
                    broker.xdel(target.stream, done)
    return ReplayResult(delivered, failed, dict(kept_by_reason))


def _not_replayable(plan: PipelinePlan, stage: str) -> str | None:
    """Why dead letters of this stage cannot be replayed through the current spec; None if they can."""
    placed = [*plan.streaming, *plan.per_batch]
    names = [step.name for step in placed]
    sinks = [f"sink:{sink.config.id}" for sink in plan.pipeline.spec.sinks]
    if stage in sinks:
        return None
    if stage != "source" and stage not in names:
        return f"they failed at {stage!r}, which this spec does not have (any more). Give a processor this id."
    remaining = placed if stage == "source" else placed[names.index(stage) :]
    if any(step.processor.makes_events for step in remaining):
        return f"they failed at {stage!r}, and cannot be added to windows that an aggregate has closed already."
    return None


def _is_incomplete(letter: Entry, masked: bool) -> bool:
    if letter.text("reason").startswith(REFUSED):
        return True
    return masked and _is_withheld(letter)


def _is_withheld(letter: Entry) -> bool:
    texts = [_optional(letter, name) or "" for name in (b"key", b"stream")]
    return any(VALUE_WITHHELD in text for text in texts) or f'"{VALUE_WITHHELD}"' in letter.text("payload")


def is_own_letter(letter: Entry, plan: PipelinePlan) -> bool:
    """Whether this pipeline wrote the dead letter. A letter without a tenant is not replayed, because it may be any
    tenant's."""
    return (_optional(letter, b"tenant"), _optional(letter, b"pipeline")) == (plan.pipeline.tenant, plan.pipeline.name)


def _by_stage(letters: Sequence[Entry]) -> Iterator[tuple[tuple[str, bool], list[Entry]]]:
    """Groups letters by the stage that failed, and by whether the letter was masked when it was written."""
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
    """Replays the letters of one stage; returns the ids of those that failed again."""
    from pyspark.sql import functions as F

    placed = [*plan.streaming, *plan.per_batch]
    names = [step.name for step in placed]
    sinks: Sequence[Sink] = plan.pipeline.spec.sinks
    remaining = placed
    if stage.startswith("sink:"):
        remaining, sinks = [], [sink for sink in sinks if sink.config.id == stage.removeprefix("sink:")]
    elif stage in names:
        remaining = placed[names.index(stage) :]
    if masked:  # hashes must not be hashed again; values that are still in clear are masked now
        hashes = frozenset(digest for letter in letters for digest in (_optional(letter, b"hashes") or "").split())
        remaining = [replace(step, processor=step.processor.for_masked_letters(hashes)) for step in remaining]
    form = _form(plan) if stage == "source" else "native"
    own_ids = stage != "source" or plan.pipeline.spec.source.takes_ids_of_documents()
    version = time.time_ns() // 1_000_000
    events = apply(_events(session, letters, form, own_ids), remaining, plan, batch_id=version, failures=True).persist()
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
    form: Any = getattr(config, "envelope", None) or getattr(config, "format", "auto")
    return form if form in get_args(Format) else "auto"


def _events(session: SparkSession, letters: list[Entry], form: Format, own_ids: bool) -> DataFrame:
    from pyspark.sql import functions as F

    rows = [
        (
            letter.text("id"),
            letter.text("payload"),
            int(_optional(letter, b"ts_ms") or letter.id.ms),
            _optional(letter, b"source") or "dead-letters",
            *(_optional(letter, name) for name in (b"table", b"key", b"stream")),
        )
        for letter in letters
    ]
    schema = "at string, text string, ts bigint, source string, tab string, k string, routed string"
    # One task: tasks that run at the same time would mix the order of the letters, which is oldest first.
    frame = session.createDataFrame(rows, schema).coalesce(1)
    position = SourcePosition(
        id=F.col("at"),
        ts_ms=F.col("ts"),
        name=F.col("source"),
        table=F.col("tab"),
        key=F.col("k"),
        stream=F.col("routed"),
    )
    return read_documents(frame, F.col("text"), position, form, own_ids=own_ids)


def _optional(letter: Entry, name: bytes) -> str | None:
    value = letter.fields.get(name)
    return None if value is None else value.decode()
