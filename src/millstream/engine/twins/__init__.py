"""What each of our scripts means, in Python: ``<name>.py`` here does what ``<name>.lua`` does, in the same words.

``run(call, keys, argv)``: ``call(b"XADD", ...)`` is ``redis.call``; it raises ErrorReply. Pairs are fuzzed against
each other, so a twin that drifts from its script is found.
"""

from __future__ import annotations

from importlib import import_module

from millstream.engine.scripts import Call, Twin
from millstream.wire.replies import ErrorReply, Reply


def twin(name: str) -> Twin:
    """The twin of the script ``name``; its module is imported when it first runs."""

    def first_call(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
        found: Twin = import_module(f"{__name__}.{name}").run
        return found(call, keys, argv)

    return first_call


def guarded_twin(plain: Twin) -> Twin:
    """The twin of a script's guarded form: the last key must hold the last argument, or nothing is done."""

    def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
        if call(b"GET", keys[-1]) != argv[-1]:
            return ErrorReply("STALEOWNER the owner record is another")
        return plain(call, keys[:-1], argv[:-1])

    return run
