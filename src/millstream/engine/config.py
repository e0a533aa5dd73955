"""What CONFIG GET shows and CONFIG SET may change: Redis's names, and its words for what is wrong with a value."""

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


class _Refused(Exception):
    """A value that a parameter may not have, with Redis's words for it."""


Check = Callable[[str], str]
"""Gives the value as CONFIG GET will show it, or raises _Refused."""

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
        """As C reads it: a NUL ends the text, no digits are 0, too many saturate, and the product wraps around."""
        found = re.fullmatch(r"([0-9]{0,127})([a-z]*)", text.partition("\0")[0].lower())
        if found is None or found[2] not in _UNITS:
            raise _Refused("argument must be a memory value")
        return _between(min(int(found[1] or 0), UINT64_MAX) * _UNITS[found[2]] & UINT64_MAX, low, high)

    return check


def _number(low: int, high: int) -> Check:
    def check(text: str) -> str:
        number = read_int(to_bytes(text))
        if number is None:
            raise _Refused("argument couldn't be parsed into an integer")
        return _between(number, low, high)

    return check


def _between(number: int, low: int, high: int) -> str:
    if not low <= number <= high:
        raise _Refused(f"argument must be between {low} and {high} inclusive")
    return str(number)


def _one_of(*choices: str) -> Check:
    def check(text: str) -> str:
        if text.lower() not in choices:
            raise _Refused(f"argument(s) must be one of the following: {', '.join(choices)}")
        return text.lower()

    return check


def _yes_or_no(text: str) -> str:
    if text.lower() not in ("yes", "no"):
        raise _Refused("argument must be 'yes' or 'no'")
    return text.lower()


def _events(text: str) -> str:
    flags = parse_flags(text)
    if flags is None:
        raise _Refused("Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
    return format_flags(flags)


def _no_save_points(text: str) -> str:
    if text.strip():
        raise _Refused("millstream keeps a journal and takes no snapshots, so that only an empty value is possible")
    return ""


def _anything(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class _Parameter:
    default: str
    check: Check | None = None
    """None: it cannot be changed while the server runs."""


_PARAMETERS: Final[Mapping[str, _Parameter]] = {
    "appendfsync": _Parameter("everysec", _one_of("everysec", "always", "no")),
    "appendonly": _Parameter("no", _yes_or_no),
    "auto-aof-rewrite-min-size": _Parameter("67108864", _memory()),
    "auto-aof-rewrite-percentage": _Parameter("100", _number(0, 2**31 - 1)),
    "bind": _Parameter("127.0.0.1"),
    "client-output-buffer-limit": _Parameter("normal 0 0 0 slave 0 0 0 pubsub 33554432 8388608 60"),
    "cluster-enabled": _Parameter("no"),
    "databases": _Parameter("16"),
    "dir": _Parameter(""),
    "enable-debug-command": _Parameter("no"),
    "latency-monitor-threshold": _Parameter("0", _number(0, INT64_MAX)),
    "latency-tracking": _Parameter("no"),
    "maxclients": _Parameter("10000", _number(1, 2**32 - 1)),
    "maxmemory": _Parameter("0", _memory(high=UINT64_MAX)),
    "maxmemory-policy": _Parameter("noeviction", _one_of("noeviction")),
    "notify-keyspace-events": _Parameter("", _events),
    "port": _Parameter("0"),
    "proto-max-bulk-len": _Parameter("536870912", _memory(1024 * 1024)),
    "requirepass": _Parameter("", _anything),
    "save": _Parameter("", _no_save_points),
    "slowlog-log-slower-than": _Parameter("10000", _number(-1, INT64_MAX)),
    "slowlog-max-len": _Parameter("128", _number(0, INT64_MAX)),
    "stream-node-max-bytes": _Parameter("4096", _memory()),
    "stream-node-max-entries": _Parameter("100", _number(0, INT64_MAX)),
    "timeout": _Parameter("0", _number(0, 2**31 - 1)),
}

_MOST_SLOW: Final = 100_000


class Config:
    """One engine's settings. What is read for every command is kept as an attribute."""

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

    def found(self, patterns: list[bytes]) -> dict[str, str]:
        """Those whose name fits one of the patterns."""
        globs = [glob(pattern.lower()) for pattern in patterns]
        return {name: value for name, value in self._values.items() if any(one.matches(name.encode()) for one in globs)}

    def start_with(self, name: str, value: str) -> None:
        """For the driver, before the first command: also what cannot be changed later. Refuses as ``change`` does."""
        parameter = _PARAMETERS[name]
        try:
            checked = value if parameter.check is None else parameter.check(value)
        except _Refused as why:
            raise ErrorReply(_failed(name, str(why))) from None
        self._put(name, checked, value)

    def change(self, wanted: list[tuple[str, str]]) -> None:
        """CONFIG SET: all of it or, with an ErrorReply, nothing."""
        checked: dict[str, tuple[str, str]] = {}
        for name, _ in wanted:
            if name.lower() not in _PARAMETERS:
                raise ErrorReply(f"ERR Unknown option or number of arguments for CONFIG SET - '{name}'")
        for given, value in wanted:
            name = given.lower()
            check = _PARAMETERS[name].check
            if check is None:
                raise ErrorReply(_failed(name, "can't set immutable config"))
            if name in checked:
                raise ErrorReply(_failed(name, "duplicate parameter"))
            try:
                checked[name] = check(value), value
            except _Refused as why:
                raise ErrorReply(_failed(name, str(why))) from None
        for name, (shown, value) in checked.items():
            if self._engine.hooks.configure is not None:
                self._engine.hooks.configure(name, shown)
            self._put(name, shown, value)

    def _put(self, name: str, value: str, given: str) -> None:
        self._values[name] = value
        engine = self._engine
        if name == "maxmemory":
            engine.memory.set_limit(int(value))
            engine.refresh()
        elif name == "notify-keyspace-events":
            # What is shown tells less than what was given: an n beside an A is in force, but not shown.
            engine.notify_flags = parse_flags(given) or 0
        elif name == "requirepass":
            engine.password = to_bytes(value) or None
        elif name == "slowlog-log-slower-than":
            engine.monitoring.set_thresholds(slow_us=int(value))
        elif name == "slowlog-max-len":
            engine.monitoring.slow.limit(min(int(value), _MOST_SLOW))
        elif name == "latency-monitor-threshold":
            engine.monitoring.set_thresholds(latency_ms=int(value))
        elif name == "stream-node-max-bytes":
            self.stream_node_max_bytes = int(value)
        elif name == "stream-node-max-entries":
            self._set_node_entries(int(value))

    def _set_node_entries(self, most: int) -> None:
        self.stream_node_max_entries = most
        self.approximate_trim_limit = min(100 * most, 1_000_000) if 0 < 100 * most <= INT64_MAX else 10_000
        """Redis's bound on the work of one approximate trim: a hundred nodes."""


def _failed(name: str, why: str) -> str:
    return f"ERR CONFIG SET failed (possibly related to argument '{name}') - {why}"
