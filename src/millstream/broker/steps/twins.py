"""Twins: what our scripts mean to the embedded engine, which runs no Lua. They are found by name, and told to it.

``twin(call, keys, argv)``: ``call(b"XADD", ...)`` is ``redis.call``; it raises ErrorReply.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

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
    engine.know_scripts(previous_twins())
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


# --- scripts of the version before this one that have another text now ---
# A server of ours still knows what they mean, so that workers and clients of both versions can use one
# ``millstream serve`` while a fleet is being replaced. Each goes with the release after next.

_PREVIOUS: Final = {
    b"247cba2065fa83f716248232e1baad304140d1b3": "append_once",
    b"4d24a6084864d96c562a9f49ec5678f6b57280be": "append_once_at",
    b"2cfac1d3430453517fcb62e508c917a7df8ce8ec": "append_unique",
    b"62f6ad72c139a00635e57800e5006f306b55d40c": "once_open",
    b"04f50105793e5a3d1b84c6e6c37ab1c83e17bbfa": "once_close",
    b"d12ae383029694ccc1610772a9930196eb8e00a0": "retain",
    b"e6a01b23f0c76f935e7d2624e6cb67dc8ddf7e1d": "group_back",
    b"32d2b2ba77c0f2d70df7cbb8a6df152b094275c8": "sweep",
}
"""Digest of 0.1.0 to its twin: today's where the arguments and answers are the same. That today's also renews a
marker's time where it refuses changes nothing for whoever asked."""
_LATER_ADD: Final = b"ef8c23efe91339274ed8f94f91108aae62217469"


def previous_twins() -> dict[bytes, Twin]:
    """By digest."""
    return {digest: twin(name) for digest, name in _PREVIOUS.items()} | {_LATER_ADD: _later_add_of_0_1_0}


def _later_add_of_0_1_0(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    """0.1.0: KEYS later, later.done; ARGV delay (ms), then token and message in turn. It knew no idempotency keys."""
    at = b"%d" % (clock_ms(call) + int(argv[0]))
    added = 0
    for token, message in zip(argv[1::2], argv[2::2], strict=True):
        if call(b"ZSCORE", keys[1], token) is None:
            added += call(b"ZADD", keys[0], b"NX", at, message)
    return added
