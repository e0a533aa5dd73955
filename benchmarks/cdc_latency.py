"""The time from a commit in PostgreSQL to its entry in Redis, at 100 transactions a second, through a pipeline."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time

from benchmarks import Progress, Result
from benchmarks.pipeline_command import STREAM, PipelineCommand, postgres_to_redis, running
from millstream.testing import PostgresDatabase, PostgresProcess, RedisProcess

PER_S = 100
WARM_UP_S = 30
"""After the first entry. Java compiles its code meanwhile."""
MEASURED_S = 30
SEEN_WITHIN_S = 30


def run(rounds: int, progress: Progress) -> list[Result]:
    """One pipeline, and ``rounds`` times ``MEASURED_S`` seconds of transactions."""
    with (
        tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch,
        PostgresProcess() as postgres,
        RedisProcess() as redis,
    ):
        database = postgres.fresh_database()
        database.execute(
            "CREATE TABLE stock (id int PRIMARY KEY, sold int)",
            "CREATE TABLE orders (id int PRIMARY KEY, customer int, amount numeric(10, 2), status text, note text)",
            "INSERT INTO stock SELECT i, 0 FROM generate_series(0, 99) AS i",
        )
        with running(postgres_to_redis(database, redis, scratch, "public.*"), scratch) as pipeline:
            observer = Observer(redis)
            observer.start()
            clock = CommitClock(database)
            progress("starting the pipeline")
            clock.write(1)
            observer.wait_for(clock, pipeline)
            progress(f"warming up for {WARM_UP_S} s")
            clock.write(WARM_UP_S * PER_S)
            observer.wait_for(clock, pipeline)
            windows: list[list[float]] = []
            for number in range(1, rounds + 1):
                progress(f"{PER_S} transactions/s for {MEASURED_S} s, {number} of {rounds}")
                first = len(clock.committed_at)
                clock.write(MEASURED_S * PER_S)
                observer.wait_for(clock, pipeline)
                windows.append(observer.latencies_ms(clock, first))
            observer.stop()
    return [
        Result("cdc_latency_p50_ms", _percentile(windows, 50), f"ms ({PER_S} transactions/s)", goal="<= 150"),
        Result("cdc_latency_p99_ms", _percentile(windows, 99), f"ms ({PER_S} transactions/s)", goal="<= 400"),
    ]


def _percentile(windows: list[list[float]], percent: int) -> float:
    """The median over the windows."""
    return statistics.median(statistics.quantiles(window, n=100)[percent - 1] for window in windows)


class CommitClock:
    """Commits transactions of two changes at an even rate. The last change is a new order, whose id is its number."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self.committed_at: list[float] = []

    def write(self, count: int) -> None:
        with self._database.connect(autocommit=False) as connection:
            due = time.perf_counter()
            for number in range(len(self.committed_at), len(self.committed_at) + count):
                connection.execute("UPDATE stock SET sold = sold + 1 WHERE id = %s", (number % 100,))
                order = (number, number % 1000, f"order number {number}")
                connection.execute("INSERT INTO orders VALUES (%s, %s, 9.90, 'new', %s)", order)
                connection.commit()
                self.committed_at.append(time.perf_counter())
                due += 1 / PER_S
                time.sleep(max(0.0, due - time.perf_counter()))


class Observer(threading.Thread):
    """Waits for entries in a blocking XREAD, and notes when each order's entry was read."""

    def __init__(self, redis: RedisProcess) -> None:
        super().__init__(daemon=True)
        self._port = redis.port
        self._ending = threading.Event()
        self._seen_at: dict[int, float] = {}

    def run(self) -> None:
        import redis

        last = b"0"
        with redis.Redis(port=self._port, protocol=2) as client:
            while not self._ending.is_set():
                reply = client.xread({STREAM: last}, block=500)
                now = time.perf_counter()
                for _, entries in reply:
                    last = entries[-1][0]
                    for _, fields in entries:
                        event = json.loads(fields[b"event"])
                        if event["source"]["table"] == "orders":
                            assert self._seen_at.setdefault(event["after"]["id"], now) == now, "an entry came twice"

    def wait_for(self, clock: CommitClock, pipeline: PipelineCommand) -> None:
        """Waits until every committed order was read."""
        count = len(clock.committed_at)
        pipeline.wait_until(lambda: len(self._seen_at) >= count, what=f"{count} orders in Redis")

    def latencies_ms(self, clock: CommitClock, first: int) -> list[float]:
        return [
            (self._seen_at[number] - clock.committed_at[number]) * 1000
            for number in range(first, len(clock.committed_at))
        ]

    def stop(self) -> None:
        self._ending.set()
        self.join()
