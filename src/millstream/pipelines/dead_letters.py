"""Events that cannot be processed, in a stream of their own: reason, stage, payload; bounded, never silently away."""

from __future__ import annotations

import logging
import tempfile
from typing import TYPE_CHECKING

from millstream.errors import NoSuchStream
from millstream.model import EntryId, Observer, TrimPolicy
from millstream.pipelines.envelopes import Native
from millstream.pipelines.errors import DeadLettersFull, DeadLettersMissing, EventFailed
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.processors.mask import conceal
from millstream.pipelines.secret_files import SecretFiles
from millstream.pipelines.sinks import Write
from millstream.spark import read_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
