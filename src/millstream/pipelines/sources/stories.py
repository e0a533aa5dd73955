"""What the generator tells: customers, orders and payments that live, change and go. Row n is a pure function of the
seed and n, as Spark expressions, so that any row can be made again anywhere.

Ten rows are one beat. Each of a beat's rows belongs to another customer's story, some beats back, so that the changes
of many rows interleave as they do in a database; those of the first beats began before the stream did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import Column

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


class Step(NamedTuple):
    """One of a beat's ten rows. ``old`` and ``new`` are the status (or tier) before and after; None: no such row.
    ``order`` tells a customer's two orders apart. ``beats_back``: how long ago that customer's story began."""

    table: str
    op: str
    old: str | None
    new: str | None
    beats_back: int
    order: int = 0


STEPS = (
    Step("customers", "c", None, "basic", 0),
    Step("orders", "c", None, "new", 0),
    Step("payments", "c", None, "authorized", 1),
    Step("orders", "u", "new", "paid", 1),
    Step("payments", "u", "authorized", "captured", 2),
    Step("orders", "u", "paid", "shipped", 3),
    Step("customers", "u", "basic", "gold", 5),
    Step("orders", "c", None, "new", 2, order=1),
    Step("orders", "d", "new", None, 4, order=1),
    Step("orders", "u", "shipped", "delivered", 6),
)


class Story:
    """The columns of row ``n``."""

    def __init__(self, seed: int, n: Column) -> None:
        from pyspark.sql import functions as F

        self._seed = F.lit(seed).cast("bigint")
        self._step = F.pmod(n, F.lit(len(STEPS))).cast("int")
        beats_back = self._by_step([step.beats_back for step in STEPS])
        self._customer = F.floor(n / len(STEPS)) + F.lit(FIRST_CUSTOMER) - beats_back
        self._order = self._customer * 2 + self._by_step([step.order for step in STEPS])

    def table(self) -> Column:
        return self._by_step([step.table for step in STEPS])

    def op(self) -> Column:
        return self._by_step([step.op for step in STEPS])

    def key(self) -> Column:
        from pyspark.sql import functions as F

        is_order = self._among("orders")
        return F.when(is_order, self._order).otherwise(self._customer).cast("string")

    def before(self) -> Column:
        return self._row([step.old for step in STEPS])

    def after(self) -> Column:
        return self._row([step.new for step in STEPS])

    def _by_step(self, values: Sequence[object]) -> Column:
        """A constant for each step: an array that the generated code indexes, not a chain of comparisons."""
        from pyspark.sql import functions as F

        return F.element_at(F.array(*(F.lit(value) for value in values)), self._step + 1)

    def _among(self, table: str) -> Column:
        return self._step.isin(*(i for i, step in enumerate(STEPS) if step.table == table))

    def _row(self, states: Sequence[str | None]) -> Column:
        from pyspark.sql import functions as F

        state = self._by_step(states)
        row = (
            F.when(self._among("orders"), self._order_row(state))
            .when(self._among("payments"), self._payment_row(state))
            .otherwise(self._customer_row(state))
        )
        return F.when(state.isNotNull(), row)

    def _customer_row(self, tier: Column) -> Column:
        from pyspark.sql import functions as F

        first, last = self._pick("first", self._customer, _FIRST), self._pick("last", self._customer, _LAST)
        email = F.concat(
            F.lower(first), F.lit("."), F.lower(last), self._customer.cast("string"), F.lit("@example.com")
        )
        return _object(
            id=self._customer,
            name=_text(F.concat(first, F.lit(" "), last)),
            email=_text(email),
            city=_text(self._pick("city", self._customer, _CITY)),
            tier=_text(tier),
        )

    def _order_row(self, status: Column) -> Column:
        from pyspark.sql import functions as F

        return _object(
            id=self._order,
            customer_id=self._customer,
            status=_text(status),
            amount=self._amount(),
            currency=_text(self._pick("currency", self._order, _CURRENCY)),
            items=self._below("items", self._order, 5) + F.lit(1),
        )

    def _payment_row(self, status: Column) -> Column:
        return _object(
            id=self._customer,
            order_id=self._customer * 2,
            amount=self._amount(),
            method=_text(self._pick("method", self._customer, _METHOD)),
            status=_text(status),
        )

    def _amount(self) -> Column:
        """A payment is over its order's amount: both come from the order's number."""
        from pyspark.sql import functions as F

        order = F.when(self._among("payments"), self._customer * 2).otherwise(self._order)
        cents = self._below("amount", order, 50_000) + F.lit(100)
        return (cents.cast("decimal(9,0)") / F.lit(100).cast("decimal(3,0)")).cast("decimal(9,2)")

    def _below(self, what: str, key: Column, bound: int) -> Column:
        from pyspark.sql import functions as F

        return F.pmod(F.xxhash64(self._seed, F.lit(what), key), F.lit(bound))

    def _pick(self, what: str, key: Column, words: Sequence[str]) -> Column:
        from pyspark.sql import functions as F

        index = self._below(what, key, len(words)).cast("int") + 1
        return F.element_at(F.array(*(F.lit(word) for word in words)), index)


def _text(column: Column) -> Column:
    from pyspark.sql import functions as F

    return F.concat(F.lit('"'), column, F.lit('"'))


def _object(**members: Column) -> Column:
    from pyspark.sql import functions as F

    parts: list[Column] = []
    for name, value in members.items():
        parts += [F.lit(("," if parts else "{") + f'"{name}":'), value.cast("string")]
    return F.concat(*parts, F.lit("}"))
