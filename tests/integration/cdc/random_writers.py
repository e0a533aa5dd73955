"""Random writers: change tables like an application, until they are stopped."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import psycopg
import pymysql

from millstream.testing import MariadbDatabase, PostgresDatabase

TABLES = (
    # Keys in an order that is not that of bytes; the whole old row in the log.
    'CREATE TABLE words (word text COLLATE "en-x-icu" PRIMARY KEY, n int, note text)',
    "ALTER TABLE words REPLICA IDENTITY FULL",
    "CREATE TABLE pairs (a int, b text, n int, PRIMARY KEY (b, a))",
)
MARIADB_TABLES = (
    # Keys that differ in case are the same to the server: a change from one to the other is still a change of the key.
    "CREATE TABLE words (word varchar(20) COLLATE utf8mb4_unicode_ci PRIMARY KEY, n int, note text)",
    "CREATE TABLE pairs (a int, b varchar(9), n int, PRIMARY KEY (b, a))",
)
LETTERS = "aAbBcCéÉzZ_9"


class Writers:
    """``allowed``: how many transactions they may begin until ``go_on`` allows more, so that a slow follower is never
    further behind than that; None: no limit.

    ``pause_s``: between two transactions of a writer.
    """

    def __init__(
        self,
        database: PostgresDatabase,
        seed: int,
        *,
        count: int = 3,
        truncate: bool = True,
        pause_s: float = 0,
        allowed: int | None = None,
    ) -> None:
        self._database = database
        self._stop = threading.Event()
        self._truncate = truncate
        self._pause_s = pause_s
        self._turn = threading.Condition()
        self._allowed, self._begun = allowed, 0
        self.transactions = 0
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{number}"), number), daemon=True)
            for number in range(count)
        ]

    def start(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def go_on(self, transactions: int) -> None:
        """Allows this many further transactions; unused earlier ones are not added."""
        with self._turn:
            self._allowed = self._begun + transactions
            self._turn.notify_all()

    def spent(self) -> bool:
        """Whether all allowed transactions were begun. Raises the error that ended a writer."""
        if self.errors:
            raise self.errors[0]
        with self._turn:
            return self._begun == self._allowed

    def stop(self) -> None:
        """Stops after the current transactions."""
        with self._turn:
            self._stop.set()
            self._turn.notify_all()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]

    def _may_begin(self) -> bool:
        """Waits until a transaction is allowed. Returns False if the writers are to stop."""
        with self._turn:
            self._turn.wait_for(lambda: self._stop.is_set() or self._allowed is None or self._begun < self._allowed)
            self._begun += 1
            return not self._stop.is_set()

    def _run(self, chance: random.Random, number: int) -> None:
        while not self._stop.is_set():
            try:
                with self._database.connect(autocommit=False) as connection:
                    while self._may_begin():
                        self._transaction(connection, chance, number)
                        self._stop.wait(self._pause_s)
            except psycopg.OperationalError:
                time.sleep(0.1)  # the server is being killed; what was not confirmed may have happened or not
            except BaseException as error:
                self.errors.append(error)
                return

    def _transaction(self, connection: psycopg.Connection[Any], chance: random.Random, number: int) -> None:
        try:
            for _ in range(chance.choice([1, 1, 2, 5, 20])):
                if chance.random() < 0.15:
                    connection.execute("SAVEPOINT here")
                    self._change(connection, chance)
                    connection.execute(chance.choice(["ROLLBACK TO here", "RELEASE here"]))
                else:
                    self._change(connection, chance)
            if self._truncate and chance.random() < 0.01:
                connection.execute(chance.choice(["TRUNCATE words", "TRUNCATE pairs", "TRUNCATE words, pairs"]))
            if number == 0 and chance.random() < 0.02:
                connection.execute("ALTER TABLE pairs ADD COLUMN IF NOT EXISTS extra text DEFAULT 'x'")
            elif number == 0 and chance.random() < 0.02:
                connection.execute("ALTER TABLE pairs DROP COLUMN IF EXISTS extra")
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.05)
            if chance.random() < 0.1:
                connection.rollback()
            else:
                connection.commit()
                self.transactions += 1
        except (
            psycopg.errors.UniqueViolation,
            psycopg.errors.DeadlockDetected,
            psycopg.errors.FeatureNotSupported,
            psycopg.errors.InFailedSqlTransaction,
        ):
            connection.rollback()

    def _change(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        value = "".join(chance.choice(LETTERS) for _ in range(2))
        a, b, n = chance.randrange(12), chance.choice(LETTERS), chance.randrange(1000)
        note = chance.choice(["", "x" * chance.randrange(20), '"\\\n', None])
        statements: list[tuple[str, tuple[Any, ...]]] = [
            ("INSERT INTO words VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (value, n, note)),
            ("INSERT INTO words VALUES (%s, %s, %s) ON CONFLICT (word) DO UPDATE SET n = excluded.n", (value, n, note)),
            ("UPDATE words SET n = n + 1, note = %s WHERE word = %s", (note, value)),
            ("UPDATE words SET word = %s WHERE word = (SELECT min(word) FROM words)", (value,)),
            ("DELETE FROM words WHERE word = %s", (value,)),
            ("INSERT INTO pairs (a, b, n) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (a, b, n)),
            ("UPDATE pairs SET n = %s WHERE a = %s AND b = %s", (n, a, b)),
            ("UPDATE pairs SET a = (a + %s) %% 12 WHERE b = %s AND n %% 7 = 0 AND a = %s", (n, b, a)),
            ("DELETE FROM pairs WHERE a = %s AND b = %s", (a, b)),
        ]
        statement, values = chance.choice(statements)
        connection.execute(statement, values)


class MariadbWriters(Writers):
    """As ``Writers``, on MariaDB, where a change of a table commits the open transaction."""

    _HARMLESS = frozenset((1062, 1213, 1205, 1412, 1020, 1060, 1091, 1305))
    """A duplicate key, a deadlock, a changed table: errors that every application must expect."""
    _database: MariadbDatabase
    truncating = threading.Lock()
    """Held during a TRUNCATE, and by the code that kills the server."""

    def _run(self, chance: random.Random, number: int) -> None:
        while not self._stop.is_set():
            try:
                # A row lock and a table lock can deadlock undetected, until one of the statements times out.
                impatient = "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1"
                connection = self._database.connect(autocommit=False, init_command=impatient)
                with connection, connection.cursor() as cursor:
                    while self._may_begin():
                        self._one(connection, cursor, chance, number)
                        self._stop.wait(self._pause_s)
            except (pymysql.err.OperationalError, pymysql.err.InterfaceError):
                time.sleep(0.1)  # the server is being killed; what was not confirmed may have happened or not
            except BaseException as error:
                self.errors.append(error)
                return

    def _one(self, connection: Any, cursor: Any, chance: random.Random, number: int) -> None:
        try:
            for _ in range(chance.choice([1, 1, 2, 5, 20])):
                if chance.random() < 0.15:
                    cursor.execute("SAVEPOINT here")
                    self._write(cursor, chance)
                    cursor.execute(chance.choice(["ROLLBACK TO here", "RELEASE SAVEPOINT here"]))
                else:
                    self._write(cursor, chance)
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.05)
            if chance.random() < 0.1:
                connection.rollback()
            else:
                connection.commit()
                self.transactions += 1
            if self._truncate and chance.random() < 0.01:
                with self.truncating:
                    cursor.execute(chance.choice(["TRUNCATE words", "truncate table `pairs` -- all of it"]))
            if number == 0 and chance.random() < 0.02:
                cursor.execute("ALTER TABLE pairs ADD COLUMN IF NOT EXISTS extra varchar(9) DEFAULT 'x'")
            elif number == 0 and chance.random() < 0.02:
                cursor.execute("ALTER TABLE pairs DROP COLUMN IF EXISTS extra")
            elif number == 0 and chance.random() < 0.02:
                cursor.execute("FLUSH BINARY LOGS")
        except pymysql.err.MySQLError as error:
            if error.args[0] not in self._HARMLESS:
                raise
            connection.rollback()

    def _write(self, cursor: Any, chance: random.Random) -> None:
        value = "".join(chance.choice(LETTERS) for _ in range(2))
        a, b, n = chance.randrange(12), chance.choice(LETTERS), chance.randrange(1000)
        note = chance.choice(["", "x" * chance.randrange(20), '"\\\n', None])
        statements: list[tuple[str, tuple[Any, ...]]] = [
            ("INSERT IGNORE INTO words VALUES (%s, %s, %s)", (value, n, note)),
            ("INSERT INTO words VALUES (%s, %s, %s) ON DUPLICATE KEY UPDATE n = VALUES(n)", (value, n, note)),
            ("REPLACE INTO words VALUES (%s, %s, %s)", (value, n, note)),
            ("UPDATE words SET n = n + 1, note = %s WHERE word = %s", (note, value)),
            ("UPDATE IGNORE words SET word = %s ORDER BY word LIMIT 1", (value,)),
            ("DELETE FROM words WHERE word = %s", (value,)),
            ("INSERT IGNORE INTO pairs (a, b, n) VALUES (%s, %s, %s)", (a, b, n)),
            ("UPDATE pairs SET n = %s WHERE a = %s AND b = %s", (n, a, b)),
            ("UPDATE IGNORE pairs SET a = (a + %s) %% 12 WHERE b = %s AND n %% 7 = 0", (n, b)),
            ("DELETE FROM pairs WHERE a = %s AND b = %s", (a, b)),
        ]
        cursor.execute(*chance.choice(statements))
