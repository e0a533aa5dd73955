"""Made-up changes of customers, orders and payments: seeded, replayable and rate-controlled, for demos and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from millstream.pipelines.events import event_frame
from millstream.pipelines.sources.source import Opening, Source, SourceConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class GeneratorConfig(SourceConfig):
    """``rows`` ends it; ``rate`` is rows a second by the wall clock, and without it as fast as the sinks take them.
    ``start_ts_ms`` is the time of row 0, by default when the pipeline first started; rows are 1/rate (or 1 ms) apart.
    """

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    rows: Annotated[int, Field(ge=0)] | None = None
    rate: Annotated[float, Field(gt=0)] | None = None
    start_ts_ms: Annotated[int, Field(ge=0)] | None = None
    partitions: Annotated[int, Field(ge=1, le=1000)] | None = None


class GeneratorSource(Source):
    type: Literal["generator"]
    config: GeneratorConfig = GeneratorConfig()

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        from millstream.pipelines.sources.numbers import FORMAT, Numbers

        c = self.config
        session.dataSource.register(Numbers)
        options: dict[str, float] = {"maxRows": opening.max_events, "parts": c.partitions or opening.partitions}
        given = {"rows": c.rows, "rate": c.rate, "startMs": c.start_ts_ms}
        options |= {name: value for name, value in given.items() if value is not None}
        numbers = session.readStream.format(FORMAT).options(**{name: str(value) for name, value in options.items()})
        return self.told(numbers.load())

    def told(self, numbers: DataFrame) -> DataFrame:
        """Row numbers and times as events. Also what a test gives as a batch."""
        from pyspark.sql import functions as F

        from millstream.pipelines.sources.sample_shop import tell

        name = self.config.id or "generator"
        columns = {
            "id": F.concat(F.lit(f"{name}-{self.config.seed}:"), F.col("n").cast("string")),
            "name": F.lit(name),
            "db": F.lit("shop"),
        }
        columns |= {each: F.col(each) for each in ("key", "table", "op", "before", "after", "ts_ms")}
        # Digits, words of ours, and a name of a closed alphabet.
        plain = ("id", "key", "name", "db", "table", "op")
        return event_frame(tell(numbers, self.config.seed), columns, plain=plain)

    def order(self) -> str | None:
        return "the rows' own" if self.config.partitions == 1 else None

    def can_fail(self) -> bool:
        return False

    def endless(self) -> bool:
        return self.config.rows is None and self.config.rate is None

    def fields(self) -> dict[str, frozenset[str]] | None:
        from millstream.pipelines.sources.sample_shop import FIELDS

        return FIELDS

    def identity(self) -> dict[str, Any]:
        return {"seed": self.config.seed}
