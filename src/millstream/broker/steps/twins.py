"""Twins: what our scripts mean to the embedded engine, which runs no Lua. They are found by name, and told to it.

``twin(call, keys, argv)``: ``call(b"XADD", ...)`` is ``redis.call``; it raises ErrorReply.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millstream.broker.steps.script import all_names, folder_of, guarded_form, script
from millstream.engine import Call, Twin
from millstream.wire import ErrorReply, Reply


def twin(name: str) -> Twin:
    """The function ``name`` in the ``twin.py`` beside the script ``<name>.lua``."""
    found: Twin = getattr(import_module(f"{__package__}.{folder_of(name)}.twin"), name)
    return found


def guarded_twin(plain: Twin) -> Twin:
    """The twin of a script's guarded form: the last key must hold the last argument, or nothing is done."""

    def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
        if call(b"GET", keys[-1]) != argv[-1]:
            return ErrorReply("STALEOWNER the owner record is another")
        return plain(call, keys[:-1], argv[:-1])

    return run


def register_twins(engine: Any) -> None:
    """Teaches an embedded engine what every script of ours means, and those of the version before."""
    from millstream.broker.steps.previous import PREVIOUS  # its twins need what is below

    engine.know_scripts(PREVIOUS)
    for name in all_names():
        engine.register_script(script(name).source, twin(name))
        engine.register_script(guarded_form(script(name)).source, guarded_twin(twin(name)))


# --- what several twins need ---


def clock_ms(call: Call) -> int:
    seconds, micros = call(b"TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def id_order(entry_id: bytes) -> tuple[int, int]:
    """Ids as pairs of numbers, which compare as ids do."""
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)
