"""Dead letters, once more: from the stage that failed on, into the sinks, and out of the stream when they are there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from millstream.model import Entry
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.envelopes import Format, SourcePosition, read_documents
from millstream.pipelines.errors import ReplayRefused
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.secret_files import SecretFiles
from millstream.pipelines.sinks import Sink, Write
from millstream.pipelines.stages import apply

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
