"""Does an operation cost more on a long stream than on a short one? ``flat_cost`` is the worst growth of any."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from millstream.bench.result import Progress, Result
from millstream.engine import Engine

SHORT, LONG = 1_000, 5_000_000
STEP = 100
ROUNDS = 300


def run(progress: Progress) -> list[Result]:
    short = _costs(SHORT, progress)
    long = _costs(LONG, progress)
    growth = {name: long[name] / short[name] for name in short}
    worst = max(growth, key=lambda name: growth[name])
    progress("growth from 1,000 to 5,000,000 entries: " + ", ".join(f"{k} {v:.2f}" for k, v in growth.items()))
    return [Result("flat_cost", growth[worst], f"x ({worst})", goal="<= 1.5")]


def _costs(size: int, progress: Progress) -> dict[str, float]:
    """The median seconds of each operation on a stream that is kept at ``size`` entries."""
    progress(f"the cost of each operation on a stream of {size:,} entries")
    engine = Engine()
    session = engine.session(trusted=True)

    def call(*args: bytes) -> object:
        reply = engine.execute(session, args, time.time_ns() // 1_000_000)
        assert not isinstance(reply, Exception), reply
        return reply

    payload = b"x" * 85
    for number in range(1, size + 1):
        call(b"XADD", b"s", b"%d-0" % number, b"event", payload)
    middle = b"%d-0" % (size // 2)
    call(b"XGROUP", b"CREATE", b"s", b"g", b"$")
    taken: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> object:
        began = time.perf_counter()
        result = work()
        taken.setdefault(name, []).append(time.perf_counter() - began)
        return result

    next_id = size + 1
    for _ in range(ROUNDS):
        ids = [b"%d-0" % number for number in range(next_id, next_id + STEP)]
        next_id += STEP
        timed("xadd", lambda ids=ids: [call(b"XADD", b"s", i, b"event", payload) for i in ids])  # type: ignore[misc]
        timed("xrange", lambda: call(b"XRANGE", b"s", middle, b"+", b"COUNT", b"100"))
        timed("xreadgroup", lambda: call(b"XREADGROUP", b"GROUP", b"g", b"c", b"COUNT", b"100", b"STREAMS", b"s", b">"))
        timed("xack", lambda ids=ids: call(b"XACK", b"s", b"g", *ids))  # type: ignore[misc]
        timed("xtrim", lambda: call(b"XTRIM", b"s", b"MAXLEN", b"=", b"%d" % size))
    return {name: statistics.median(figures) for name, figures in taken.items()}
