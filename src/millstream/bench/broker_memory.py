"""Resident memory per entry, ours in a process of its own against redis-server's, at a million entries."""

from __future__ import annotations

import subprocess
import sys

import redis

from millstream.bench.result import Progress, Result
from millstream.testing import RedisProcess

ENTRIES = 1_000_000
SHAPES = {
    "memory_85b": ([(b"event", b"x" * 85)], "<= 2 x"),
    "memory_5x20b": ([(b"field-%d" % n, b"%020d" % (n * 7919) + b"") for n in range(5)], "<= 3 x"),
}

_OURS = """
import sys
from millstream.bench.broker_memory import SHAPES, ENTRIES, resident_bytes
from millstream.engine import Engine
fields = [word for pair in SHAPES[sys.argv[1]][0] for word in pair]
engine = Engine()
session = engine.session(trusted=True)
before = resident_bytes("self")
for n in range(ENTRIES):
    words = [bytes(bytearray(word)) for word in fields]  # fresh objects, as they arrive from a socket
    engine.execute(session, (b"XADD", b"s", b"*", *words), 1_700_000_000_000 + n // 50)
print((resident_bytes("self") - before) / ENTRIES)
"""


def resident_bytes(pid: int | str) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def run(progress: Progress) -> list[Result]:
    results = []
    for name, (fields, goal) in SHAPES.items():
        progress(f"resident memory of a million entries, {name}")
        ours = float(
            subprocess.run([sys.executable, "-c", _OURS, name], capture_output=True, text=True, check=True).stdout
        )
        results.append(Result(name, ours, "bytes/entry", "redis-server", _theirs(fields), goal))
    return results


def _theirs(fields: list[tuple[bytes, bytes]]) -> float:
    with RedisProcess() as server:
        client, pid = redis.Redis(port=server.port), server.pid
        before = resident_bytes(pid)
        pipeline = client.pipeline(transaction=False)
        for n in range(ENTRIES):
            pipeline.xadd("s", dict(fields), id=f"{1_700_000_000_000 + n // 50}-{n % 50}")
            if n % 5000 == 4999:
                pipeline.execute()
        pipeline.execute()
        return (resident_bytes(pid) - before) / ENTRIES
