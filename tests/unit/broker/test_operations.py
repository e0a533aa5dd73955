"""Operations driven by a list of replies, without transport and event loop."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker.context import Context, Limits
from millstream.broker.operations import groups, info, streams
from millstream.broker.operations.durability import REMEMBER_MS
from millstream.broker.scripts.append_once import BatchWriter, Digest, Once
from millstream.broker.scripts.append_unique.call import append_unique
from millstream.broker.scripts.retention import call as retention
from millstream.errors import (
    BrokerUnavailable,
    DurabilityUnavailable,
    OutOfMemory,
    PayloadTooLarge,
    ServerError,
    ServerTooOld,
)
from millstream.model import EntryId, ManualClock
from millstream.wire.commands import Batch, Command, ErrorReply, Operation


def run_operation(operation: Operation[Any], *replies: Any) -> tuple[Any, list[Command | Batch]]:
    """Runs an operation over the given replies; returns its result and its commands."""
    asked: list[Command | Batch] = []
    remaining = list(replies)
    try:
        request = operation.send(None)
        while True:
            asked.append(request)
            reply = remaining.pop(0)
            if isinstance(reply, Exception):
                request = operation.throw(reply)
            else:
                request = operation.send(request.read(reply) if isinstance(request, Batch) else reply)
    except StopIteration as done:
        assert not remaining, f"unused replies: {remaining}"
        return done.value, asked


def test_repeatable_commands_are_marked() -> None:
    context = Context()
    for operation, reply, repeatable in (
        (streams.xlen(context, "s"), 0, True),
        (streams.xread(context, {"s": "0"}), None, True),
        (streams.xread(context, {"s": "$"}), None, False),
        (streams.xadd(context, "s", {"n": 1}), b"1-1", False),
        (groups.xreadgroup(context, "s", "g", "c"), None, False),
        (groups.create_group(context, "s", "g", start="0"), b"OK", True),
        (groups.create_group(context, "s", "g", start="0", exist_ok=False), b"OK", False),
    ):
        _, (asked,) = run_operation(operation, reply)
        assert asked.repeatable is repeatable, asked


TRIM_REPLIES: list[Any] = [[[]], 9]
"""Replies to a safe trim: the stream has no groups; nine entries were deleted."""


def test_long_streams_are_trimmed_periodically() -> None:
    """At the first add, so that short-lived writers trim too, and then after each tenth of the limit."""
    context = Context(max_stream_len=100)

    trimmed_at = []
    for n in range(35):
        replies: list[Any] = [b"1-1"] if context.until_trim.get(b"s", 0) > 1 else [b"1-1", *TRIM_REPLIES]
        _, asked = run_operation(streams.xadd(context, "s", {"n": n}), *replies)
        if len(asked) == 3:
            trimmed_at.append(n)

    assert trimmed_at == [0, 10, 20, 30]


def test_many_adds_trim_once() -> None:
    context = Context(max_stream_len=100)

    ids = [b"1-%d" % n for n in range(500)]
    _, asked = run_operation(streams.xadd_many(context, "s", [{"n": n} for n in range(500)]), ids, *TRIM_REPLIES)

    assert len(asked) == 3


def test_failed_trim_does_not_fail_the_add() -> None:
    event_names: list[str] = []
    context = Context(max_stream_len=100, observer=lambda name, **facts: event_names.append(name))

    result, _ = run_operation(streams.xadd(context, "s", {"n": 1}), b"1-1", OutOfMemory("OOM"))

    assert result == EntryId(1, 1)
    assert event_names == ["broker.trim_failed"]


def test_counting_is_bounded() -> None:
    context = Context(max_stream_len=1000)
    for n in range(retention.MAX_COUNTED_STREAMS + 5):
        run_operation(streams.xadd(context, f"s{n}", {"n": 1}), b"1-1", *TRIM_REPLIES)

    assert len(context.until_trim) <= retention.MAX_COUNTED_STREAMS


def test_payloads_over_the_limit() -> None:
    context = Context(limits=Limits(max_entry_bytes=100, max_atomic_bytes=300))
    for operation in (
        streams.xadd(context, "s", {"n": b"x" * 101}),
        streams.xadd(context, "s", {"n" * 60: "x" * 60}),
        streams.xadd_many(context, "s", [{"n": b"x"}, {"n": b"x" * 101}]),
        streams.xadd_many(context, "s", [{"n": b"x" * 90}] * 4, atomic=True),
    ):
        with pytest.raises(PayloadTooLarge) as caught:
            run_operation(operation)
        assert "limit" in str(caught.value)
    run_operation(streams.xadd_many(context, "s", [{"n": b"x" * 90}] * 4), [b"1-1"] * 4)


def test_durability_is_checked_before_the_write_and_cached() -> None:
    clock = ManualClock()
    context = Context(clock=clock)
    yes, everysec = [b"appendonly", b"yes"], [b"appendfsync", b"everysec"]

    _, asked = run_operation(streams.xadd(context, "s", {"n": 1}, durability="appended"), yes, everysec, [b"1-1"])
    assert [type(request) for request in asked] == [Command, Command, Batch]

    _, asked = run_operation(streams.xadd(context, "s", {"n": 1}, durability="appended"), [b"1-2"])
    assert len(asked) == 1
    with pytest.raises(DurabilityUnavailable) as caught:
        run_operation(streams.xadd(context, "s", {"n": 1}, durability="fsynced"))
    assert "always" in str(caught.value)

    clock.advance(REMEMBER_MS)
    always = [b"appendfsync", b"always"]
    run_operation(streams.xadd(context, "s", {"n": 1}, durability="fsynced"), yes, always, [b"1-3"])


def test_unreadable_durability_setting_is_an_error() -> None:
    for refusal in (ServerError("ERR unknown command 'CONFIG'"), []):
        with pytest.raises(DurabilityUnavailable):
            run_operation(
                streams.xadd(Context(), "s", {"n": 1}, durability="appended"),
                *([refusal] * (2 if refusal == [] else 1)),
            )


def test_one_wait_confirms_a_whole_batch() -> None:
    operation = streams.xadd_many(Context(), "s", [{"n": 1}, {"n": 2}], durability="replicated(2)", atomic=True)

    ids, (asked,) = run_operation(operation, [b"1-1", b"1-2", 2])

    assert ids == [EntryId(1, 1), EntryId(1, 2)]
    assert isinstance(asked, Batch)
    assert asked.after == (b"WAIT", b"2", b"1000")


def test_once_writer_accepts_the_same_rows_after_an_error() -> None:
    context = Context(limits=Limits(script_entries=2))
    writer = Once("s", "w", 1, digest=Digest())
    rows: list[Any] = [{"n": n} for n in range(4)]
    with pytest.raises(BrokerUnavailable):
        run_operation(writer.append(context, rows), [b"OK", b"1-0", b"1-1"], BrokerUnavailable("gone"))

    assert writer.position == 0
    digest = Digest()
    digest.add([[b"n", b"0"], [b"n", b"1"]])
    answers = ([b"ROWS", b"2", digest.hexdigest(), b"1-1"], [b"OK", b"1-2", b"1-3"])
    appended, _ = run_operation(writer.append(context, rows), *answers)

    assert (appended.added, appended.skipped, writer.position) == (2, 2, 4)


def test_partly_stored_batch_reports_its_ids() -> None:
    full = ErrorReply("OOM command not allowed when used memory > 'maxmemory'.")
    with pytest.raises(OutOfMemory, match="2 of 3 entries were stored") as caught:
        run_operation(streams.xadd_many(Context(), "s", [{"n": n} for n in range(3)]), [b"1-0", b"1-1", full])
    assert caught.value.ids == [EntryId(1, 0), EntryId(1, 1), None]  # type: ignore[attr-defined]  # a fact of this one


def test_reply_with_too_few_ids_is_an_error() -> None:
    for writer, answer in ((Once("s", "w", 1), [b"OK", b"1-1"]), (Once("s", "w", 1), [b"OK", b"1-1", b"1-2", b"1-3"])):
        with pytest.raises(ServerError, match="for 2 rows"):
            run_operation(writer.append(Context(), [{"n": 1}, {"n": 2}]), answer)
        assert writer.position == 0
    options: dict[str, Any] = {"partition": "0", "forget_after_ms": 1000, "durability": None}
    batches = BatchWriter("s", "w", 1, **options)
    with pytest.raises(ServerError, match="for 2 rows"):
        run_operation(batches.append(Context(), [[b"n", b"1"], [b"n", b"2"]], b"token"), [b"OK", b"1-1"])
    assert batches.position == 0
    with pytest.raises(ServerError, match="for 2 entries"):
        run_operation(append_unique(Context(), "s", [("a", {"n": 1}), ("b", {"n": 2})]), [b"1-1"])


OF_REDIS_6 = [b"name", b"billing", b"consumers", 0, b"pending", 0, b"last-delivered-id", b"5-1"]
STREAM_OF_REDIS_6 = [
    *(b"length", 1, b"radix-tree-keys", 1, b"radix-tree-nodes", 2, b"last-generated-id", b"5-1", b"groups", 1),
    *(b"first-entry", [b"5-1", [b"n", b"1"]], b"last-entry", [b"5-1", [b"n", b"1"]]),
]
"""The replies of Redis 6.2 to XINFO GROUPS and XINFO STREAM."""


@pytest.mark.parametrize(
    ("asking", "replies"),
    [
        (info.stream_info(Context(), "orders"), [STREAM_OF_REDIS_6]),
        (info.group_info(Context(), "orders"), [[OF_REDIS_6], [[]]]),
        (info.read_stream_stats(Context(), ["orders"], memory=False), [[STREAM_OF_REDIS_6], [[OF_REDIS_6]]]),
    ],
)
def test_old_server_raises_server_too_old(asking: Operation[Any], replies: list[Any]) -> None:
    with pytest.raises(ServerTooOld, match=r"Use Redis 7\.0 or newer"):
        run_operation(asking, *replies)
