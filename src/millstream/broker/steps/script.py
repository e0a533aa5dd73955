"""Scripts: found in the folders beside this file, called by digest, given to a server that does not know them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

from millstream.errors import ServerError
from millstream.wire.commands import Args, Command, Conversation

TRIES = 4
"""How often a server that does not know a script is given it before it is believed."""


class Script(NamedTuple):
    name: str
    source: bytes
    sha: bytes

    def words(self, keys: Sequence[bytes], argv: Sequence[bytes]) -> Args:
        """The call as a command."""
        return (b"EVALSHA", self.sha, b"%d" % len(keys), *keys, *argv)

    def whole(self, keys: Sequence[bytes], argv: Sequence[bytes]) -> Args:
        """The call with the script's text. For a transaction: there, a server that does not know a script would pass it
        over and run the rest."""
        return (b"EVAL", self.source, b"%d" % len(keys), *keys, *argv)


_BEGINS_WITH = re.compile(rb"-- Begins with ([a-z]+)/(_[a-z]+\.lua)\n")


@cache
def _folders() -> dict[str, str]:
    """Every script there is, and the folder that it lies in. What begins with an underscore is a part of others."""
    return {
        path.name.removesuffix(".lua"): folder.name
        for folder in files(__package__).iterdir()
        if folder.is_dir()
        for path in folder.iterdir()
        if path.name.endswith(".lua") and not path.name.startswith("_")
    }


def folder_of(name: str) -> str:
    return _folders()[name]


def all_names() -> list[str]:
    """Every script there is, sorted."""
    return sorted(_folders())


@cache
def script(name: str) -> Script:
    """The script ``<name>.lua``, behind the part that its first line names."""
    folders = files(__package__)
    source = (folders / folder_of(name) / f"{name}.lua").read_bytes()
    if part := _BEGINS_WITH.match(source):
        source = (folders / part[1].decode() / part[2].decode()).read_bytes() + source
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


class Guard(NamedTuple):
    """An owner record in the slot of what is written, and what it must hold: then alone a guarded script runs."""

    key: bytes
    record: bytes


_PRELUDE = b"""-- Guarded: the last of KEYS must hold the last of ARGV, or nothing is done.
if redis.call('GET', KEYS[#KEYS]) ~= ARGV[#ARGV] then
  return redis.error_reply('STALEOWNER the owner record is another')
end
KEYS[#KEYS] = nil
ARGV[#ARGV] = nil
"""


@cache
def guarded_form(plain: Script) -> Script:
    """The same script behind the check of an owner record, in the same atomic step."""
    source = _PRELUDE + plain.source
    return Script(f"{plain.name} (guarded)", source, sha1(source, usedforsecurity=False).hexdigest().encode())


def run_script(
    chosen: Script,
    keys: Sequence[bytes],
    argv: Sequence[bytes],
    *,
    repeatable: bool = False,
    guard: Guard | None = None,
) -> Conversation[Any]:
    """Runs it where its first key lives; a server that does not know it (yet, or after a restart) is given it.

    Behind a ``guard`` it raises StaleOwner, and does nothing, where the owner record is another by now.
    """
    if guard is not None:
        chosen, keys, argv = guarded_form(chosen), (*keys, guard.key), (*argv, guard.record)
    call = Command(chosen.words(keys, argv), keys[0], repeatable)
    # More than once: after a failover the script may have been given to the old primary, and be asked of the new one.
    for _ in range(TRIES):
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
