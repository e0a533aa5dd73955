"""The few Lua scripts: what must be atomic and no single command does. Each has a twin in ``engine/twins``.

A script touches only the keys in KEYS, takes everything else from ARGV, and checks before its first write.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

from millstream.errors import ServerError
from millstream.wire.commands import Args, Command, Conversation


class Script(NamedTuple):
    name: str
    source: bytes
    sha: bytes

    def words(self, keys: Sequence[bytes], argv: Sequence[bytes]) -> Args:
        """The call as a command."""
        return (b"EVALSHA", self.sha, b"%d" % len(keys), *keys, *argv)


@cache
def script(name: str) -> Script:
    """The script in ``<name>.lua`` beside this file."""
    source = (files(__package__) / f"{name}.lua").read_bytes()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


def all_names() -> list[str]:
    """Every script there is, sorted."""
    return sorted(path.name.removesuffix(".lua") for path in files(__package__).iterdir() if path.name.endswith(".lua"))


def run_script(
    chosen: Script, keys: Sequence[bytes], argv: Sequence[bytes], *, repeatable: bool = False
) -> Conversation[Any]:
    """Runs it where its first key lives; a server that does not know it (yet, or after a restart) is given it."""
    call = Command(chosen.words(keys, argv), keys[0], repeatable)
    try:
        return (yield call)
    except ServerError as error:
        if error.code != "NOSCRIPT":
            raise
    yield from load_script(chosen, keys[0])
    return (yield call)


def load_script(chosen: Script, key: bytes) -> Conversation[None]:
    """Gives the script to the node of ``key``."""
    yield Command((b"SCRIPT", b"LOAD", chosen.source), key, repeatable=True)


def register_all(engine: Any) -> None:
    """Teaches an embedded engine the twins: ``engine.register_script(source, twin)`` for each script."""
    from millstream.engine.twins import twin

    for name in all_names():
        engine.register_script(script(name).source, twin(name))
