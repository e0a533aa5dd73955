"""Durability beyond the server's reply: checks whether the server offers it, and whether a write reached it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.context import Context
from millstream.broker.failures import typed_error
from millstream.broker.keys import slot_of
from millstream.broker.operations.conversion import mapping
from millstream.broker.scripts.script import Fence, Script, fenced_form
from millstream.errors import DurabilityUnavailable, InvalidArgument, PermissionDenied, ServerError
from millstream.model import Durability
from millstream.wire import Args, Batch, Command, ErrorReply, Operation, Reading, return_unchanged

REMEMBER_MS = 10_000
"""How long the server's settings are cached. A change by CONFIG SET, or a failover, is noticed after this time."""

Wanted = Durability | str | None


def durability_of(durability: Wanted) -> Durability | None:
    """The parsed durability; None for None and ``memory``, which every reply implies."""
    if durability is None:
        return None
    level = Durability.parse(durability) if isinstance(durability, str) else durability
    if not isinstance(level, Durability):
        raise InvalidArgument("durability", durability, "None, memory, appended, fsynced or replicated(n)")
    return None if level.level == "memory" else level


def require(context: Context, key: bytes, durability: Durability) -> Operation[None]:
    """Raises DurabilityUnavailable if the node of ``key`` does not offer the durability. Nothing is written before."""
    if durability.level == "replicated":
        return
    appendfsync = yield from _settings(context, key)
    if appendfsync == "unknown":
        raise DurabilityUnavailable(
            str(durability), "CONFIG GET is not allowed, so it cannot be checked. Allow it, or ask for less."
        )
    if appendfsync == "no":
        raise DurabilityUnavailable(
            str(durability), "appendonly is off. Turn it on (for an embedded broker: open local:///path)."
        )
    if durability.level == "fsynced" and appendfsync != "always":
        raise DurabilityUnavailable(str(durability), f"appendfsync is {appendfsync!r}. Set it to 'always'.")


def _settings(context: Context, key: bytes) -> Operation[str]:
    """The server's setting: ``no`` without an append-only file, else the value of appendfsync; ``unknown`` if not
    readable.
    """
    slot = slot_of(key) if context.cluster else 0
    now_ms = context.clock.monotonic_ms()
    cached = context.durability_seen.get(slot)
    if cached is not None and now_ms - cached[0] < REMEMBER_MS:
        return cached[1]
    settings: dict[bytes, Any] = {}
    try:
        for name in (b"appendonly", b"appendfsync"):
            settings |= mapping((yield Command((b"CONFIG", b"GET", name), key, repeatable=True)))
    except (PermissionDenied, ServerError):
        settings = {}
    appendfsync = "unknown"
    if len(settings) == 2:
        appendfsync = settings[b"appendfsync"].decode() if settings[b"appendonly"] == b"yes" else "no"
    context.durability_seen[slot] = now_ms, appendfsync
    return appendfsync


def send_durably(
    context: Context,
    key: bytes,
    commands: Sequence[Args],
    durability: Durability,
    *,
    atomic: bool = False,
    repeatable: bool = False,
    reading: Reading = return_unchanged,
) -> Operation[tuple[list[Any], DurabilityUnavailable | None]]:
    """Sends commands with a durability; returns the replies and, if the write is stored but not confirmed, the error to
    raise.
    """
    yield from require(context, key, durability)
    if durability.level != "replicated":
        replies = yield Batch(commands, key, atomic, repeatable, reading=reading)
        return replies, None
    # WAIT inside MULTI returns immediately, so it must follow EXEC on the same connection.
    wait = (b"WAIT", b"%d" % durability.replicas, b"%d" % durability.timeout_ms)
    replies = yield Batch(commands, key, atomic, repeatable, same_connection=True, after=wait, reading=reading)
    confirmed = replies.pop()
    if isinstance(confirmed, int) and confirmed >= durability.replicas:
        return replies, None
    return replies, DurabilityUnavailable(
        str(durability),
        f"{confirmed if isinstance(confirmed, int) else 0} replicas confirmed within {durability.timeout_ms} ms. "
        "The write is stored but not confirmed: check the replicas before you repeat it.",
        stored=True,
    )


def run_script_durably(
    context: Context,
    chosen: Script,
    keys: Sequence[bytes],
    argv: Sequence[bytes],
    durability: Durability | None,
    *,
    repeatable: bool = False,
    fence: Fence | None = None,
) -> Operation[Any]:
    """Runs a script with a durability and returns its reply.

    Raises DurabilityUnavailable if its writes were not confirmed; the error's ``reply`` is then the script's reply.
    """
    if fence is not None:
        chosen, keys, argv = fenced_form(chosen), (*keys, fence.key), (*argv, fence.record)
    args: Args = (b"EVALSHA", chosen.sha, b"%d" % len(keys), *keys, *argv)  # inlined: every publish runs this
    if durability is None:
        return (yield Command(args, keys[0], repeatable))
    (reply,), unconfirmed = yield from send_durably(context, keys[0], [args], durability, repeatable=repeatable)
    if isinstance(reply, ErrorReply):
        raise typed_error(reply)
    if unconfirmed is not None:
        unconfirmed.__dict__["reply"] = reply
        raise unconfirmed
    return reply
