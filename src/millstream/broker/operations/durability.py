"""What a write asks for beyond the server's reply: whether the server can give it, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.context import Context
from millstream.broker.failures import typed
from millstream.broker.keys import slot_of
from millstream.broker.operations.conversion import mapping
from millstream.broker.steps.script import Guard, Script, guarded_form
from millstream.errors import DurabilityUnavailable, InvalidArgument, PermissionDenied, ServerError
from millstream.model import Durability
from millstream.wire import Args, Batch, Command, Conversation, ErrorReply, Reading, as_they_are

REMEMBER_MS = 10_000
"""How long the server's settings are believed. A change by CONFIG SET, or a failover, is noticed after that."""

Wanted = Durability | str | None


def durability_of(wanted: Wanted) -> Durability | None:
    """None and ``memory`` are what every reply already says."""
    if wanted is None:
        return None
    level = Durability.parse(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(level, Durability):
        raise InvalidArgument("durability", wanted, "None, memory, appended, fsynced or replicated(n)")
    return None if level.level == "memory" else level


def require(context: Context, key: bytes, wanted: Durability) -> Conversation[None]:
    """Raises DurabilityUnavailable, before anything is written, where the node of ``key`` cannot give it."""
    if wanted.level == "replicated":
        return
    given = yield from _settings(context, key)
    if given == "unknown":
        raise DurabilityUnavailable(
            str(wanted), "CONFIG GET is not allowed here, so nobody can tell. Allow it, or ask for less."
        )
    if given == "no":
        raise DurabilityUnavailable(
            str(wanted), "appendonly is off. Switch it on (local:///path for the embedded one)."
        )
    if wanted.level == "fsynced" and given != "always":
        raise DurabilityUnavailable(str(wanted), f"appendfsync is {given!r}. Set it to 'always'.")


def _settings(context: Context, key: bytes) -> Conversation[str]:
    """``no``: no append-only file; else what appendfsync says; ``unknown`` where it cannot be read."""
    place = slot_of(key) if context.cluster else 0
    now_ms = context.clock.monotonic_ms()
    seen = context.durability_seen.get(place)
    if seen is not None and now_ms - seen[0] < REMEMBER_MS:
        return seen[1]
    facts: dict[bytes, Any] = {}
    try:
        for name in (b"appendonly", b"appendfsync"):
            facts |= mapping((yield Command((b"CONFIG", b"GET", name), key, repeatable=True)))
    except (PermissionDenied, ServerError):
        facts = {}
    given = "unknown"
    if len(facts) == 2:
        given = facts[b"appendfsync"].decode() if facts[b"appendonly"] == b"yes" else "no"
    context.durability_seen[place] = now_ms, given
    return given


def send_durably(
    context: Context,
    key: bytes,
    commands: Sequence[Args],
    wanted: Durability,
    *,
    atomic: bool = False,
    repeatable: bool = False,
    reading: Reading = as_they_are,
) -> Conversation[tuple[list[Any], DurabilityUnavailable | None]]:
    """The replies, and what to raise once they are read: the write is stored, but not confirmed."""
    yield from require(context, key, wanted)
    if wanted.level != "replicated":
        replies = yield Batch(commands, key, atomic, repeatable, reading=reading)
        return replies, None
    # WAIT inside MULTI answers at once: it has to come after EXEC, on the same connection.
    wait = (b"WAIT", b"%d" % wanted.replicas, b"%d" % wanted.timeout_ms)
    replies = yield Batch(commands, key, atomic, repeatable, same_connection=True, after=wait, reading=reading)
    confirmed = replies.pop()
    if isinstance(confirmed, int) and confirmed >= wanted.replicas:
        return replies, None
    return replies, DurabilityUnavailable(
        str(wanted),
        f"{confirmed if isinstance(confirmed, int) else 0} replicas confirmed within {wanted.timeout_ms} ms. "
        "The write is stored but not confirmed: do not repeat it blindly, check the replicas.",
        stored=True,
    )


def run_script_durably(
    context: Context,
    chosen: Script,
    keys: Sequence[bytes],
    argv: Sequence[bytes],
    wanted: Durability | None,
    *,
    repeatable: bool = False,
    guard: Guard | None = None,
) -> Conversation[Any]:
    """A script's reply; DurabilityUnavailable where what it wrote was not confirmed. ``reply`` is then a fact of it."""
    if guard is not None:
        chosen, keys, argv = guarded_form(chosen), (*keys, guard.key), (*argv, guard.record)
    words: Args = (b"EVALSHA", chosen.sha, b"%d" % len(keys), *keys, *argv)  # every publish goes here: no hop more
    if wanted is None:
        return (yield Command(words, keys[0], repeatable))
    (reply,), unconfirmed = yield from send_durably(context, keys[0], [words], wanted, repeatable=repeatable)
    if isinstance(reply, ErrorReply):
        raise typed(reply)
    if unconfirmed is not None:
        unconfirmed.__dict__["reply"] = reply
        raise unconfirmed
    return reply
