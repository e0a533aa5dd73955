"""The parameters of CONFIG GET and CONFIG SET, with Redis's names, defaults, value checks and error texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.engine.glob import glob
from millstream.engine.keyspace import format_flags, parse_flags
from millstream.engine.numbers import INT64_MAX, read_int
from millstream.wire import ErrorReply, to_bytes, to_name

if TYPE_CHECKING:
    from millstream.engine.engine import Engine


class _InvalidValue(Exception):
    """A parameter does not accept the value; the message is Redis's text."""


Check = Callable[[str], str]
"""Returns the value as CONFIG GET displays it, or raises _InvalidValue."""

UINT64_MAX: Final = 2**64 - 1
_UNITS: Final = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1024,
    "m": 1000**2,
    "mb": 1024**2,
    "g": 1000**3,
    "gb": 1024**3,
}


def _memory(low: int = 0, high: int = INT64_MAX) -> Check:
    def check(text: str) -> str:
        """Parses like Redis's C code: a NUL ends the text, no digits mean 0, digits saturate, the product wraps."""
        match = re.fullmatch(r"([0-9]{0,127})([a-z]*)", text.partition("\0")[0].lower())
        if match is None or match[2] not in _UNITS:
            raise _InvalidValue("argument must be a memory value")
        return _between(min(int(match[1] or 0), UINT64_MAX) * _UNITS[match[2]] & UINT64_MAX, low, high)

    return check


def _number(low: int, high: int) -> Check:
    def check(text: str) -> str:
        number = read_int(to_bytes(text))
        if number is None:
            raise _InvalidValue("argument couldn't be parsed into an integer")
        return _between(number, low, high)

    return check


def _between(number: int, low: int, high: int) -> str:
    if not low <= number <= high:
        raise _InvalidValue(f"argument must be between {low} and {high} inclusive")
    return str(number)


def _choice(*choices: str) -> Check:
    def check(text: str) -> str:
        if text.lower() not in choices:
            raise _InvalidValue(f"argument(s) must be one of the following: {', '.join(choices)}")
        return text.lower()

    return check


def _yes_or_no(text: str) -> str:
    if text.lower() not in ("yes", "no"):
        raise _InvalidValue("argument must be 'yes' or 'no'")
    return text.lower()


def _event_flags(text: str) -> str:
    flags = parse_flags(text)
    if flags is None:
        raise _InvalidValue("Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
    return format_flags(flags)


def _empty_save_points(text: str) -> str:
    if text.strip():
        raise _InvalidValue("millstream keeps a journal and takes no snapshots: only an empty value is accepted")
    return ""


def _only_yes(text: str) -> str:
    if _yes_or_no(text) == "no":
        raise _InvalidValue("a journal whose last record is incomplete is always loaded: only 'yes' is accepted")
    return "yes"


def _any_text(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class _Parameter:
    default: str
    check: Check | None = None
    """None: the parameter cannot be changed while the server runs."""


_PARAMETERS: Final[Mapping[str, _Parameter]] = {
    # Settings of Redis's AOF and RDB files have no effect here. They are accepted and displayed, so that tools that set
    # them keep working. A setting whose effect this server does not implement is unknown: see docs/how-to/embedded.md.
    "aof-disable-auto-gc": _Parameter("no", _yes_or_no),
    "aof-load-truncated": _Parameter("yes", _only_yes),
    "aof-rewrite-incremental-fsync": _Parameter("yes", _yes_or_no),
    "aof-timestamp-enabled": _Parameter("no", _yes_or_no),
    "aof-use-rdb-preamble": _Parameter("yes", _yes_or_no),
    "appenddirname": _Parameter("appendonlydir"),
    "appendfilename": _Parameter("appendonly.aof"),
    "appendfsync": _Parameter("everysec", _choice("everysec", "always", "no")),
    "appendonly": _Parameter("no", _yes_or_no),
    "auto-aof-rewrite-min-size": _Parameter("67108864", _memory()),
    "auto-aof-rewrite-percentage": _Parameter("100", _number(0, 2**31 - 1)),
    "bind": _Parameter("127.0.0.1"),
    "client-output-buffer-limit": _Parameter("normal 0 0 0 slave 0 0 0 pubsub 33554432 8388608 60"),
    "cluster-enabled": _Parameter("no"),
    "databases": _Parameter("16"),
    "dbfilename": _Parameter("dump.rdb"),
    "dir": _Parameter(""),
    "enable-debug-command": _Parameter("no"),
    "latency-monitor-threshold": _Parameter("0", _number(0, INT64_MAX)),
    "latency-tracking": _Parameter("no"),
    "maxclients": _Parameter("10000", _number(1, 2**32 - 1)),
    "maxmemory": _Parameter("0", _memory(high=UINT64_MAX)),
    "maxmemory-policy": _Parameter("noeviction", _choice("noeviction")),
    "no-appendfsync-on-rewrite": _Parameter("no", _yes_or_no),
    "notify-keyspace-events": _Parameter("", _event_flags),
    "port": _Parameter("0"),
    "proto-max-bulk-len": _Parameter("536870912", _memory(1024 * 1024)),
    "rdb-del-sync-files": _Parameter("no", _yes_or_no),
    "rdb-save-incremental-fsync": _Parameter("yes", _yes_or_no),
    "rdbchecksum": _Parameter("yes"),
    "rdbcompression": _Parameter("yes", _yes_or_no),
    "requirepass": _Parameter("", _any_text),
    "sanitize-dump-payload": _Parameter("no", _choice("no", "yes", "clients")),
    "save": _Parameter("", _empty_save_points),
    "slowlog-log-slower-than": _Parameter("10000", _number(-1, INT64_MAX)),
    "slowlog-max-len": _Parameter("128", _number(0, INT64_MAX)),
    "stop-writes-on-bgsave-error": _Parameter("yes", _yes_or_no),
    "stream-node-max-bytes": _Parameter("4096", _memory()),
    "stream-node-max-entries": _Parameter("100", _number(0, INT64_MAX)),
    "timeout": _Parameter("0", _number(0, 2**31 - 1)),
}

MAX_SLOW_LOG_ENTRIES: Final = 100_000


class Config:
    """The settings of one engine. Settings that are read on every command are attributes."""

    __slots__ = ("_engine", "_values", "approximate_trim_limit", "stream_node_max_bytes", "stream_node_max_entries")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._values = {name: parameter.default for name, parameter in _PARAMETERS.items()}
        self.stream_node_max_bytes = 4096
        self._set_node_entries(100)
        if engine.password is not None:
            self._values["requirepass"] = to_name(engine.password)
        if engine.debug_enabled:
            self._values["enable-debug-command"] = "yes"

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def number(self, name: str) -> int:
        return int(self._values[name])

    def match(self, patterns: list[bytes]) -> dict[str, str]:
        """The parameters whose name matches one of the patterns."""
        globs = [glob(pattern.lower()) for pattern in patterns]
        return {
            name: value
            for name, value in self._values.items()
            if any(pattern.matches(name.encode()) for pattern in globs)
        }

    def set_initial(self, name: str, value: str) -> None:
        """Sets a parameter, also an immutable one, before the first command. For the driver. Checks like ``change``."""
        parameter = _PARAMETERS[name]
        try:
            checked = value if parameter.check is None else parameter.check(value)
        except _InvalidValue as reason:
            raise ErrorReply(_set_failed(name, str(reason))) from None
        self._apply(name, checked, value)

    def change(self, changes: list[tuple[str, str]]) -> None:
        """CONFIG SET: applies all changes, or raises ErrorReply and applies none."""
        checked: dict[str, tuple[str, str]] = {}
        for name, _ in changes:
            if name.lower() not in _PARAMETERS:
                raise ErrorReply(f"ERR Unknown option or number of arguments for CONFIG SET - '{name}'")
        for raw, value in changes:
            name = raw.lower()
            check = _PARAMETERS[name].check
            if check is None:
                raise ErrorReply(_set_failed(name, "can't set immutable config"))
            if name in checked:
                raise ErrorReply(_set_failed(name, "duplicate parameter"))
            try:
                checked[name] = check(value), value
            except _InvalidValue as reason:
                raise ErrorReply(_set_failed(name, str(reason))) from None
        for name, (normalized, value) in checked.items():
            if self._engine.hooks.configure is not None:
                self._engine.hooks.configure(name, normalized)
            self._apply(name, normalized, value)

    def _apply(self, name: str, value: str, raw: str) -> None:
        self._values[name] = value
        engine = self._engine
        if name == "maxmemory":
            engine.memory.set_limit(int(value))
            engine.refresh()
        elif name == "notify-keyspace-events":
            # Not from the normalized value: Redis does not display "n" next to "A", although it is in force.
            engine.notify_flags = parse_flags(raw) or 0
        elif name == "requirepass":
            engine.password = to_bytes(value) or None
        elif name == "slowlog-log-slower-than":
            engine.monitoring.set_thresholds(slow_us=int(value))
        elif name == "slowlog-max-len":
            engine.monitoring.slow.limit(min(int(value), MAX_SLOW_LOG_ENTRIES))
        elif name == "latency-monitor-threshold":
            engine.monitoring.set_thresholds(latency_ms=int(value))
        elif name == "stream-node-max-bytes":
            self.stream_node_max_bytes = int(value)
        elif name == "stream-node-max-entries":
            self._set_node_entries(int(value))

    def _set_node_entries(self, max_entries: int) -> None:
        self.stream_node_max_entries = max_entries
        self.approximate_trim_limit = (
            min(100 * max_entries, 1_000_000) if 0 < 100 * max_entries <= INT64_MAX else 10_000
        )
        """Redis's limit on the entries that one approximate trim removes: those of a hundred nodes."""


def _set_failed(name: str, reason: str) -> str:
    return f"ERR CONFIG SET failed (possibly related to argument '{name}') - {reason}"
