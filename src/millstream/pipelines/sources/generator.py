"""Generates changes of customers, orders and payments for demos and tests: seeded, replayable, at a chosen rate.

Row n is a pure function of the seed and n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from millstream.pipelines.events import event_frame
from millstream.pipelines.sources.source import Opening, Source, SourceConfig

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FIELDS = {
    "customers": frozenset({"id", "name", "email", "city", "tier"}),
    "orders": frozenset({"id", "customer_id", "status", "amount", "currency", "items"}),
    "payments": frozenset({"id", "order_id", "amount", "method", "status"}),
}
FIRST_CUSTOMER = 1000
_FIRST = ("Ada", "Bela", "Chidi", "Dunja", "Emil", "Fatou", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena")
_LAST = ("Adler", "Brandt", "Costa", "Diallo", "Evans", "Farkas", "Garcia", "Horvat", "Ito", "Jansen", "Kaya", "Lund")
_CITY = ("Lisbon", "Lagos", "Vienna", "Osaka", "Quito", "Accra", "Porto", "Turin", "Malmo", "Lyon")
_METHOD = ("card", "transfer", "wallet")
_CURRENCY = ("EUR", "EUR", "EUR", "USD", "GBP")


class ShopStep(NamedTuple):
    """One of the ten rows of a round. ``old`` and ``new`` are the status (or tier) before and after; None: no row.
    ``order``: which of the customer's two orders. ``rounds_back``: how many rounds ago the customer's first row was."""

    table: str
    op: str
    old: str | None
    new: str | None
    rounds_back: int
    order: int = 0


STEPS = (
    ShopStep("customers", "c", None, "basic", 0),
    ShopStep("orders", "c", None, "new", 0),
    ShopStep("payments", "c", None, "authorized", 1),
    ShopStep("orders", "u", "new", "paid", 1),
    ShopStep("payments", "u", "authorized", "captured", 2),
    ShopStep("orders", "u", "paid", "shipped", 3),
    ShopStep("customers", "u", "basic", "gold", 5),
    ShopStep("orders", "c", None, "new", 2, order=1),
    ShopStep("orders", "d", "new", None, 4, order=1),
    ShopStep("orders", "u", "shipped", "delivered", 6),
)


def add_events(numbers: DataFrame, seed: int) -> DataFrame:
    """Adds the event to row numbers (``n``): table, op, key, before, after.

    It uses several projections, so that Spark computes an expression only once if later ones use it twice.
    """
    from pyspark.sql import functions as F

    placed = numbers.withColumn("_step", F.pmod(F.col("n"), F.lit(len(STEPS))).cast("int"))
    round_number = F.expr(f"n div {len(STEPS)}") + F.lit(FIRST_CUSTOMER)
    placed = placed.withColumn("_customer", round_number - _by_step([step.rounds_back for step in STEPS]))
    placed = placed.withColumn("_order", F.col("_customer") * 2 + _by_step([step.order for step in STEPS]))
    # All random values of a row come from one hash of its customer or order. A payment uses its order.
    about = F.when(_among("customers"), -F.col("_customer")).otherwise(F.col("_order"))
    placed = placed.withColumn("_chance", F.xxhash64(F.lit(seed), about))
    # Everything of a row except its state, which comes last: before and after differ only in the state.
    head = F.when(_among("orders"), _order()).when(_among("payments"), _payment()).otherwise(_customer())
    key = F.when(_among("orders"), F.col("_order")).otherwise(F.col("_customer")).cast("string")
    events = placed.withColumn("key", key).withColumns(
        {
            "table": _by_step([step.table for step in STEPS]),
            "op": _by_step([step.op for step in STEPS]),
            "_head": head,
        }
    )
    return events.withColumns(
        {"before": _closed([step.old for step in STEPS]), "after": _closed([step.new for step in STEPS])}
    )


def _by_step(values: Sequence[object]) -> Column:
    """A constant per step: an array that the generated code indexes, instead of a chain of comparisons."""
    from pyspark.sql import functions as F

    return F.element_at(F.array(*(F.lit(value) for value in values)), F.col("_step") + 1)


def _among(table: str) -> Column:
    from pyspark.sql import functions as F

    return F.col("_step").isin(*(i for i, step in enumerate(STEPS) if step.table == table))


def _closed(states: Sequence[str | None]) -> Column:
    from pyspark.sql import functions as F

    return F.concat(F.col("_head"), _by_step([state and state + '"}' for state in states]))


def _customer() -> Column:
    """A customer as JSON, up to the opening quote of its state, like the other two tables."""
    from pyspark.sql import functions as F

    me, first, last, mail = F.col("key"), _pick(0, _FIRST), _pick(8, _LAST), _pick(8, [name.lower() for name in _LAST])
    return _text(
        '{"id":', me, ',"name":"', first, " ", last, '","email":"', mail, me, '@example.com","city":"',
        _pick(16, _CITY), '","tier":"',
    )  # fmt: skip


def _order() -> Column:
    from pyspark.sql import functions as F

    return _text(
        '{"id":', F.col("key"), ',"customer_id":', F.col("_customer"), ',"amount":', _amount(), ',"currency":"',
        _pick(32, _CURRENCY), '","items":', _below(40, 5) + F.lit(1), ',"status":"',
    )  # fmt: skip


def _payment() -> Column:
    from pyspark.sql import functions as F

    return _text(
        '{"id":', F.col("key"), ',"order_id":', F.col("_order"), ',"amount":', _amount(), ',"method":"',
        _pick(48, _METHOD), '","status":"',
    )  # fmt: skip


def _amount() -> Column:
    from pyspark.sql import functions as F

    return _text(_below(0, 500) + F.lit(1), ".", _below(16, 90) + F.lit(10))


def _below(bit: int, bound: int) -> Column:
    """A number below ``bound``, from the random bits of the row that begin at ``bit``."""
    from pyspark.sql import functions as F

    return F.pmod(F.shiftrightunsigned(F.col("_chance"), bit), F.lit(bound))


def _pick(bit: int, choices: Sequence[str]) -> Column:
    from pyspark.sql import functions as F

    return F.element_at(F.array(*(F.lit(choice) for choice in choices)), _below(bit, len(choices)).cast("int") + 1)


def _text(*parts: str | Column) -> Column:
    from pyspark.sql import functions as F

    return F.concat(*(F.lit(part) if isinstance(part, str) else part.cast("string") for part in parts))


class GeneratorConfig(SourceConfig):
    """Options of the source ``generator``."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """The seed of the random values. Equal seeds give equal rows."""
    rows: Annotated[int, Field(ge=0)] | None = None
    """The number of rows, after which the source ends. By default it never ends."""
    rate: Annotated[float, Field(gt=0)] | None = None
    """Rows per second of the wall clock. By default the sinks decide the speed."""
    start_ts_ms: Annotated[int, Field(ge=0)] | None = None
    """The time of row 0, in milliseconds since 1970. By default the first start of the pipeline. Rows are 1/rate (or 1
    ms) apart."""
    partitions: Annotated[int, Field(ge=1, le=1000)] | None = None
    """The number of tasks of a batch. 1 keeps the order of rows. By default the number of tasks that run at once."""


class GeneratorSource(Source):
    type: Literal["generator"]
    config: GeneratorConfig = GeneratorConfig()

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        from millstream.pipelines.sources.numbers import FORMAT, Numbers

        c = self.config
        session.dataSource.register(Numbers)
        options: dict[str, float] = {"maxRows": opening.max_events, "parts": c.partitions or opening.partitions}
        own_options = {"rows": c.rows, "rate": c.rate, "startMs": c.start_ts_ms}
        options |= {name: value for name, value in own_options.items() if value is not None}
        numbers = session.readStream.format(FORMAT).options(**{name: str(value) for name, value in options.items()})
        return self.to_events(numbers.load())

    def to_events(self, numbers: DataFrame) -> DataFrame:
        """Row numbers and times as events. Tests also call it with a batch."""
        from pyspark.sql import functions as F

        name = self.config.id or "generator"
        columns = {
            "id": F.concat(F.lit(f"{name}-{self.config.seed}:"), F.col("n").cast("string")),
            "name": F.lit(name),
            "db": F.lit("shop"),
        }
        columns |= {column: F.col(column) for column in ("key", "table", "op", "before", "after", "ts_ms")}
        # Digits, constants, and a name with a restricted alphabet.
        plain = ("id", "key", "name", "db", "table", "op")
        return event_frame(add_events(numbers, self.config.seed), columns, plain=plain)

    def order(self) -> str | None:
        return "the rows' own" if self.config.partitions == 1 else None

    def can_fail(self) -> bool:
        return False

    def endless(self) -> bool:
        return self.config.rows is None and self.config.rate is None

    def is_finite(self) -> bool:
        return self.config.rows is not None

    def is_exhausted(self, end: Any) -> bool:
        return self.config.rows is not None and int(end["n"]) >= self.config.rows

    def fields(self) -> dict[str, frozenset[str]] | None:
        return FIELDS

    def identity(self) -> dict[str, Any]:
        return {"seed": self.config.seed}
