"""The retry policy without I/O: a list of events in, a list of actions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from millstream.broker.bulk import CombinedCommands, UniformCommands
from millstream.broker.keys import SLOTS, slot_of
from millstream.broker.scripts.script import script
from millstream.broker.transport.retry_policy import RetryPolicy, refused_from, unwrap
from millstream.broker.transport.routes import Exchange, Exchanges, NoAnswer, NotSent, Pause, route_to
from millstream.broker.transport.targets import Node, NodeName, Target
from millstream.errors import BrokerUnavailable, OutOfMemory, ServerError
from millstream.model import ManualClock, quiet
from millstream.wire.commands import Batch, Command, ErrorReply

HERE, THERE, YONDER = Node("here", 1), Node("there", 2), Node("yonder", 3)
OOM = ErrorReply("OOM command not allowed")
WRITE = Command((b"XADD", b"s", b"*", b"n", b"1"), b"s")
READ = Command((b"XLEN", b"s"), b"s", repeatable=True)


class Road:
    """Plays the connections: each exchange takes the next scripted result; each pause advances the clock."""

    def __init__(self, target: Target, *happenings: Any, deadline_ms: int = 1000) -> None:
        self.clock = ManualClock()
        self.retry_policy = RetryPolicy(route_to(target), self.clock, deadline_ms, quiet, chance=lambda: 1.0)
        self._happenings = list(happenings)
        self.trips: list[Exchange] = []
        self.pauses: list[float] = []

    def walk(self, exchanges: Exchanges[Any]) -> Any:
        try:
            step = exchanges.send(None)
            while True:
                if isinstance(step, Pause):
                    self.pauses.append(step.seconds)
                    self.clock.advance(round(step.seconds * 1000))
                    step = exchanges.send(None)
                    continue
                self.trips.append(step)
                happening = self._happenings.pop(0)
                if isinstance(happening, Exception) and not isinstance(happening, ErrorReply):
                    step = exchanges.throw(happening)
                else:
                    step = exchanges.send(step.reading(happening if isinstance(happening, list) else [happening]))
        except StopIteration as done:
            return done.value

    def nodes(self) -> list[Node]:
        return [trip.node for trip in self.trips]


def single() -> Target:
    return Target("single", (HERE,))


def test_single_exchange_returns_the_reply() -> None:
    road = Road(single(), b"1-1")

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert road.trips == [Exchange(HERE, [WRITE.args])]
    assert road.pauses == []


def test_unsent_command_is_retried_until_the_deadline() -> None:
    road = Road(single(), *[NotSent("connection refused.")] * 50, deadline_ms=2000)

    with pytest.raises(BrokerUnavailable) as caught:
        road.walk(road.retry_policy.call(WRITE))

    assert not caught.value.may_have_been_applied
    assert ": connection refused. Check" in str(caught.value)
    assert road.pauses == sorted(road.pauses), "each wait is longer than the one before"
    assert sum(road.pauses) <= 2


def test_sent_command_is_not_repeated() -> None:
    road = Road(single(), NoAnswer("reset", [b"1-1"]))

    with pytest.raises(BrokerUnavailable) as caught:
        road.walk(road.retry_policy.call_many(Batch([WRITE.args] * 2, b"s")))

    assert caught.value.may_have_been_applied
    assert vars(caught.value)["replies"] == [b"1-1"]


@pytest.mark.parametrize(
    ("command", "advice"), [(b"XADD", "append_once"), (b"XREADGROUP", "read_history"), (b"XACK", "Check whether")]
)
def test_advice_after_a_lost_reply_depends_on_the_command(command: bytes, advice: str) -> None:
    road = Road(single(), NoAnswer("reset"))
    with pytest.raises(BrokerUnavailable) as caught:
        road.walk(road.retry_policy.call(Command((command, b"s"), b"s")))
    for words in ("append_once", "read_history"):
        assert (words in str(caught.value)) == (words in advice)
    assert advice in str(caught.value)


def test_repeatable_command_is_repeated() -> None:
    road = Road(single(), NoAnswer("reset"), NotSent("refused"), 3)

    assert road.walk(road.retry_policy.call(READ)) == 3


def test_blocking_command_uses_its_own_connection_and_timeout() -> None:
    road = Road(single(), None, None, None)

    for block_ms in (500, 0, None):
        road.walk(road.retry_policy.call(Command((b"XREAD",), b"s", block_ms=block_ms)))

    assert [(trip.alone, trip.wait_ms) for trip in road.trips] == [(True, 500), (True, None), (False, 0)]


def test_transient_errors_are_retried() -> None:
    road = Road(single(), OOM, ErrorReply("LOADING"), ErrorReply("BUSY"), b"1-1")

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert len(road.pauses) == 3


def test_transient_error_is_raised_at_the_deadline() -> None:
    road = Road(single(), *[OOM] * 50)

    with pytest.raises(OutOfMemory):
        road.walk(road.retry_policy.call(WRITE))


def test_permanent_errors_are_raised_at_once() -> None:
    road = Road(single(), ErrorReply("ERR whatever"))

    with pytest.raises(ServerError):
        road.walk(road.retry_policy.call(WRITE))
    assert road.pauses == []


def test_transiently_refused_tail_of_a_batch_is_sent_again() -> None:
    road = Road(single(), [b"1", OOM, OOM], [b"2", OOM], [b"3"])

    replies = road.walk(road.retry_policy.call_many(Batch([(b"a",), (b"b",), (b"c",)], b"s")))

    assert replies == [b"1", b"2", b"3"]
    assert [list(trip.requests) for trip in road.trips] == [[(b"a",), (b"b",), (b"c",)], [(b"b",), (b"c",)], [(b"c",)]]


def test_atomic_batch_is_one_transaction() -> None:
    road = Road(single(), [b"OK", b"QUEUED", b"QUEUED", [b"1", b"2"]])

    assert road.walk(road.retry_policy.call_many(Batch([(b"a",), (b"b",)], b"s", atomic=True))) == [b"1", b"2"]
    assert list(road.trips[0].requests) == [(b"MULTI",), (b"a",), (b"b",), (b"EXEC",)]
    assert road.trips[0].whole


def test_packed_atomic_batch_stays_packed() -> None:
    bulk = UniformCommands((b"XADD", b"s", b"*"), (b"n",), [b"1", b"2"])
    aborted = ErrorReply("EXECABORT Transaction discarded because of: OOM command not allowed")
    road = Road(single(), [b"OK", b"QUEUED", b"QUEUED", aborted], [b"OK", b"QUEUED", b"QUEUED", [b"1", b"2"]])

    assert road.walk(road.retry_policy.call_many(Batch(bulk, b"s", atomic=True))) == [b"1", b"2"]
    assert [type(trip.requests) for trip in road.trips] == [CombinedCommands, CombinedCommands]
    assert list(road.trips[1].requests) == [(b"MULTI",), *bulk, (b"EXEC",)]


def test_atomic_batch_refused_while_queueing_is_retried() -> None:
    aborted = ErrorReply("EXECABORT Transaction discarded because of previous errors.")
    road = Road(single(), [b"OK", OOM, OOM, aborted], [b"OK", b"QUEUED", b"QUEUED", [b"1", b"2"]])

    assert road.walk(road.retry_policy.call_many(Batch([(b"a",), (b"b",)], b"s", atomic=True))) == [b"1", b"2"]


def test_command_after_a_transaction_is_sent_with_it() -> None:
    wait = (b"WAIT", b"1", b"700")
    road = Road(single(), [b"OK", b"QUEUED", [b"1"], 1])

    assert road.walk(road.retry_policy.call_many(Batch([(b"a",)], b"s", atomic=True, after=wait))) == [b"1", 1]
    assert (road.trips[0].alone, road.trips[0].wait_ms) == (True, 700)


def test_command_after_a_batch_does_not_hide_an_error() -> None:
    wait = (b"WAIT", b"1", b"700")
    road = Road(single(), [OOM, 0], [b"1", 1])

    assert road.walk(road.retry_policy.call_many(Batch([(b"a",)], b"s", after=wait))) == [b"1", 1]


def lengths(replies: list[Any]) -> list[Any]:
    """A reading that would fail on a status, or on what it has read already."""
    return [reply if isinstance(reply, ErrorReply) else len(reply) for reply in replies]


def test_replies_are_converted_once() -> None:
    wait = (b"WAIT", b"1", b"700")
    slot = slot_of(b"s")
    for happenings, options in (
        ([[b"1", b"22"]], {}),
        ([[b"1", OOM], [b"22"]], {}),
        ([[b"OK", b"QUEUED", b"QUEUED", [b"1", b"22"]]], {"atomic": True}),
        ([[b"OK", b"QUEUED", b"QUEUED", [b"1", b"22"], 7]], {"atomic": True, "after": wait}),
        ([[b"1", b"22", 7]], {"after": wait}),
        ([[b"1", ErrorReply(f"ASK {slot} yonder:3")], [b"OK", b"22"]], {}),
        ([[b"1", b"22"]], {"key": None, "keys": [b"s", b"s"]}),
    ):
        road = Road(single(), *happenings)
        batch = Batch([(b"a",), (b"b",)], b"s", reading=lengths)._replace(**options)

        assert road.walk(road.retry_policy.call_many(batch))[:2] == [1, 2]


def test_interrupted_batch_reports_received_replies() -> None:
    road = Road(single(), [b"1", OOM], NoAnswer("cut", [2]))

    with pytest.raises(BrokerUnavailable) as caught:
        road.walk(road.retry_policy.call_many(Batch([(b"a",), (b"b",), (b"c",)], b"s", reading=lengths)))
    assert vars(caught.value)["replies"] == [1, 2]


@pytest.mark.parametrize(
    ("replies", "expected"),
    [([b"1", OOM], 1), ([OOM, b"1"], None), ([OOM, OOM], 0), ([b"1"], None), ([OOM, b"1", OOM], 2)],
)
def test_only_a_tail_of_a_batch_is_retried(replies: Sequence[Any], expected: int | None) -> None:
    assert refused_from(replies, atomic=False) == expected


def test_rejected_transaction_gives_every_command_its_cause() -> None:
    bad = ErrorReply("ERR unknown command")
    assert unwrap([b"OK", b"QUEUED", bad, ErrorReply("EXECABORT")]) == [bad, bad]
    assert [item.text.split()[0] for item in unwrap([b"OK", b"QUEUED", None])] == ["EXECABORT"]


# --- sentinel -------------------------------------------------------------------------------------------------------

SENTINELS = (Node("s1", 26379, kind="sentinel"), Node("s2", 26379, kind="sentinel"))


def watched() -> Target:
    return Target("sentinel", SENTINELS, "orders")


def test_sentinels_are_asked_in_turn_and_the_role_is_verified() -> None:
    road = Road(
        watched(),
        *(NotSent("refused"), [[b"here", b"1"]], [[b"slave", b"x"]], *(NotSent("refused"), [[b"there", b"2"]])),
        *([[b"master", 0, []]], b"1-1", b"1-2"),
    )

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert road.walk(road.retry_policy.call(WRITE)) == b"1-2"
    assert [str(node) for node in road.nodes()] == [
        *("s1:26379", "s2:26379", "here:1", "s1:26379", "s2:26379", "there:2", "there:2", "there:2")
    ]


def test_demoted_primary_causes_a_new_lookup() -> None:
    road = Road(
        watched(),
        *([[b"here", b"1"]], [[b"master"]], ErrorReply("READONLY You can't write against a read only replica.")),
        *([[b"there", b"2"]], [[b"master"]], b"1-1"),
    )

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert road.nodes()[-1] == THERE


@pytest.mark.parametrize("code", ["READONLY", "MASTERDOWN", "NOREPLICAS"])
def test_partitioned_primary_is_abandoned_although_its_sentinel_reports_it(code: str) -> None:
    road = Road(
        watched(),
        *([[b"here", b"1"]], [[b"master"]], ErrorReply(f"{code} no")),
        *([[b"there", b"2"]], [[b"master"]], b"1-1", b"1-2"),
    )

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert road.walk(road.retry_policy.call(WRITE)) == b"1-2"
    assert [str(node) for node in road.nodes()] == [
        *("s1:26379", "here:1", "here:1", "s2:26379", "there:2", "there:2", "there:2")
    ]


@pytest.mark.parametrize("code", ["OOM", "LOADING", "BUSY"])
def test_busy_primary_is_not_replaced(code: str) -> None:
    road = Road(watched(), [[b"here", b"1"]], [[b"master"]], ErrorReply(f"{code} wait"), b"1-1")

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert road.nodes()[-1] == HERE


def test_concurrent_failover_suspicions_move_on_by_one_sentinel() -> None:
    """Two commands were in flight at once, and both were refused."""
    road = Road(watched(), [[b"here", b"1"]], [[b"master"]], b"1-1", [[b"there", b"2"]], [[b"master"]], b"1-2")
    road.walk(road.retry_policy.call(WRITE))

    road.retry_policy.route.suspect_failover()
    road.retry_policy.route.suspect_failover()

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-2"
    assert road.nodes()[3] == SENTINELS[1]


# --- cluster --------------------------------------------------------------------------------------------------------


def spread() -> Target:
    return Target("cluster", (HERE,))


def table(*owners: tuple[int, int, bytes, int]) -> list[list[Any]]:
    return [[[first, last, [host, port, b"id"]] for first, last, host, port in owners]]


HALVES = table((0, SLOTS // 2, b"here", 1), (SLOTS // 2 + 1, SLOTS - 1, b"there", 2))


def test_keys_find_their_nodes() -> None:
    road = Road(spread(), HALVES, *[b"1-1"] * 20)

    for n in range(20):
        key = b"k%d" % n
        road.walk(road.retry_policy.call(WRITE._replace(key=key)))
        assert road.trips[-1].node == (HERE if slot_of(key) <= SLOTS // 2 else THERE)
    assert len(road.trips) == 21


def test_moved_is_followed_and_remembered() -> None:
    slot = slot_of(b"s")
    road = Road(spread(), HALVES, ErrorReply(f"MOVED {slot} yonder:3"), b"1-1", b"1-2")

    road.walk(road.retry_policy.call(WRITE))
    road.walk(road.retry_policy.call(WRITE))

    assert road.nodes()[2:] == [YONDER, YONDER]
    assert road.pauses == []


def test_ask_is_followed_for_one_command() -> None:
    slot = slot_of(b"s")
    road = Road(spread(), HALVES, ErrorReply(f"ASK {slot} yonder:3"), [b"OK", b"1-1"], b"1-2")

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert list(road.trips[2].requests) == [(b"ASKING",), WRITE.args]
    road.walk(road.retry_policy.call(WRITE))
    assert road.nodes()[-1] == road.nodes()[1]


def test_circular_redirections_end() -> None:
    slot = slot_of(b"s")
    road = Road(spread(), HALVES, *[ErrorReply(f"MOVED {slot} yonder:3"), ErrorReply(f"MOVED {slot} here:1")] * 50)

    with pytest.raises(ServerError):
        road.walk(road.retry_policy.call(WRITE))
    assert road.pauses


def test_lost_node_causes_a_new_slot_table() -> None:
    road = Road(spread(), HALVES, NotSent("refused"), table((0, SLOTS - 1, b"yonder", 3)), b"1-1")

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert road.nodes()[-1] == YONDER


@pytest.mark.parametrize("code", ["READONLY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN"])
def test_partitioned_node_is_asked_last_for_the_slot_table(code: str) -> None:
    """It would keep returning the table in which the slots are its own."""
    road = Road(
        Target("cluster", (HERE, THERE)),
        *(table((0, SLOTS - 1, b"here", 1)), ErrorReply(f"{code} no")),
        *(table((0, SLOTS - 1, b"yonder", 3)), b"1-1"),
    )

    assert road.walk(road.retry_policy.call(WRITE)) == b"1-1"
    assert road.nodes() == [HERE, HERE, THERE, YONDER]


def test_empty_host_means_the_asked_node() -> None:
    road = Road(spread(), table((0, SLOTS - 1, b"", 7)), b"1-1")

    road.walk(road.retry_policy.call(WRITE))

    assert road.nodes()[-1] == Node("here", 7)


def test_command_can_be_sent_to_a_named_node() -> None:
    road = Road(spread(), b"PONG")

    road.walk(road.retry_policy.call(Command((b"PING",), NodeName(b"yonder:3"))))

    assert road.nodes() == [YONDER]


def test_batch_over_many_keys_is_split_by_node() -> None:
    keys = [b"k%d" % n for n in range(6)]
    here = [key for key in keys if slot_of(key) <= SLOTS // 2]
    there = [key for key in keys if slot_of(key) > SLOTS // 2]
    assert here
    assert there
    moved = ErrorReply(f"MOVED {slot_of(keys[0])} yonder:3")
    first, second = ([key + b"!" for key in share] for share in (here, there))
    (first if keys[0] in here else second)[0] = moved  # type: ignore[call-overload]  # one of them is elsewhere
    answers = [first, second] if keys[0] in here else [second, first]
    road = Road(spread(), HALVES, *answers, moved, keys[0] + b"!")

    replies = road.walk(road.retry_policy.call_many(Batch([(b"GET", key) for key in keys], keys=keys)))

    assert replies == [key + b"!" for key in keys]


KEYS = [b"k%d" % n for n in range(12)]
AT_HERE = [key for key in KEYS if slot_of(key) <= SLOTS // 2]
FIRST, SECOND = (HERE, THERE) if KEYS[0] in AT_HERE else (THERE, HERE)
ASKED_FIRST = [key for key in KEYS if (key in AT_HERE) == (FIRST == HERE)]
ASKED_SECOND = [key for key in KEYS if key not in ASKED_FIRST]


def over_both(*, repeatable: bool = False) -> Batch:
    return Batch([(b"GET", key) for key in KEYS], keys=KEYS, repeatable=repeatable)


def by_key(replies: list[Any]) -> dict[bytes, Any]:
    return dict(zip(KEYS, replies, strict=True))


def test_unreachable_node_does_not_affect_other_nodes_of_a_batch() -> None:
    gone = NotSent("connection refused")
    tries = [item for _ in range(30) for item in (HALVES, gone)]
    road = Road(spread(), HALVES, ASKED_FIRST, gone, gone, *tries, deadline_ms=2_000)

    replies = by_key(road.walk(road.retry_policy.call_many(over_both())))

    assert [replies[key] for key in ASKED_FIRST] == ASKED_FIRST
    assert len(ASKED_SECOND) > 2
    for key in ASKED_SECOND:
        assert isinstance(replies[key], BrokerUnavailable)
        assert not replies[key].may_have_been_applied
    assert sum(road.pauses) <= 2, "one deadline for all of them"


def test_broken_connection_does_not_affect_other_nodes_of_a_batch() -> None:
    """Received replies count; the other commands are ambiguous."""
    road = Road(spread(), HALVES, NoAnswer("reset", ASKED_FIRST[:1]), ASKED_SECOND)

    replies = by_key(road.walk(road.retry_policy.call_many(over_both())))

    assert [replies[key] for key in (ASKED_FIRST[0], *ASKED_SECOND)] == [ASKED_FIRST[0], *ASKED_SECOND]
    for key in ASKED_FIRST[1:]:
        assert isinstance(replies[key], BrokerUnavailable)
        assert replies[key].may_have_been_applied


def test_transient_errors_of_a_batch_share_one_deadline() -> None:
    down = ErrorReply("CLUSTERDOWN Hash slot not served")
    tries = [item for _ in range(60) for item in (HALVES, down)]
    road = Road(spread(), HALVES, ASKED_FIRST, [down] * len(ASKED_SECOND), down, *tries, deadline_ms=2_000)

    replies = by_key(road.walk(road.retry_policy.call_many(over_both())))

    assert [replies[key] for key in ASKED_FIRST] == ASKED_FIRST
    assert [replies[key] for key in ASKED_SECOND] == [down] * len(ASKED_SECOND)
    assert sum(road.pauses) <= 2


def test_batch_without_any_reply_raises() -> None:
    road = Road(spread(), HALVES, *[NoAnswer("reset")] * 2)

    with pytest.raises(BrokerUnavailable) as caught:
        road.walk(road.retry_policy.call_many(over_both()))

    assert caught.value.may_have_been_applied


# --- scripts ---

STEP = Command(script("trim_safely").evalsha_args((b"s",), (b"1", b"0")), b"s", repeatable=True)
LOAD = (b"SCRIPT", b"LOAD", script("trim_safely").source)
UNKNOWN = ErrorReply("NOSCRIPT No matching script. Please use EVAL.")


def test_unknown_script_is_loaded() -> None:
    road = Road(single(), UNKNOWN, b"sha", 3)

    assert road.walk(road.retry_policy.call(STEP)) == 3
    assert [list(trip.requests) for trip in road.trips] == [[STEP.args], [LOAD], [STEP.args]]
    assert road.pauses == []


def test_script_is_loaded_into_the_redirected_node() -> None:
    """The slot is moving: its owner has the script, and redirects the call with ASK."""
    road = Road(spread(), HALVES, ErrorReply(f"ASK {slot_of(b's')} yonder:3"), [b"OK", UNKNOWN], b"sha", [b"OK", 3])

    assert road.walk(road.retry_policy.call(STEP)) == 3
    assert road.nodes()[2:] == [YONDER, YONDER, YONDER]
    assert list(road.trips[-1].requests) == [(b"ASKING",), STEP.args]


def test_wait_is_repeated_after_loading_a_script() -> None:
    wait = (b"WAIT", b"1", b"100")
    road = Road(single(), [UNKNOWN, 1], b"sha", [3, 1])

    assert road.walk(road.retry_policy.call_many(Batch([STEP.args], b"s", after=wait))) == [3, 1]
    assert list(road.trips[2].requests) == [STEP.args, wait]


def test_node_that_keeps_forgetting_a_script_is_retried_with_pauses() -> None:
    road = Road(single(), *[UNKNOWN, b"sha"] * 100)

    with pytest.raises(ServerError, match="NOSCRIPT"):
        road.walk(road.retry_policy.call(STEP))
    assert len(road.pauses) >= 3
    assert len(road.trips) < 30


def test_unknown_foreign_script_is_not_loaded() -> None:
    road = Road(single(), UNKNOWN)

    with pytest.raises(ServerError, match="NOSCRIPT"):
        road.walk(road.retry_policy.call(Command((b"EVALSHA", b"0" * 40, b"0"))))


def test_one_script_load_serves_all_streams_of_a_node() -> None:
    keys = [b"k%d" % n for n in range(6)]
    words = [script("trim_safely").evalsha_args((key,), (b"1", b"0")) for key in keys]
    here = [key for key in keys if slot_of(key) <= SLOTS // 2]
    there = [key for key in keys if slot_of(key) > SLOTS // 2]
    assert here
    assert there
    first_is_here = slot_of(keys[0]) <= SLOTS // 2
    answers = {True: [[UNKNOWN] * len(here), b"sha", [1] * len(here)], False: [[2] * len(there)]}
    road = Road(spread(), HALVES, *answers[first_is_here], *answers[not first_is_here])

    replies = road.walk(road.retry_policy.call_many(Batch(words, keys=keys)))

    assert replies == [1 if key in here else 2 for key in keys]
    assert len(road.trips) == 5


def test_long_wait_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    refused = NotSent("here:1: connection refused")
    road = Road(single(), *[refused] * 10, 1, *[refused] * 3, 2, deadline_ms=10_000)
    assert road.walk(road.retry_policy.call(WRITE)) == 1
    assert len(caplog.messages) == 2
    assert "here:1: connection refused" in caplog.messages[0]
    before = road.clock.monotonic_ms()
    assert road.walk(road.retry_policy.call(WRITE)) == 2
    assert 0 < road.clock.monotonic_ms() - before < 2000
    assert len(caplog.messages) == 2, "a short outage is reported only to observers"
