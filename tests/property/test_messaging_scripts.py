"""The scripts of messaging and their emulations: the same steps on Redis and on the engine give the same replies,
pending lists, groups, dead letters and due times.
"""

from __future__ import annotations

import uuid
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream import BlockingBroker, EntryId, open_blocking_broker
from millstream.broker.keys import companion_key
from millstream.broker.scripts import delayed, recovery, settle
from millstream.broker.scripts import groups as group_steps
from millstream.broker.scripts.recovery import Swept
from millstream.broker.scripts.recovery.call import needs_visit
from millstream.broker.scripts.settle import Output
from millstream.errors import MillstreamError
from millstream.testing import RedisProcess
from millstream.wire.commands import Command

HOUR = 3_600_000
NUMBERS = range(1, 9)

consumers = st.sampled_from(["a", "b", "a member"])
groups = st.sampled_from(["g", "h"])
ids = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)
times = st.integers(0, 3)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), groups, consumers, st.integers(1, 4)),
        st.tuples(st.just("abandon"), groups, consumers, ids, times),
        st.tuples(st.just("delete"), ids),
        st.tuples(st.sampled_from(["ack_held", "heartbeat", "count_delivery"]), groups, consumers, ids, times),
        st.tuples(st.just("ack_streams"), groups, consumers, ids, times),
        st.tuples(st.just("return_unstarted"), groups, consumers, ids, times, times),
        st.tuples(st.just("delay"), groups, consumers, ids, times, st.sampled_from([0, HOUR])),
        st.tuples(st.just("dead_letter"), groups, consumers, st.integers(1, 9), times),
        st.tuples(st.just("outputs"), groups, consumers, ids, times, st.integers(0, 2)),
        st.tuples(st.just("sweep"), groups, consumers, st.integers(1, 4), st.integers(0, 3), st.booleans(), ids),
        st.tuples(st.just("visit"), groups, st.integers(1, 4), st.sampled_from([0, HOUR])),
        st.tuples(st.just("small_sweep"), groups, consumers, st.integers(1, 30)),
        st.tuples(st.just("due"), groups, consumers, st.integers(0, 3)),
        st.tuples(st.just("release"), groups, consumers, st.integers(1, 4)),
        st.tuples(
            st.sampled_from(["later", "later_unique"]),
            st.lists(st.sampled_from("xyz"), min_size=1, max_size=3),
            st.sampled_from([0, HOUR]),
        ),
        st.tuples(st.just("unique"), st.sampled_from("xyz")),
        st.tuples(st.just("move"), st.integers(1, 3)),
        st.tuples(st.just("restore_group"), groups, st.integers(0, 9)),
        st.tuples(st.just("lose_group"), groups),
        st.tuples(
            st.just("wrong_type"),
        ),
    ),
    max_size=30,
)


def entry(number: int) -> EntryId:
    """An id far in the past, so that entries that a script adds with ``*`` follow it; equal on both sides."""
    return EntryId(1, number)


def timeless(swept: Swept) -> Any:
    """Replaces ids that the clock generated, because they differ between the sides."""
    cursor = swept.cursor if swept.cursor.removeprefix(b"(").startswith((b"0-", b"1-")) else b"later"
    return (
        cursor,
        [delivery if delivery.id.ms == 1 else delivery.fields for delivery in swept.deliveries],
        len(swept.gone),
    )


class Side:
    def __init__(self, broker: BlockingBroker) -> None:
        self.broker = broker
        self.published = 0
        broker.transport.call(Command((b"FLUSHALL",)))
        for number in NUMBERS:
            broker.xadd("s", {"n": number}, id=entry(number))
        for group in ("g", "h"):
            broker.create_group("s", group, start="0")

    def step(self, name: str, *args: Any) -> Any:
        """The reply without values from the clock, and the resulting state."""
        try:
            answer = self._do(name, *args)
        except MillstreamError as error:
            answer = type(error).__name__
        return answer, self._left()

    def _do(self, name: str, *args: Any) -> Any:
        broker = self.broker
        match name, args:
            case "read", (group, consumer, count):
                return [item.id for item in broker.xreadgroup("s", group, consumer, count=count) if item.id.ms == 1]
            case "abandon", (group, consumer, numbers, count):
                batch = [entry(n) for n in numbers]
                return broker.xclaim_ids("s", group, consumer, batch, min_idle_ms=0, time_ms=1, retry_count=count)
            case "delete", (numbers,):
                return broker.xdel("s", [entry(n) for n in numbers])
            case (("ack_held" | "heartbeat" | "count_delivery"), (group, consumer, numbers, count)):
                batch = [entry(n) for n in numbers]
                return broker.run(getattr(settle, name), "s", group, consumer, batch, times_delivered=count)
            case "ack_streams", (group, consumer, numbers, count):
                batch = [entry(n) for n in numbers]
                acks = [("none", count, batch), ("s", count, batch), ("{s}.out", count, batch), ("s", count, batch[:1])]
                return broker.run(settle.ack_streams, group, consumer, acks)
            case "return_unstarted", (group, consumer, numbers, count, leaving):
                batch = [entry(n) for n in numbers]
                return broker.run(
                    settle.return_unstarted, "s", group, consumer, batch, times_delivered=count, leaving=leaving
                )
            case "delay", (group, consumer, numbers, count, delay_ms):
                batch = [entry(n) for n in numbers]
                return broker.run(settle.delay, "s", group, consumer, batch, times_delivered=count, delay_ms=delay_ms)
            case "dead_letter", (group, consumer, number, count):
                letter = {"why": b"\x00"}
                return (
                    broker.run(
                        settle.dead_letter, "s", group, consumer, entry(number), times_delivered=count, fields=letter
                    )
                    is None
                )
            case "outputs", (group, consumer, numbers, count, outputs):
                step = [Output(entry(n), count, [("{s}.out", {"n": n})] * outputs) for n in numbers]
                ids = broker.run(settle.ack_with_outputs, "s", group, consumer, step)
                return [None if batch is None else len(batch) for batch in ids]
            case "sweep", (group, consumer, scan, room, own, but):
                swept = broker.run(
                    recovery.sweep,
                    "s",
                    group,
                    consumer,
                    min_idle_ms=0 if own else HOUR,
                    scan=scan,
                    room=room,
                    owner=consumer if own else None,
                    but=[entry(n) for n in but],
                )
                return timeless(swept)
            case "small_sweep", (group, consumer, max_bytes):
                return timeless(broker.run(recovery.sweep, "s", group, consumer, min_idle_ms=HOUR, max_bytes=max_bytes))
            case "visit", (group, scan, min_idle_ms):
                streams = ("none", "s", "{s}.out")
                visits = broker.run(needs_visit, streams, group, min_idle_ms=min_idle_ms, scan=scan)
                return {n: (visit.sweep, visit.due_ms is None, visit.later_ms is None) for n, visit in visits.items()}
            case "due", (group, consumer, room):
                due = broker.run(recovery.take_due, "s", group, consumer, room=room)
                return due.deliveries, due.next_ms is None, due.gone
            case "release", (group, consumer, page):
                return broker.run(recovery.release, "s", group, consumer, page=page)
            case "later", (tokens, delay_ms):
                messages = [(token, {"token": token, "bytes": b"1:\x00:"}) for token in dict.fromkeys(tokens)]
                return broker.run(delayed.publish_later, "s", messages, delay_ms=delay_ms)
            case "later_unique", (tokens, delay_ms):
                self.published += 1
                messages = [(token, {"n": self.published}) for token in tokens]
                return broker.run(delayed.publish_later, "s", messages, delay_ms=delay_ms, unique_for_ms=HOUR)
            case "unique", (event,):
                return broker.append_unique("s", [(event, {"event": event})]).added
            case "move", (limit,):
                moved, next_ms = broker.run(delayed.publish_due, "s", limit=limit)
                return moved, next_ms is None
            case "restore_group", (group, number):
                return broker.run(group_steps.restore_group, "s", group, EntryId(1, number))
            case "lose_group", (group,):
                return broker.delete_group("s", group)
            case "wrong_type", ():
                return broker.set("{s}.out", b"no stream")
        raise AssertionError(name)

    def _left(self) -> Any:
        broker = self.broker
        remaining: list[Any] = [[item.fields for item in broker.xrange("s")]]
        for info in broker.group_info("s"):
            remaining.append((info.name, info.last_delivered if info.last_delivered.ms == 1 else "later"))
            remaining.append(
                [(item.id, item.consumer, item.times_delivered, item.idle_ms > HOUR) for item in self._old(info.name)]
            )
            remaining.append(self._members(f"due:{info.name}"))
        remaining.append([item.fields for item in broker.xrange(companion_key("s", "dlq"))])
        remaining.append((self._members("later"), self._members("later.done")))
        for suffix in ("seen.a", "seen.b"):
            remaining.append(sorted(broker.transport.call(Command((b"SMEMBERS", companion_key("s", suffix))))))
        return remaining

    def _old(self, group: str) -> list[Any]:
        return [item for item in self.broker.xpending_range("s", group) if item.id.ms == 1]

    def _members(self, suffix: str) -> list[bytes]:
        return sorted(self.broker.transport.call(Command((b"ZRANGE", companion_key("s", suffix), b"0", b"-1"))))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_scripts_and_emulations_reply_alike(redis_server: RedisProcess, script: list[tuple[Any, ...]]) -> None:
    with (
        open_blocking_broker(redis_server.url) as redis,
        open_blocking_broker(f"local://{uuid.uuid4()}", max_stream_len=None) as engine,
    ):
        theirs, ours = Side(redis), Side(engine)
        for number, step in enumerate(script):
            assert ours.step(*step) == theirs.step(*step), f"step {number} of {script}"


def test_many_ids_are_settled_although_the_consumer_holds_many_others(redis_server: RedisProcess) -> None:
    """The fast path reads a range. If the consumer has more entries between the ids, each id is read."""
    for url in (redis_server.url, f"local://{uuid.uuid4()}"):
        with open_blocking_broker(url, max_stream_len=None) as broker:
            broker.delete("many")
            broker.xadd_many("many", [{"n": n} for n in range(500)])
            broker.create_group("many", "g", start="0")
            held = [item.id for item in broker.xreadgroup("many", "g", "me", count=500)]
            batch = held[::50]

            assert broker.run(settle.ack_held, "many", "g", "me", batch, times_delivered=1).refused == []
            assert broker.run(settle.ack_held, "many", "g", "me", batch, times_delivered=1) == (batch, True, [])
            assert broker.xpending("many", "g").count == 490
            assert broker.run(settle.ack_held, "many", "g", "other", held[1:3], times_delivered=1) == (
                held[1:3],
                False,
                [],
            )


def test_deleted_entries_are_reported_and_removed_from_pending_lists(redis_server: RedisProcess) -> None:
    """With every outcome except an acknowledgement; and settled entries are not reported."""
    for url in (redis_server.url, f"local://{uuid.uuid4()}"):
        with open_blocking_broker(url) as broker:
            broker.delete("gone", companion_key("gone", "due:g"))
            broker.xadd_many("gone", [{"n": n} for n in range(14)])
            broker.create_group("gone", "g", start="0")
            held = [item.id for item in broker.xreadgroup("gone", "g", "me", count=14)]
            early, late = held[8:11], held[11:]
            broker.run(settle.delay, "gone", "g", "me", early, times_delivered=1, delay_ms=0)
            broker.xdel("gone", [*held[:8:2], *early[:2]])
            broker.xack("gone", "g", early[1])

            say = {"times_delivered": 1}
            assert broker.run(settle.heartbeat, "gone", "g", "me", held[:2], **say) == ([], True, held[:1])
            assert broker.run(settle.count_delivery, "gone", "g", "me", held[2:4], **say) == ([], True, held[2:3])
            assert broker.run(settle.return_unstarted, "gone", "g", "me", held[4:6], **say, leaving=0) == (
                [],
                True,
                held[4:5],
            )
            assert broker.run(settle.delay, "gone", "g", "me", held[6:8], **say, delay_ms=HOUR) == ([], True, held[6:7])
            due = broker.run(recovery.take_due, "gone", "g", "me")
            assert ([delivery.id for delivery in due.deliveries], due.gone) == (early[2:], early[:1])
            broker.xdel("gone", late)
            assert broker.run(settle.ack_held, "gone", "g", "me", late, **say) == ([], True, [])

            assert [item.id for item in broker.xpending_range("gone", "g")] == [*held[1:8:2], early[2]]
            assert broker.transport.call(Command((b"ZRANGE", companion_key("gone", "due:g"), b"0", b"-1"))) == [
                bytes(held[7])
            ]


def test_scan_covers_a_long_pending_list(redis_server: RedisProcess) -> None:
    """Entries of several counts, deleted ones, delayed ones and skipped ones, over many claims at a time: each
    is returned once, in order, with its count; room and bytes end a page, and the next goes on where it ended."""
    for url in (redis_server.url, f"local://{uuid.uuid4()}"):
        with open_blocking_broker(url) as broker:
            broker.delete("long", companion_key("long", "due:g"))
            broker.xadd_many("long", [{"n": b"%03d" % n, "size": b"." * (n % 40)} for n in range(450)])
            broker.create_group("long", "g", start="0")
            held = [item.id for item in broker.xreadgroup("long", "g", "dead", count=450)]
            broker.xclaim_ids("long", "g", "dead", held[250:], min_idle_ms=0)
            twice = [item.id for item in broker.xclaim("long", "g", "dead", held[120:170], min_idle_ms=0)]
            deleted, delayed_ones, left_alone = held[3:300:7], held[301:310], held[440:445]
            broker.run(settle.delay, "long", "g", "dead", delayed_ones, times_delivered=1, delay_ms=HOUR)
            broker.xdel("long", deleted)
            expected = [item for item in held if item not in {*deleted, *delayed_ones, *left_alone}]

            pages: list[Swept] = []
            cursor = b"0-0"
            while not pages or not pages[-1].finished:
                limits = {"scan": 230, "room": 130, "max_bytes": 3_000, "but": left_alone}
                pages.append(broker.run(recovery.sweep, "long", "g", "me", min_idle_ms=0, cursor=cursor, **limits))
                cursor = pages[-1].cursor

            result = [delivery for page in pages for delivery in page.deliveries]
            assert [match.id for match in result] == expected
            assert [match.id for match in result if match.times_delivered == 2] == [
                item for item in twice if item in expected
            ]
            assert [item for page in pages for item in page.gone] == deleted
            assert max(len(page.deliveries) for page in pages) <= 130
            for page in pages:  # a page ends with the entry that is too much, or a little later where sizes differ
                weights = [
                    sum(map(len, (*delivery.fields.keys(), *delivery.fields.values()))) for delivery in page.deliveries
                ]
                assert sum(weights) <= 3_000 + 50 * max(weights)
            mine = broker.xpending_range("long", "g", consumer="me", count=500)
            assert [(item.id, item.times_delivered) for item in mine] == [
                (match.id, match.times_delivered) for match in result
            ]
