"""Scripts: found in the folders beside this file, and called by digest. Links load them where they are not known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

from millstream.wire import Args, Command, Conversation


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


def source_of(sha: bytes) -> bytes | None:
    """The text of one of our scripts; None for anybody else's. For links, which give a script to a node that does not
    know it: yet, any more, or because its slot has come from elsewhere."""
    return _sources().get(sha)


@cache
def _sources() -> dict[bytes, bytes]:
    plain = [script(name) for name in all_names()]
    return {one.sha: one.source for one in (*plain, *map(guarded_form, plain))}


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
    """Runs it where its first key lives.

    Behind a ``guard`` it raises StaleOwner, and does nothing, where the owner record is another by now.
    """
    if guard is not None:
        chosen, keys, argv = guarded_form(chosen), (*keys, guard.key), (*argv, guard.record)
    return (yield Command(chosen.words(keys, argv), keys[0], repeatable))
