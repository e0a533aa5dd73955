"""What each of our scripts means, in Python: ``<name>.py`` here does what ``<name>.lua`` does, in the same words.

``run(call, keys, argv)``: ``call(b"XADD", ...)`` is ``redis.call``; it raises ErrorReply. Pairs are fuzzed against
each other, so a twin that drifts from its script is found.
"""

from __future__ import annotations

from importlib import import_module

from millstream.engine.scripts import Call, Twin
from millstream.wire.replies import Reply


def twin(name: str) -> Twin:
    """The twin of the script ``name``; its module is imported when it first runs."""

    def first_call(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
        found: Twin = import_module(f"{__name__}.{name}").run
        return found(call, keys, argv)

    return first_call
