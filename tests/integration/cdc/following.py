"""Does what Spark does: plans a batch, logs its end, reads it, commits. It may die between any two of these steps.

After a restart it has what Spark has: the log of planned batches and the log of committed ones.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from millstream.cdc.mariadb.database import Mariadb, mariadb_options
from millstream.cdc.postgres.database import Postgres, change_options
from millstream.cdc.reader import ChangesReader
from millstream.testing import MariadbDatabase, PostgresDatabase

Event = dict[str, Any]


class Follower:
    def __init__(self, database: PostgresDatabase | MariadbDatabase, segments: Path, **options: str) -> None:
        if isinstance(database, PostgresDatabase):
            own = {"tables": "public.*", "slot": f"slot_{database.name}", "publication": "pub", "create": "true"}
        else:
            own = {"tables": "*"}
        self.options = {**own, "dsn": database.dsn, "segments": str(segments), "sourceName": "s"}
        self.options |= {"segmentsShared": "true", **options}
        self.database = database
        self.pair_key = ("a", "b") if isinstance(database, PostgresDatabase) else ("b", "a")
        """The key columns of the writers' table in the order of a key's JSON, which is that of the table or of the
        key."""
        self.planned: list[Any] = []
        self.committed = 0
        self.start: Any = None
        self.reader = self._new_reader()

    def _new_reader(self, **changed: str) -> ChangesReader:
        options = self.options | changed
        if isinstance(self.database, PostgresDatabase):
            return ChangesReader(Postgres(change_options(options)))
        return ChangesReader(Mariadb(mariadb_options(options)))

    def die(self) -> None:
        """Restarts the reader, as after a kill. Both of Spark's logs survive."""
        self.reader.stop()
        self.reader = self._new_reader()

    def plan(self, limit: int | None = None) -> bool:
        """Returns whether there is a batch to run. A batch that was planned before a restart is replayed."""
        if len(self.planned) > self.committed:
            return True
        if self.start is None:
            self.start = self.reader.initialOffset()
        start = self.planned[-1] if self.planned else self.start
        read_limit: ReadLimit = ReadAllAvailable() if limit is None else ReadMaxRows(limit)
        end = self.reader.latestOffset(start, read_limit)
        if end is start:
            return False
        assert end != start
        self.planned.append(end)
        return True

    def read(self) -> list[Event]:
        """The planned batch, partition by partition."""
        # Spark asks for the first offset again whenever it plans the first batch.
        start = self.planned[-2] if len(self.planned) > 1 else self.reader.initialOffset()
        partitions = self.reader.partitions(start, self.planned[-1])
        reader = self.reader
        if self.options["segmentsShared"] == "false":
            # As on another host: the directory does not exist, and all data is in the partitions.
            reader = self._new_reader(segments=str(Path(self.options["segments"], "another-host")))
            partitions = pickle.loads(pickle.dumps(partitions))
        return [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()]

    def commit(self) -> None:
        self.committed = len(self.planned)

    def batch(self, limit: int | None = None) -> list[Event] | None:
        if not self.plan(limit):
            return None
        rows = self.read()
        self.commit()
        return rows

    def drain(self, limit: int | None = None) -> list[Event]:
        """Reads to the current end of the log, like ``--once``."""
        self.reader.prepareForTriggerAvailableNow()
        events: list[Event] = []
        while (rows := self.batch(limit)) is not None:
            events += rows
        return events

    def stop(self) -> None:
        self.reader.stop()


class DyingFollower(Follower):
    """Dies at random: before a batch is read, and after it was read but not committed; its rows must be sent again."""

    def __init__(self, *args: Any, chance: random.Random, **options: str) -> None:
        super().__init__(*args, **options)
        self._chance = chance
        self.deaths = 0

    def batch(self, limit: int | None = None) -> list[Event] | None:
        if not self.plan(limit):
            return None
        rows: list[Event] | None = None
        for _ in range(3):
            if self._chance.random() < 0.3:
                self._die()
            repeated = self.read()
            assert rows is None or repeated == rows, "a replayed batch has the same rows in the same order"
            rows = repeated
            if self._chance.random() < 0.6:
                break
            self._die()
        self.commit()
        return rows

    def _die(self) -> None:
        self.deaths += 1
        ending = self.reader._planner is not None and self.reader._planner._target is not None
        self.die()
        if self._chance.random() < 0.3:
            for path in Path(self.options["segments"]).glob("0*.seg"):
                path.unlink()  # the read-ahead log can be read from the database again
        if ending:
            self.reader.prepareForTriggerAvailableNow()
