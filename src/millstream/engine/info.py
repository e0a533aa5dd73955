"""INFO: the counters of one engine, and the sections that show them. The commands' own counters are on their specs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from millstream.wire import to_bytes

if TYPE_CHECKING:
    from millstream.engine.engine import Engine
    from millstream.engine.registry import Table


class Stats:
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
        """Raised by the driver, which is the one that rejects them."""
        self.expired_keys = 0
        self.keyspace_hits = 0
        self.keyspace_misses = 0
        self.error_replies = 0
        self.errors: dict[str, int] = {}
        """By the first word of the reply."""

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
"""The server whose semantics these are, by which clients decide what they may use."""

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


def _human(size: int) -> str:
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
        "used_memory_human": _human(used),
        "used_memory_dataset": used,
        "number_of_cached_scripts": len(engine.loaded_scripts),
        "maxmemory": limit,
        "maxmemory_human": _human(limit),
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
    """Times are those of commands that came over a connection: within one process nobody measures them."""
    return {
        f"cmdstat_{spec.spoken}": (
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
            left = [max(at_ms - engine.now_ms, 0) for at_ms in db.expires.values()]
            average = sum(left) // len(left) if left else 0
            lines[f"db{db.index}"] = f"keys={len(db.values)},expires={len(left)},avg_ttl={average}"
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


def render(engine: Engine, wanted: Iterable[bytes]) -> bytes:
    """The sections that were asked for, in the order above; a name that stands for nothing adds nothing."""
    asked = {word.decode("utf-8", "replace").lower() for word in wanted} or {"default"}
    everything = bool(asked & {"all", "everything"})
    parts = []
    for title, section in SECTIONS.items():
        by_default = "default" in asked and title not in _ONLY_ON_REQUEST
        if everything or by_default or title.lower() in asked:
            lines = "".join(f"{name}:{value}\r\n" for name, value in section(engine).items())
            parts.append(f"# {title}\r\n{lines}")
    return to_bytes("\r\n".join(parts))
