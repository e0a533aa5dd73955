"""INFO: the counters of an engine, the sections that display them, and the memory used by the data.

The counters of each command are in its ``Spec``. Memory is estimated like Redis's MEMORY USAGE, from a sample of the
elements of each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Final

from millstream.wire import to_bytes

if TYPE_CHECKING:
    from millstream.engine.engine import Engine
    from millstream.engine.keyspace import Database
    from millstream.engine.registry import Table

MAX_SAMPLED_KEYS: Final = 20_000
KEY_OVERHEAD_BYTES: Final = 100
"""The memory of a key in addition to its bytes: its slot in the dict."""


class Stats:
    """Counters of one engine since the start or CONFIG RESETSTAT."""

    __slots__ = (
        "connections",
        "error_replies",
        "errors",
        "expired_keys",
        "keyspace_hits",
        "keyspace_misses",
        "rejected_connections",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.connections = 0
        self.rejected_connections = 0
        """Incremented by the driver, which rejects connections."""
        self.expired_keys = 0
        self.keyspace_hits = 0
        self.keyspace_misses = 0
        self.error_replies = 0
        self.errors: dict[str, int] = {}
        """By error code, the first word of the reply."""

    def count_error(self, text: str) -> None:
        code = text.split(" ", 1)[0]
        self.error_replies += 1
        self.errors[code] = self.errors.get(code, 0) + 1


def commands_processed(table: Table) -> int:
    return sum(spec.calls for spec in table.all())


def reset_commands(table: Table) -> None:
    for spec in table.all():
        spec.calls = spec.rejected = spec.failed = spec.nanoseconds = 0


REDIS_VERSION: Final = "7.0.15"
"""The Redis version whose semantics the engine implements. Clients decide by it which features they use."""

Lines = Mapping[str, object]


def _server(engine: Engine) -> Lines:
    seconds = max(engine.now_ms - engine.started_ms, 0) // 1000 if engine.started_ms else 0
    return {
        "redis_version": REDIS_VERSION,
        "redis_mode": "standalone",
        "server_name": "millstream",
        "arch_bits": 64,
        "process_id": 0,
        "run_id": "0" * 40,
        "tcp_port": engine.config["port"],
        "server_time_usec": engine.now_ms * 1000,
        "uptime_in_seconds": seconds,
        "uptime_in_days": seconds // 86400,
        **engine.hooks.server(),
    }


def _clients(engine: Engine) -> Lines:
    return {
        "connected_clients": len(engine.sessions),
        "cluster_connections": 0,
        "maxclients": engine.config["maxclients"],
        "blocked_clients": len(engine.waiting),
        "tracking_clients": 0,
        **engine.hooks.clients(),
    }


def _human_size(size: int) -> str:
    amount = float(size)
    for unit in "BKMGT":
        if amount < 1024 or unit == "T":
            return f"{size}B" if unit == "B" else f"{amount:.2f}{unit}"
        amount /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def _memory(engine: Engine) -> Lines:
    used, limit = engine.used_memory(), engine.memory.limit
    return {
        "used_memory": used,
        "used_memory_human": _human_size(used),
        "used_memory_dataset": used,
        "number_of_cached_scripts": len(engine.loaded_scripts),
        "maxmemory": limit,
        "maxmemory_human": _human_size(limit),
        "maxmemory_policy": engine.config["maxmemory-policy"],
        **engine.hooks.memory(),
    }


def _persistence(engine: Engine) -> Lines:
    return {
        "loading": int(engine.loading),
        "async_loading": 0,
        "rdb_changes_since_last_save": engine.dirty,
        "rdb_bgsave_in_progress": 0,
        "rdb_last_save_time": engine.started_ms // 1000,
        "rdb_last_bgsave_status": "ok",
        "aof_enabled": int(engine.config["appendonly"] == "yes"),
        "aof_rewrite_in_progress": 0,
        "aof_rewrite_scheduled": 0,
        "aof_last_rewrite_time_sec": -1,
        "aof_current_rewrite_time_sec": -1,
        "aof_last_bgrewrite_status": "ok",
        "aof_last_write_status": "ok",
        **engine.hooks.persistence(),
    }


def _stats(engine: Engine) -> Lines:
    stats = engine.stats
    return {
        "total_connections_received": stats.connections,
        "total_commands_processed": commands_processed(engine.table),
        "rejected_connections": stats.rejected_connections,
        "expired_keys": stats.expired_keys,
        "evicted_keys": 0,
        "keyspace_hits": stats.keyspace_hits,
        "keyspace_misses": stats.keyspace_misses,
        "pubsub_channels": len(engine.pubsub.channels),
        "pubsub_patterns": len(engine.pubsub.patterns),
        "unexpected_error_replies": 0,
        "total_error_replies": stats.error_replies,
        **engine.hooks.stats(),
    }


def _replication(engine: Engine) -> Lines:
    return {
        "role": "master",
        "connected_slaves": 0,
        "master_failover_state": "no-failover",
        "master_replid": "0" * 40,
        "master_repl_offset": 0,
        "repl_backlog_active": 0,
    }


def _cpu(engine: Engine) -> Lines:
    return {"used_cpu_sys": "0.000000", "used_cpu_user": "0.000000", **engine.hooks.cpu()}


def _commandstats(engine: Engine) -> Lines:
    """Times exist only for commands that arrived over a connection: embedded commands are not measured."""
    return {
        f"cmdstat_{spec.display_name}": (
            f"calls={spec.calls},usec={spec.nanoseconds // 1000},"
            f"usec_per_call={spec.nanoseconds / 1000 / max(1, spec.calls):.2f},"
            f"rejected_calls={spec.rejected},failed_calls={spec.failed}"
        )
        for spec in engine.table.all()
        if spec.calls or spec.rejected or spec.failed
    }


def _errorstats(engine: Engine) -> Lines:
    return {f"errorstat_{code}": f"count={count}" for code, count in sorted(engine.stats.errors.items())}


def _cluster(engine: Engine) -> Lines:
    return {"cluster_enabled": 0}


def _keyspace(engine: Engine) -> Lines:
    lines: dict[str, str] = {}
    for db in engine.databases:
        if db.values:
            ttls_ms = [max(at_ms - engine.now_ms, 0) for at_ms in db.expires.values()]
            average = sum(ttls_ms) // len(ttls_ms) if ttls_ms else 0
            lines[f"db{db.index}"] = f"keys={len(db.values)},expires={len(ttls_ms)},avg_ttl={average}"
    return lines


def _modules(engine: Engine) -> Lines:
    return {}


SECTIONS: Final[Mapping[str, Callable[[Engine], Lines]]] = {
    "Server": _server,
    "Clients": _clients,
    "Memory": _memory,
    "Persistence": _persistence,
    "Stats": _stats,
    "Replication": _replication,
    "CPU": _cpu,
    "Modules": _modules,
    "Commandstats": _commandstats,
    "Errorstats": _errorstats,
    "Cluster": _cluster,
    "Keyspace": _keyspace,
}
_ONLY_ON_REQUEST: Final = {"Commandstats"}


def render(engine: Engine, sections: Iterable[bytes]) -> bytes:
    """Renders the requested sections, in the order above. Unknown names are ignored."""
    requested = {name.decode("utf-8", "replace").lower() for name in sections} or {"default"}
    everything = bool(requested & {"all", "everything"})
    parts = []
    for title, section in SECTIONS.items():
        by_default = "default" in requested and title not in _ONLY_ON_REQUEST
        if everything or by_default or title.lower() in requested:
            lines = "".join(f"{name}:{value}\r\n" for name, value in section(engine).items())
            parts.append(f"# {title}\r\n{lines}")
    return to_bytes("\r\n".join(parts))


def size_of_key(key: bytes, value: Any, samples: int = 5) -> int:
    """The memory of a key and its value, estimated from ``samples`` elements; 0 means all elements."""
    return getsizeof(key) + KEY_OVERHEAD_BYTES + size_of_value(value, samples)


def size_of_value(value: Any, samples: int = 5) -> int:
    if isinstance(value, bytes):
        return getsizeof(value)
    memory_bytes: int | None = getattr(value, "memory_bytes", None)
    if memory_bytes is not None:
        return memory_bytes
    if isinstance(value, dict):
        return getsizeof(value) + _estimate(value.items(), len(value), samples)
    return getsizeof(value) + _estimate(((item,) for item in value), len(value), samples)


def _estimate(rows: Iterable[tuple[Any, ...]], length: int, samples: int) -> int:
    sampled = list(islice(rows, samples or None))
    if not sampled:
        return 0
    return sum(getsizeof(item) for row in sampled for item in row) * length // len(sampled)


def _size_of_database(db: Database) -> int:
    """Samples at most ``2 * MAX_SAMPLED_KEYS`` keys, so that polling INFO does not delay other clients."""
    step = len(db.values) // MAX_SAMPLED_KEYS + 1
    sizes = [size_of_key(key, value) for key, value in islice(db.values.items(), 0, None, step)]
    return sum(sizes) * len(db.values) // len(sizes) if sizes else 0


class MemoryAccount:
    """The memory of all keys.

    With a memory limit it is updated key by key, because every write checks it. Without a limit it is computed on
    request.
    """

    __slots__ = ("_changed", "_databases", "_sizes", "_total", "limit")

    def __init__(self, databases: list[Database]) -> None:
        self._databases = databases
        self._sizes: dict[tuple[int, bytes], int] = {}
        self._changed: dict[tuple[int, bytes], None] = {}
        self._total = 0
        self.limit = 0

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.recount()
        for db in self._databases:
            db.refresh()

    def note_change(self, index: int, key: bytes) -> None:
        self._changed[index, key] = None

    def used(self) -> int:
        if not self.limit:
            return sum(map(_size_of_database, self._databases))
        for index, key in self._changed:
            value = self._databases[index].values.get(key)
            old = self._sizes.pop((index, key), 0)
            if value is not None:
                new = self._sizes[index, key] = size_of_key(key, value)
                self._total += new
            self._total -= old
        self._changed.clear()
        return self._total

    def exceeded(self) -> bool:
        return 0 < self.limit < self.used()

    def recount(self) -> None:
        """Recomputes everything, after a flush, a load, or a change of the limit."""
        self._changed.clear()
        self._sizes.clear()
        if self.limit:
            for db in self._databases:
                for key, value in db.values.items():
                    self._sizes[db.index, key] = size_of_key(key, value)
        self._total = sum(self._sizes.values())
