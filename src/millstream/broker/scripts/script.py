"""Lua scripts: loading them from the folders of this package, and calling them by digest.

A transport loads a script into a server that does not know its digest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

from millstream.wire import Args, Command, Operation


class Script(NamedTuple):
    """A script: its name, its source, and the SHA-1 of the source."""

    name: str
    source: bytes
    sha: bytes

    def evalsha_args(self, keys: Sequence[bytes], argv: Sequence[bytes]) -> Args:
        """The arguments of EVALSHA."""
        return (b"EVALSHA", self.sha, b"%d" % len(keys), *keys, *argv)

    def eval_args(self, keys: Sequence[bytes], argv: Sequence[bytes]) -> Args:
        """The arguments of EVAL with the source, for a transaction.

        Inside MULTI, EVALSHA of an unknown script would fail without stopping the other commands.
        """
        return (b"EVAL", self.source, b"%d" % len(keys), *keys, *argv)


_INCLUDE = re.compile(rb"-- Begins with ([a-z_]+)/(_[a-z]+\.lua)\n")


@cache
def _folders() -> dict[str, str]:
    """Each script and the folder that contains it. Files that start with an underscore are included by others."""
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
    """The sorted names of all scripts."""
    return sorted(_folders())


@cache
def script(name: str) -> Script:
    """The script ``<name>.lua``, after the file that its first line includes."""
    folders = files(__package__)
    source = (folders / folder_of(name) / f"{name}.lua").read_bytes()
    if included := _INCLUDE.match(source):
        source = (folders / included[1].decode() / included[2].decode()).read_bytes() + source
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


def source_of(sha: bytes) -> bytes | None:
    """The source of a script of this package; None for an unknown digest.

    Transports use it to load a script into a node that does not know it: a new node, a restarted one, or one that
    imported the slot.
    """
    return _sources().get(sha)


@cache
def _sources() -> dict[bytes, bytes]:
    plain = [script(name) for name in all_names()]
    return {known.sha: known.source for known in (*plain, *map(fenced_form, plain))}


class Fence(NamedTuple):
    """The owner record that a fenced script compares: the script runs only while ``key`` holds ``record``.

    The key is in the slot of the stream that is written, so that comparing and writing are one atomic step.
    """

    key: bytes
    record: bytes


class HasFence(Protocol):
    """A fencing token, such as the one that an assignment gives to a stream's owner."""

    def fence(self) -> Fence: ...


_PRELUDE = b"""-- Fenced: the last key must hold the last argument, or nothing is written.
if redis.call('GET', KEYS[#KEYS]) ~= ARGV[#ARGV] then
  return redis.error_reply('STALEOWNER the owner record is another')
end
KEYS[#KEYS] = nil
ARGV[#ARGV] = nil
"""


@cache
def fenced_form(plain: Script) -> Script:
    """The fenced form of a script: it first compares the owner record, in the same atomic step."""
    source = _PRELUDE + plain.source
    return Script(f"{plain.name} (fenced)", source, sha1(source, usedforsecurity=False).hexdigest().encode())


def run_script(
    chosen: Script,
    keys: Sequence[bytes],
    argv: Sequence[bytes],
    *,
    repeatable: bool = False,
    fence: Fence | None = None,
) -> Operation[Any]:
    """Runs a script on the node of its first key.

    With a ``fence`` it writes nothing and raises StaleOwner if the owner record has changed.
    """
    if fence is not None:
        chosen, keys, argv = fenced_form(chosen), (*keys, fence.key), (*argv, fence.record)
    return (yield Command(chosen.evalsha_args(keys, argv), keys[0], repeatable))
