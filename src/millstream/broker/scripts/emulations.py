"""Emulations: the Python implementations of the scripts in the embedded engine, which runs no Lua.

``emulation(call, keys, argv)``: ``call(b"XADD", ...)`` is ``redis.call``; it raises ErrorReply.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millstream.broker.scripts.script import all_names, fenced_form, folder_of, script
from millstream.engine.commands.transactions import Call, Emulation
from millstream.wire import ErrorReply, Reply


def emulation(name: str) -> Emulation:
    """The function ``name`` in ``emulation.py`` of the folder that contains ``<name>.lua``."""
    function: Emulation = getattr(import_module(f"{__package__}.{folder_of(name)}.emulation"), name)
    return function


def fenced_emulation(plain: Emulation) -> Emulation:
    """The emulation of a script's fenced form: writes nothing unless the last key holds the last argument."""

    def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
        if call(b"GET", keys[-1]) != argv[-1]:
            return ErrorReply("STALEOWNER the owner record is another")
        return plain(call, keys[:-1], argv[:-1])

    return run


def register_emulations(engine: Any) -> None:
    """Registers the emulations of all scripts with an engine."""
    for name in all_names():
        engine.register_script(script(name).source, emulation(name))
        engine.register_script(fenced_form(script(name)).source, fenced_emulation(emulation(name)))


# --- shared by several emulations ---


def clock_ms(call: Call) -> int:
    """The server's time in milliseconds."""
    seconds, micros = call(b"TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def id_order(entry_id: bytes) -> tuple[int, int]:
    """An id as a pair of numbers, which compare in the order of ids."""
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)
