"""The console as a sink: the first rows of each batch, as JSON, escaped. For trying things out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from millstream.pipelines.envelopes import AnyEnvelope, Native
from millstream.pipelines.sinks.sink import Sink, SinkConfig, Write

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class ConsoleConfig(SinkConfig):
    envelope: AnyEnvelope = Native()
    rows: Annotated[int, Field(ge=0, le=10_000)] = 20


class ConsoleSink(Sink):
    """A replayed batch is shown again: a terminal cannot take back."""

    idempotent = False
    looks = True
    type: Literal["console"]
    config: ConsoleConfig

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        return self.matching(events, tenant).select(self.config.envelope.column(events).alias("event"), *keep)

    def write(self, rows: DataFrame, write: Write) -> None:
        shown = rows.take(self.config.rows + 1)
        for row in shown[: self.config.rows]:
            sys.stdout.write(f"{write.sink} batch {write.version}: {printable(row['event'])}\n")
        if len(shown) > self.config.rows:
            sys.stdout.write(f"{write.sink} batch {write.version}: ... (rows: {self.config.rows} shows no more)\n")
        sys.stdout.flush()


def printable(text: str) -> str:
    """Nothing in the data may steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
