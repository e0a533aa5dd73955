"""A shop in a real PostgreSQL: rows that are there before the pipeline comes, and changes while it runs."""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType
from typing import Self

from millstream.errors import MillstreamError
from millstream.testing import PostgresProcess, postgres_binaries

_TABLES = (
    "CREATE TABLE customers (id int PRIMARY KEY, name text, email text)",
    "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, amount numeric(10, 2), status text)",
    "CREATE TABLE payments (id int PRIMARY KEY, order_id int, amount numeric(10, 2))",
)
_FILL = (
    "INSERT INTO customers SELECT i, 'Customer ' || i, i || '@shop.example' FROM generate_series(1, {n}) i",
    "INSERT INTO orders SELECT i, i, i * 1.25, 'new' FROM generate_series(1, {n}) i",
    "INSERT INTO payments SELECT i, i, i * 1.25 FROM generate_series(1, {n}) i",
)
_RESTS_S = 0.01


class ShopDatabase:
    """``rows`` events in all: half of them rows of the snapshot, the others changes by a thread of its own, which
    begins when those rows have arrived. So every change is one event, and what must arrive is known."""

    def __init__(self, rows: int) -> None:
        if postgres_binaries() is None:
            raise MillstreamError("PostgreSQL is not installed: run `make setup`, or leave SOURCE=postgres out.")
        self._server = PostgresProcess()
        self._each = rows // 6
        self.expected = rows
        self._changes = rows - 3 * self._each
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._change, name="millstream-shop", daemon=True)
        self._written = threading.Event()

    @property
    def dsn(self) -> str:
        return self._server.main.dsn

    def start(self) -> None:
        self._server.start()
        self._server.main.execute(*_TABLES, *(statement.format(n=self._each) for statement in _FILL))

    def look(self, arrived: int) -> bool:
        """Begins to change rows once those of the snapshot have arrived; whether all that will be is there."""
        if arrived >= 3 * self._each and self._thread.ident is None:
            self._thread.start()
        return self._written.is_set() and arrived >= self.expected

    def _change(self) -> None:
        chance, left, next_id = random.Random(7), self._changes, self._each + 1  # noqa: S311  # a shop, not a secret
        with self._server.main.connect(autocommit=False) as connection:
            while left and not self._stop.is_set():
                for _ in range(min(left, chance.randrange(1, 12))):
                    what = chance.randrange(4)
                    if what == 0:
                        connection.execute("INSERT INTO payments VALUES (%s, %s, %s)", (next_id, 1, 9.99))
                        next_id += 1
                    elif what == 1:
                        connection.execute("INSERT INTO orders VALUES (%s, %s, %s, 'new')", (next_id, 1, 5))
                        next_id += 1
                    else:
                        one = chance.randrange(1, self._each + 1)
                        connection.execute("UPDATE orders SET status = 'paid ' || %s WHERE id = %s", (left, one))
                    left -= 1
                connection.commit()
                time.sleep(_RESTS_S)
        self._written.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(20)
        self._server.stop()
