"""The processes of the demo: broker, dashboard, pipeline and workers.

For a demo with PostgreSQL also a shop database, with rows for the snapshot and changes while the pipeline runs.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

from millstream.errors import MillstreamError
from millstream.testing import PostgresProcess, postgres_binaries


class Stage:
    """The processes of the demo. ``with Stage(...)`` terminates those that are still running."""

    def __init__(self, data: Path, tag: str, rows: int) -> None:
        self.data = data.absolute()
        self.tag = tag
        self.rows = rows
        self.url = ""
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.pipeline: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._server: subprocess.Popen[str] | None = None
        self._dashboard: subprocess.Popen[str] | None = None

    def serve(self) -> None:
        """Start an embedded broker with a journal, served to the other processes."""
        command = [sys.executable, "-m", "millstream", "serve", "--port", "0", "--dir", str(self.data / "broker")]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log("serve"), text=True)
        assert self._server.stdout is not None
        ready_line = self._server.stdout.readline()
        match = re.search(r"redis://[^ ]*:\d+", ready_line)
        if match is None:
            raise MillstreamError(f"the broker did not start; see {self.data / 'serve.log'}")
        self.url = match[0]

    def start_dashboard(self) -> str:
        """Start a dashboard, and return its URL; empty if it did not start."""
        command = [sys.executable, "-m", "millstream", "dashboard", "--port", "0"]
        environment = {**os.environ, "MILLSTREAM_URL": self.url}
        self._dashboard = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log("dashboard"), text=True, env=environment
        )
        assert self._dashboard.stdout is not None
        match = re.search(r"http://\S+", self._dashboard.stdout.readline())
        return match[0] if match else ""

    def start_workers(self, count: int) -> None:
        for number in range(1, count + 1):
            name = f"worker-{number}"
            command = [sys.executable, "-m", "millstream.demo.worker", self.tag, name, str(self.start_log(name))]
            environment = {**os.environ, "MILLSTREAM_URL": self.url}
            self.workers[name] = subprocess.Popen(command, env=environment, stderr=self._log(name))

    def start_pipeline(self, dsn: str | None = None) -> None:
        """Start the pipeline. With ``dsn`` it follows that database until stopped; else it generates rows."""
        spec = self.data / "shop.yaml"
        name = "shop.yaml" if dsn is None else "shop-postgres.yaml"
        template = (files("millstream.demo") / name).read_text(encoding="utf-8")
        text = fill_template(template, url=self.url, tag=self.tag, rows=self.rows, data=self.data)
        spec.write_text(text, encoding="utf-8")
        environment = {
            **os.environ,
            "DEMO_URL": self.url,
            "DEMO_DSN": dsn or "",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        }
        command = [sys.executable, "-m", "millstream", "pipeline", "run", str(spec), "--http-port", "0"]
        command += ["--once"] if dsn is None else []
        log = self._log("pipeline")
        self.pipeline = subprocess.Popen(command, cwd=self.data, env=environment, stdout=log, stderr=log)

    def pipeline_ended(self) -> bool:
        """Whether the pipeline has ended; raises MillstreamError if it failed."""
        assert self.pipeline is not None
        code = self.pipeline.poll()
        if code:
            tail = (self.data / "pipeline.log").read_text(errors="replace")[-1500:]
            raise MillstreamError(
                f"the pipeline ended with {code}. Its log, {self.data / 'pipeline.log'}, ends:\n{tail}"
            )
        return code == 0

    def end_pipeline(self) -> None:
        """Stop the pipeline after its current batch. Signals only once, because a second signal would kill it."""
        if not self._is_stopping and self.pipeline is not None:
            self._is_stopping = True
            self.pipeline.terminate()

    def start_log(self, worker: str) -> Path:
        return self.data / f"{worker}.starts"

    def starts(self, worker: str) -> int:
        log = self.start_log(worker)
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def kill(self, worker: str) -> None:
        self.workers[worker].kill()
        self.workers[worker].wait()

    def _log(self, name: str) -> int:
        return os.open(self.data / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [self._dashboard, *self.workers.values(), self.pipeline, self._server]
        for process in running:
            if process is not None and process.poll() is None:
                process.terminate()
        for process in running:
            if process is not None:
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def fill_template(template: str, *, url: str, tag: str, rows: int, data: Path) -> str:
    """Fill the template of the pipeline's file, which can then be run on its own.

    URLs that may contain a password stay environment variables; a comment in the file shows how to set them.
    """
    values = {"DEMO_TAG": tag, "DEMO_ROWS": str(rows), "DEMO_DATA": str(data)}
    if "@" not in url and "?" not in url:
        values["DEMO_URL"] = url
    for name, value in values.items():
        template = template.replace(f"${{{name}}}", json.dumps(value, ensure_ascii=False)[1:-1])
    secrets = [name for name in ("DEMO_URL", "DEMO_DSN") if f"${{{name}}}" in template]
    command = " ".join([*(f"{name}=..." for name in secrets), "millstream pipeline run shop.yaml"])
    note = " URLs may contain passwords, so they are environment variables:" if secrets else ""
    return f"# Run it, while the demo's servers run:{note} {command}\n{template}"


TABLES = ("customers", "orders", "payments")
GROUP = "fulfilment"
POISON = "poison"


def topics(tag: str) -> list[str]:
    return [f"{tag}.{table}" for table in TABLES]


def results(tag: str) -> str:
    """The stream of the workers' results."""
    return f"{tag}.done"


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
_PAUSE_S = 0.01


class ShopDatabase:
    """A PostgreSQL server with a shop that produces exactly ``rows`` events.

    Half of them are rows of the snapshot. The others are changes by a thread, which starts after the snapshot has
    arrived, so that every change is one event.
    """

    def __init__(self, rows: int) -> None:
        if postgres_binaries() is None:
            raise MillstreamError("PostgreSQL is not installed: run `make setup`, or leave SOURCE=postgres out.")
        self._server = PostgresProcess()
        self._rows_per_table = rows // 6
        self.expected = rows
        self._changes = rows - 3 * self._rows_per_table
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._change, name="millstream-shop", daemon=True)
        self._written = threading.Event()

    @property
    def dsn(self) -> str:
        return self._server.main.dsn

    def start(self) -> None:
        self._server.start()
        self._server.main.execute(*_TABLES, *(statement.format(n=self._rows_per_table) for statement in _FILL))

    def update(self, arrived: int) -> bool:
        """Start the changes once the snapshot has arrived. Returns whether all events have arrived."""
        if arrived >= 3 * self._rows_per_table and self._thread.ident is None:
            self._thread.start()
        return self._written.is_set() and arrived >= self.expected

    def _change(self) -> None:
        chance, remaining, next_id = random.Random(7), self._changes, self._rows_per_table + 1  # noqa: S311  # not used for security
        with self._server.main.connect(autocommit=False) as connection:
            while remaining and not self._stop.is_set():
                for _ in range(min(remaining, chance.randrange(1, 12))):
                    kind = chance.randrange(4)
                    if kind == 0:
                        connection.execute("INSERT INTO payments VALUES (%s, %s, %s)", (next_id, 1, 9.99))
                        next_id += 1
                    elif kind == 1:
                        connection.execute("INSERT INTO orders VALUES (%s, %s, %s, 'new')", (next_id, 1, 5))
                        next_id += 1
                    else:
                        order_id = chance.randrange(1, self._rows_per_table + 1)
                        connection.execute(
                            "UPDATE orders SET status = 'paid ' || %s WHERE id = %s", (remaining, order_id)
                        )
                    remaining -= 1
                connection.commit()
                time.sleep(_PAUSE_S)
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
