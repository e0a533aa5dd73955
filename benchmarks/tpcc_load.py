"""A load like TPC-C on PostgreSQL, and a ledger that rebuilds its tables from a stream of changes.

pgbench runs the transactions: new orders, payments, deliveries, order status. Some roll back, some roll back to a
savepoint, and all payments of a warehouse update the same row. Every row that is ever updated has a ``version``, which
each update increments, so the stream alone shows whether an update is missing, repeated or out of order.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from millstream.cdc.postgres.connection import SETTINGS
from millstream.testing import PostgresDatabase

DISTRICTS = 10
CLIENTS = 8
KEYS = {
    "warehouse": ("w",),
    "district": ("w", "d"),
    "customer": ("w", "d", "c"),
    "history": ("h",),
    "orders": ("w", "d", "o"),
    "new_order": ("w", "d", "o"),
    "order_line": ("w", "d", "o", "n"),
    "item": ("i",),
    "stock": ("w", "i"),
}
MAX_FAULTS = 100
"""The ledger stops after this many faults, because each fault causes others."""

_TABLES = """
CREATE TABLE warehouse (w int PRIMARY KEY, name text NOT NULL, ytd numeric(14, 2) NOT NULL, version int NOT NULL);
CREATE TABLE district (w int, d int, next_o int NOT NULL, ytd numeric(14, 2) NOT NULL, version int NOT NULL,
    PRIMARY KEY (w, d));
CREATE TABLE customer (w int, d int, c int, name text NOT NULL, credit char(2) NOT NULL,
    balance numeric(14, 2) NOT NULL, paid numeric(14, 2) NOT NULL, payments int NOT NULL, deliveries int NOT NULL,
    data text, version int NOT NULL, PRIMARY KEY (w, d, c));
CREATE TABLE history (h bigserial PRIMARY KEY, w int, d int, c int, amount numeric(8, 2), at timestamptz);
CREATE TABLE orders (w int, d int, o int, c int, entered timestamptz, carrier int, lines int, version int NOT NULL,
    PRIMARY KEY (w, d, o));
CREATE INDEX ON orders (w, d, c, o);
CREATE TABLE new_order (w int, d int, o int, PRIMARY KEY (w, d, o));
CREATE TABLE order_line (w int, d int, o int, n int, item int, supplier int, quantity int, amount numeric(8, 2),
    delivered timestamptz, version int NOT NULL, PRIMARY KEY (w, d, o, n));
CREATE TABLE item (i int PRIMARY KEY, name text, price numeric(6, 2));
CREATE TABLE stock (w int, i int, quantity int, sold bigint, orders int, data text, version int NOT NULL,
    PRIMARY KEY (w, i));
"""
_ROWS = """
INSERT INTO warehouse SELECT w, 'warehouse ' || w, 0, 0 FROM generate_series(1, {warehouses}) w;
INSERT INTO district SELECT w, d, 1, 0, 0 FROM generate_series(1, {warehouses}) w, generate_series(1, {districts}) d;
INSERT INTO customer
    SELECT w, d, c, 'customer "' || c || '"', CASE WHEN c % 10 = 0 THEN 'BC' ELSE 'GC' END, -10, 10, 1, 0, NULL, 0
    FROM generate_series(1, {warehouses}) w, generate_series(1, {districts}) d, generate_series(1, {customers}) c;
INSERT INTO item SELECT i, E'item \\\\ ' || i, 1 + i % 100 FROM generate_series(1, {items}) i;
INSERT INTO stock SELECT w, i, 50, 0, 0, repeat('stock ', 5) || i, 0
    FROM generate_series(1, {warehouses}) w, generate_series(1, {items}) i;
"""
_FUNCTIONS = """
CREATE FUNCTION drawn(seed bigint, below int) RETURNS int IMMUTABLE LANGUAGE sql AS
    $$ SELECT (hashint8(seed) & 2147483647) % below $$;

CREATE FUNCTION add_lines(at_w int, at_d int, of_o int, first int, last int, seed int) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE line record;
BEGIN
    -- In the order of stock rows, so that new orders rarely wait for each other in a circle.
    FOR line IN
        SELECT n, 1 + drawn(seed * 16::bigint + n, {items}) AS item, 1 + drawn(seed * 17::bigint + n, 10) AS quantity,
            CASE WHEN drawn(seed * 19::bigint + n, 100) = 0 THEN 1 + at_w % {warehouses} ELSE at_w END AS supplier
        FROM generate_series(first, last) AS n ORDER BY supplier, item
    LOOP
        UPDATE stock SET quantity = stock.quantity - line.quantity + CASE WHEN stock.quantity > 20 THEN 0 ELSE 91 END,
            sold = sold + line.quantity, orders = orders + 1, version = version + 1
            WHERE w = line.supplier AND i = line.item;
        INSERT INTO order_line SELECT at_w, at_d, of_o, line.n, i, line.supplier, line.quantity, line.quantity * price,
            NULL, 0 FROM item WHERE i = line.item;
    END LOOP;
END $$;

CREATE FUNCTION new_order(at_w int, at_d int, by_c int, lines int, seed int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE new_o int;
BEGIN
    UPDATE district SET next_o = next_o + 1, version = version + 1 WHERE w = at_w AND d = at_d
        RETURNING next_o - 1 INTO new_o;
    INSERT INTO orders VALUES (at_w, at_d, new_o, by_c, now(), NULL, lines, 0);
    INSERT INTO new_order VALUES (at_w, at_d, new_o);
    PERFORM add_lines(at_w, at_d, new_o, 1, lines, seed);
    RETURN new_o;
END $$;

CREATE FUNCTION payment(at_w int, at_d int, by_c int, cents int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE money numeric := cents / 100.0; its_credit text;
BEGIN
    UPDATE warehouse SET ytd = ytd + money, version = version + 1 WHERE w = at_w;
    UPDATE district SET ytd = ytd + money, version = version + 1 WHERE w = at_w AND d = at_d;
    BEGIN
        UPDATE customer SET balance = balance - money, paid = paid + money, payments = payments + 1,
            version = version + 1 WHERE w = at_w AND d = at_d AND c = by_c RETURNING credit INTO its_credit;
        IF its_credit = 'BC' THEN RAISE EXCEPTION 'bad credit'; END IF;
    EXCEPTION WHEN raise_exception THEN  -- what the block did is rolled back, as to a savepoint
        UPDATE customer SET balance = balance - money, paid = paid + money, payments = payments + 1,
            version = version + 1, data = left(by_c || ' paid ' || money || E'\\n' || coalesce(data, ''), 400)
            WHERE w = at_w AND d = at_d AND c = by_c;
    END;
    INSERT INTO history (w, d, c, amount, at) VALUES (at_w, at_d, by_c, money, now());
END $$;

CREATE FUNCTION delivery(at_w int, by_carrier int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE oldest int; by_c int;
BEGIN
    FOR at_d IN 1..{districts} LOOP
        SELECT o INTO oldest FROM new_order WHERE w = at_w AND d = at_d ORDER BY o LIMIT 1 FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM new_order WHERE w = at_w AND d = at_d AND o = oldest;
        UPDATE orders SET carrier = by_carrier, version = version + 1 WHERE w = at_w AND d = at_d AND o = oldest
            RETURNING c INTO by_c;
        UPDATE order_line SET delivered = now(), version = version + 1 WHERE w = at_w AND d = at_d AND o = oldest;
        UPDATE customer SET deliveries = deliveries + 1, version = version + 1, balance = balance
            + (SELECT sum(amount) FROM order_line WHERE w = at_w AND d = at_d AND o = oldest)
            WHERE w = at_w AND d = at_d AND c = by_c;
    END LOOP;
END $$;
"""
_DRAW = """
\\set w random(1, {warehouses})
\\set d random(1, {districts})
\\set c random_zipfian(1, {customers}, 1.1)
\\set lines random(5, 15)
\\set seed random(1, 100000000)
"""
_SCRIPTS = {
    "new_order@40": "SELECT new_order(:w, :d, :c, :lines, :seed);",
    "changed_order@4": """BEGIN;
SELECT new_order(:w, :d, :c, :lines, :seed) AS o \\gset
SAVEPOINT choice;
SELECT add_lines(:w, :d, :o, :lines + 1, :lines + 2, :seed);
UPDATE orders SET lines = lines + 2, version = version + 1 WHERE w = :w AND d = :d AND o = :o;
ROLLBACK TO SAVEPOINT choice;
SELECT add_lines(:w, :d, :o, :lines + 1, :lines + 1, :seed);
UPDATE orders SET lines = lines + 1, version = version + 1 WHERE w = :w AND d = :d AND o = :o;
RELEASE SAVEPOINT choice;
COMMIT;""",
    "refused_order@2": """BEGIN;
SELECT new_order(:w, :d, :c, :lines, :seed);
ROLLBACK;""",
    "payment@43": "SELECT payment(:w, :d, :c, 100 + :seed % 500000);",
    "delivery@5": "SELECT delivery(:w, :lines);",
    "order_status@6": """SELECT balance FROM customer WHERE w = :w AND d = :d AND c = :c;
SELECT order_line.* FROM order_line JOIN (SELECT w, d, o FROM orders WHERE w = :w AND d = :d AND c = :c
    ORDER BY o DESC LIMIT 1) AS latest USING (w, d, o);""",
}
_REPORT = re.compile(
    r"^number of transactions actually processed: (?P<count>\d+).*"
    r"^number of failed transactions: 0 .*^tps = (?P<rate>[\d.]+)",
    re.MULTILINE | re.DOTALL,
)
_LAST = {"i": 0, "name": "the last row", "price": "0.00"}


Tables = dict[str, dict[tuple[str | None, ...], dict[str, str | None]]]
"""Rows by table and primary key."""


class LoadReport(NamedTuple):
    transactions: int
    per_s: float


@dataclass(frozen=True)
class TpccLoad:
    """The load on one database. ``prepare`` creates the tables and their first rows."""

    database: PostgresDatabase
    warehouses: int = 2
    customers: int = 100
    items: int = 1000

    def prepare(self) -> int:
        """Returns the number of rows."""
        sizes = self._sizes()
        self.database.execute(_TABLES, _ROWS.format(**sizes), _FUNCTIONS.format(**sizes))
        return sum(self.database.execute(f"SELECT count(*) FROM {table}")[0][0] for table in KEYS)

    def run(self, *, seed: int, transactions: int | None = None, seconds: int | None = None) -> LoadReport:
        """Runs as many transactions as PostgreSQL can do: ``transactions`` of them, or for ``seconds``. Those that are
        rolled back and those that only read count too."""
        with tempfile.TemporaryDirectory(prefix="millstream-tpcc-") as directory:
            server = self.database.server
            command = [str(server.binaries / "pgbench"), "--no-vacuum", "--protocol=prepared", "--max-tries=1000"]
            command += [f"--host={server.directory}", f"--port={server.port}", "--username=postgres"]
            command += [f"--client={CLIENTS}", "--jobs=2", f"--random-seed={seed}"]
            command.append(
                f"--transactions={-(-(transactions or 0) // CLIENTS)}" if seconds is None else f"--time={seconds}"
            )
            for name, script in _SCRIPTS.items():
                title, weight = name.split("@")
                path = Path(directory, f"{title}.sql")
                path.write_text(_DRAW.format(**self._sizes()) + script + "\n")
                command.append(f"--file={path}@{weight}")
            # A changed order can deadlock with another one; pgbench retries it.
            environment = {**os.environ, "PGOPTIONS": "-c deadlock_timeout=20ms"}
            done = subprocess.run(
                [*command, self.database.name], capture_output=True, text=True, check=False, env=environment
            )
        report = _REPORT.search(done.stdout)
        if done.returncode or report is None:
            raise RuntimeError(f"pgbench failed: {done.stdout} {done.stderr[-2000:]}")
        return LoadReport(int(report["count"]), float(report["rate"]))

    def write_last(self) -> None:
        """Commits the last change. Once it is in the stream, so is everything before."""
        self.database.execute(f"INSERT INTO item VALUES (0, '{_LAST['name']}', 0)")

    def tables(self) -> Tables:
        """All rows, as texts in the form that the log has."""
        options = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        stored: Tables = {}
        with self.database.connect(options=options) as connection:
            for table, key in KEYS.items():
                cursor = connection.execute(f"SELECT * FROM public.{table} LIMIT 0")
                names = [column.name for column in cursor.description or ()]
                texts = ", ".join(f"{name}::text" for name in names)
                rows = connection.execute(f"SELECT {texts} FROM public.{table}")
                named = [dict(zip(names, row, strict=True)) for row in rows]
                stored[table] = {tuple(row[name] for name in key): row for row in named}
        return stored

    def _sizes(self) -> dict[str, int]:
        sizes = {"warehouses": self.warehouses, "customers": self.customers, "items": self.items}
        return {**sizes, "districts": DISTRICTS}


class Change(NamedTuple):
    """A change event. ``id`` is ``<source>:<lsn>:<number in the transaction>``."""

    id: str
    op: str
    table: str
    key: str
    after: dict[str, Any] | None

    @property
    def place(self) -> tuple[int, int]:
        _, lsn, number = self.id.split(":")
        return int(lsn), int(number)

    @property
    def is_last(self) -> bool:
        return self.table == "item" and self.after == _LAST


@dataclass
class TpccLedger:
    """Rebuilds the tables from their changes, and collects every fault that it finds on the way in ``faults``.

    Checked at each change: ids have no gap and follow the order of commits; a new row is new, any other one exists;
    an update has the next version. Checked after each transaction: three of TPC-C's consistency conditions. Checked at
    the end: every row equals the table's.
    """

    faults: list[str] = field(default_factory=list)
    changes: int = 0
    transactions: int = 0
    _rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=lambda: {table: {} for table in KEYS})
    _place: tuple[int, int] = (0, 0)
    _takings: Counter[int] = field(default_factory=Counter)
    """Of the districts of each warehouse, in cents."""
    _lines: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Rows of ``order_line`` by order."""
    _touched: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rows of ``warehouse`` and ``orders`` that the current transaction wrote, by table and key."""

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if len(self.faults) >= MAX_FAULTS:
                return
            if change.op != "r":
                self._check_place(change)
            self._apply(change)

    def compare(self, stored: Tables) -> None:
        """Compares with what the database has stored. Call it when the whole stream is applied."""
        self._end_transaction()
        for table, key in KEYS.items():
            texts = [{name: _text(value) for name, value in row.items()} for row in self._rows[table].values()]
            rebuilt = {tuple(row[name] for name in key): row for row in texts}
            for row_key in stored[table].keys() | rebuilt.keys():
                expected, row = stored[table].get(row_key), rebuilt.get(row_key)
                if expected != row:
                    self._fault(f"{table} {row_key}: the table has {expected}, the stream {row}")

    def _fault(self, text: str) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(text)

    def _check_place(self, change: Change) -> None:
        place, before = change.place, self._place
        if place[0] != before[0]:
            self._end_transaction()
            self.transactions += 1
        expected = place == (before[0], before[1] + 1) or (place[0] > before[0] and place[1] == 0)
        if not expected:
            self._fault(f"{change.id}: follows {before}")
        self._place = place

    def _apply(self, change: Change) -> None:
        self.changes += 1
        rows = self._rows[change.table]
        row = rows.get(change.key)
        if change.op in ("c", "r"):
            if row is not None:
                self._fault(f"{change.id}: {change.table} {change.key} exists")
        elif row is None:
            self._fault(f"{change.id}: {change.table} {change.key} does not exist")
        elif change.after is not None and change.after["version"] != row["version"] + 1:
            self._fault(f"{change.id}: {change.table} {change.key} goes from {row} to {change.after}")
        self._note(change, row)
        if change.after is None:
            rows.pop(change.key, None)
        else:
            rows[change.key] = {**(row or {}), **change.after}

    def _note(self, change: Change, before: dict[str, Any] | None) -> None:
        """Updates the sums from which the consistency conditions are computed."""
        after = change.after
        if after is None:
            return
        if change.table == "district":
            self._takings[after["w"]] += _cents(after["ytd"]) - (0 if before is None else _cents(before["ytd"]))
        elif change.table == "order_line" and before is None:
            self._lines[after["w"], after["d"], after["o"]] += 1
        elif change.table in ("warehouse", "orders") and change.op != "r":
            self._touched[f"{change.table}{change.key}"] = {"table": change.table, "inserted": before is None, **after}

    def _end_transaction(self) -> None:
        for row in self._touched.values():
            if row["table"] == "warehouse":
                if _cents(row["ytd"]) != self._takings[row["w"]]:
                    self._fault(f"after {self._place}: {row} does not have the sum of its districts")
                continue
            if self._lines[row["w"], row["d"], row["o"]] != row["lines"]:
                self._fault(f"after {self._place}: {row} does not have its lines")
            district = self._rows["district"].get(f'{{"w":{row["w"]},"d":{row["d"]}}}')
            if row["inserted"] and (district is None or district["next_o"] != row["o"] + 1):
                self._fault(f"after {self._place}: {row} is not the last order of {district}")
        self._touched.clear()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _cents(amount: str) -> int:
    return int(Decimal(amount) * 100)
