"""Stream commands on a manual clock: rejected commands change nothing; claims, idle times, counters."""

from __future__ import annotations

import pytest
from driving import START_MS, Driver

from millstream.engine.effects import snapshot
from millstream.wire.commands import NIL_ARRAY, ErrorReply

INVALID_ID = "ERR Invalid stream ID specified as stream command argument"
NOT_AN_INTEGER = "ERR value is not an integer or out of range"
SYNTAX = "ERR syntax error"
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


@pytest.fixture
def driver() -> Driver:
    """A stream of three entries, of which alice has read two, and a string."""
    driver = Driver()
    for number in (1, 2, 3):
        driver.say(f"XADD s {number}-1 f v{number}")
    driver.say("XGROUP CREATE s g 0")
    driver.say("XREADGROUP GROUP g alice COUNT 2 STREAMS s >")
    driver.say("SET text x")
    return driver


REFUSED = [
    ("XADD s 3-1 f v", "ERR The ID specified in XADD is equal or smaller than the target stream top item"),
    ("XADD s 2-* f v", "ERR The ID specified in XADD is equal or smaller than the target stream top item"),
    ("XADD s 0-0 f v", "ERR The ID specified in XADD must be greater than 0-0"),
    ("XADD s * f v g", "ERR wrong number of arguments for 'xadd' command"),
    ("XADD s 9-1 f v g", "ERR wrong number of arguments for 'xadd' command"),
    ("XADD s nonsense f v", INVALID_ID),
    ("XADD s MAXLEN -1 * f v", "ERR The MAXLEN argument must be >= 0."),
    ("XADD s MAXLEN x * f v", NOT_AN_INTEGER),
    ("XADD s MAXLEN 1 LIMIT 5 * f v", "ERR syntax error, LIMIT cannot be used without the special ~ option"),
    ("XADD s LIMIT 5 * f v", "ERR syntax error, LIMIT cannot be used without specifying a trimming strategy"),
    (
        "XADD s MAXLEN 1 MINID 1 * f v",
        "ERR syntax error, MAXLEN and MINID options at the same time are not compatible",
    ),
    ("XADD text * f v", WRONG_TYPE),
    ("XTRIM s nonsense 5", SYNTAX),
    ("XTRIM s LIMIT 0", "ERR syntax error, XTRIM must be called with a trimming strategy"),
    ("XTRIM s MAXLEN ~ 5 LIMIT -1", "ERR The LIMIT argument must be >= 0."),
    ("XTRIM s MINID x", INVALID_ID),
    ("XDEL s 1-1 x", INVALID_ID),
    ("XDEL text 1-1", WRONG_TYPE),
    ("XSETID s 2-1", "ERR The ID specified in XSETID is smaller than the target stream top item"),
    (
        "XSETID s 9-1 ENTRIESADDED 2",
        "ERR The entries_added specified in XSETID is smaller than the target stream length",
    ),
    ("XSETID s 9-1 ENTRIESADDED -1", "ERR entries_added must be positive"),
    (
        "XSETID s 9-1 MAXDELETEDID 10-1",
        "ERR The ID specified in XSETID is smaller than the provided max_deleted_entry_id",
    ),
    ("XSETID s 9-1 nonsense", SYNTAX),
    ("XSETID none 9-1", "ERR no such key"),
    ("XRANGE s - + COUNT", SYNTAX),
    ("XRANGE s - + COUNT x", NOT_AN_INTEGER),
    ("XRANGE s ( +", INVALID_ID),
    ("XRANGE s (18446744073709551615-18446744073709551615 +", "ERR invalid start ID for the interval"),
    ("XREVRANGE s (0-0 -", "ERR invalid end ID for the interval"),
    (
        "XREAD STREAMS s t 0",
        "ERR Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified.",
    ),
    ("XREAD COUNT 1 nonsense", SYNTAX),
    ("XREAD GROUP g c STREAMS s >", "ERR The GROUP option is only supported by XREADGROUP. You called XREAD instead."),
    ("XREAD NOACK STREAMS s 0", "ERR The NOACK option is only supported by XREADGROUP. You called XREAD instead."),
    (
        "XREAD STREAMS s >",
        "ERR The > ID can be specified only when calling XREADGROUP using the GROUP <group> <consumer> option.",
    ),
    ("XREAD BLOCK -1 STREAMS s 0", "ERR timeout is negative"),
    ("XREAD BLOCK x STREAMS s 0", "ERR timeout is not an integer or out of range"),
    (
        "XREADGROUP GROUP none c STREAMS s >",
        "NOGROUP No such key 's' or consumer group 'none' in XREADGROUP with GROUP option",
    ),
    ("XREADGROUP COUNT 1 COUNT 1 STREAMS s >", "ERR Missing GROUP option for XREADGROUP"),
    ("XREADGROUP GROUP g c STREAMS text >", WRONG_TYPE),
    ("XGROUP CREATE s g 0", "BUSYGROUP Consumer Group name already exists"),
    ("XGROUP CREATE s h x", INVALID_ID),
    ("XGROUP CREATE s h 0 ENTRIESREAD -2", "ERR value for ENTRIESREAD must be positive or -1"),
    ("XGROUP SETID s none 0", "NOGROUP No such consumer group 'none' for key name 's'"),
    (
        "XGROUP CREATE s h 0 nonsense",
        "ERR unknown subcommand or wrong number of arguments for 'CREATE'. Try XGROUP HELP.",
    ),
    ("XGROUP nonsense s g", "ERR unknown subcommand 'nonsense'. Try XGROUP HELP."),
    ("XACK s g 1-1 x", INVALID_ID),
    ("XPENDING s none", "NOGROUP No such key 's' or consumer group 'none'"),
    ("XPENDING s g - +", SYNTAX),
    ("XPENDING s g IDLE 5 - +", SYNTAX),
    ("XPENDING s g - + x", NOT_AN_INTEGER),
    ("XCLAIM s none bob 0 1-1", "NOGROUP No such key 's' or consumer group 'none'"),
    ("XCLAIM s g bob x 1-1", "ERR Invalid min-idle-time argument for XCLAIM"),
    ("XCLAIM s g bob 0 1-1 nonsense", "ERR Unrecognized XCLAIM option 'nonsense'"),
    ("XCLAIM s g bob 0 1-1 IDLE x", "ERR Invalid IDLE option argument for XCLAIM"),
    ("XCLAIM s g bob 0 1-1 RETRYCOUNT x", "ERR Invalid RETRYCOUNT option argument for XCLAIM"),
    ("XAUTOCLAIM s g bob x 0", "ERR Invalid min-idle-time argument for XAUTOCLAIM"),
    ("XAUTOCLAIM s g bob 0 0 COUNT 0", "ERR COUNT must be > 0"),
    ("XAUTOCLAIM s g bob 0 0 nonsense", SYNTAX),
    ("XINFO STREAM none", "ERR no such key"),
    ("XINFO CONSUMERS s none", "NOGROUP No such consumer group 'none' for key name 's'"),
]


@pytest.mark.parametrize(("line", "error"), REFUSED)
def test_rejected_command_changes_nothing(driver: Driver, line: str, error: str) -> None:
    before = driver.say("XINFO STREAM s FULL"), driver.say("KEYS *")
    assert driver.say(line) == ErrorReply(error)
    assert (driver.say("XINFO STREAM s FULL"), driver.say("KEYS *")) == before
    assert driver.heard(driver.main) == []


def test_negative_count_returns_nothing_from_ranges_and_all_from_reads(driver: Driver) -> None:
    assert driver.say("XRANGE s - + COUNT -1") is NIL_ARRAY
    assert driver.say("XRANGE none - + COUNT -1") == []
    assert len(driver.say("XREAD COUNT -1 STREAMS s 0")[0][1]) == 3
    assert driver.say("XPENDING s g - + -1") == []


def test_claim_resets_the_idle_time(driver: Driver) -> None:
    driver.pass_time(5_000)
    assert driver.say("XPENDING s g - + 10") == [[b"1-1", b"alice", 5_000, 1], [b"2-1", b"alice", 5_000, 1]]
    assert driver.say("XCLAIM s g bob 5001 1-1") == []
    assert driver.say("XCLAIM s g bob 5000 1-1") == [[b"1-1", [b"f", b"v1"]]]
    assert driver.say("XPENDING s g IDLE 1 - + 10") == [[b"2-1", b"alice", 5_000, 1]]
    assert driver.say("XPENDING s g - + 10 bob") == [[b"1-1", b"bob", 0, 2]]
    assert driver.say("XCLAIM s g bob 0 2-1 IDLE 700 JUSTID") == [b"2-1"]
    assert driver.say("XPENDING s g 2 2 10") == [[b"2-1", b"bob", 700, 1]]
    assert driver.say(f"XCLAIM s g bob 0 2-1 TIME {START_MS * 2} RETRYCOUNT 7") == [[b"2-1", [b"f", b"v2"]]]
    assert driver.say("XPENDING s g 2 2 10") == [[b"2-1", b"bob", 0, 7]]


def test_autoclaim_examines_ten_times_its_count(driver: Driver) -> None:
    driver.say("XGROUP CREATE s many 0")
    for number in range(4, 104):
        driver.say(f"XADD s {number}-1 f v")
    driver.say("XREADGROUP GROUP many alice STREAMS s >")
    driver.say("XCLAIM s many alice 0 40-1 IDLE 9000 JUSTID")
    assert driver.say("XAUTOCLAIM s many bob 5000 0 COUNT 1") == [b"11-1", [], []]
    assert driver.say("XAUTOCLAIM s many bob 5000 11-1 COUNT 3 JUSTID") == [b"41-1", [b"40-1"], []]
    driver.say("XDEL s 42-1 43-1")
    assert driver.say("XAUTOCLAIM s many bob 0 42-1 COUNT 3 JUSTID") == [b"45-1", [b"44-1"], [b"42-1", b"43-1"]]
    assert driver.say("XAUTOCLAIM s many bob 5000 100-1") == [b"0-0", [], []]


def test_reading_history_raises_delivery_counts_and_lists_deleted_entries(driver: Driver) -> None:
    driver.say("XDEL s 1-1")
    assert driver.say("XREADGROUP GROUP g alice STREAMS s 0") == [
        [b"s", [[b"1-1", NIL_ARRAY], [b"2-1", [b"f", b"v2"]]]],
    ]
    assert [row[3] for row in driver.say("XPENDING s g - + 10")] == [1, 2]


def test_lag_is_unknown_where_entries_were_deleted_ahead(driver: Driver) -> None:
    def group() -> tuple[object, object]:
        facts = driver.say("XINFO GROUPS s")[0]
        return facts[9], facts[11]

    assert group() == (2, 1)
    driver.say("XADD s 4-1 f v")
    driver.say("XDEL s 3-1")
    assert group() == (2, None)
    driver.say("XREADGROUP GROUP g alice STREAMS s >")
    assert group() == (3, 1)  # Redis's own answer: it counts what it delivered
    driver.say("XGROUP SETID s g 2-1")
    assert group() == (None, None)


def test_deletions_before_the_first_entry_do_not_affect_the_lag(driver: Driver) -> None:
    driver.say("XDEL s 1-1 2-1")
    assert driver.say("XINFO GROUPS s")[0][9:] == [2, b"lag", 1]


def test_lag_is_known_if_all_deleted_entries_follow_the_group(driver: Driver) -> None:
    driver.say("XGROUP CREATE s late 1-1")
    driver.say("XDEL s 1-1 2-1")
    assert driver.say("XINFO GROUPS s")[1][9:] == [None, b"lag", 1]


def test_last_id_may_be_lowered_after_deletions(driver: Driver) -> None:
    driver.say("XDEL s 3-1")
    assert driver.say("XSETID s 2-5") == b"OK"
    assert driver.say("XADD s 3-0 f new") == b"3-0"


def test_group_can_be_created_before_its_stream() -> None:
    driver = Driver()
    driver.say("XGROUP CREATE s g $ MKSTREAM")
    assert driver.say("XLEN s") == 0
    assert driver.say("XPENDING s g") == [0, None, None, NIL_ARRAY]
    assert driver.say("TYPE s") == b"stream"
    assert driver.say("XADD none NOMKSTREAM * f v") is None


def test_stream_exists_after_its_last_entry_is_deleted(driver: Driver) -> None:
    driver.say("XTRIM s MAXLEN 0")
    assert driver.say("EXISTS s") == 1
    assert driver.say("XADD s 2-1 f v").text.startswith("ERR The ID specified in XADD is equal or smaller")


def test_approximate_trimming_drops_whole_nodes() -> None:
    driver = Driver()
    driver.say("CONFIG SET stream-node-max-entries 10")
    for number in range(1, 56):
        driver.say(f"XADD s {number}-1 f v")
    assert driver.say("XTRIM s MAXLEN ~ 32") == 20
    assert driver.say("XTRIM s MINID ~ 35-1 LIMIT 9") == 0
    assert driver.say("XTRIM s MINID ~ 35-1 LIMIT 10") == 10
    assert driver.say("XINFO STREAM s")[3] == 3
    assert driver.say("XTRIM s MAXLEN = 12") == 13


def test_deleting_a_consumer_discards_its_pending_entries(driver: Driver) -> None:
    assert driver.say("XGROUP DELCONSUMER s g alice") == 2
    assert driver.say("XPENDING s g")[0] == 0
    assert driver.say("XGROUP DELCONSUMER s g alice") == 0


@pytest.mark.parametrize(
    ("line", "effects"),
    [
        ("XADD s MAXLEN ~ 5 * f v", [f"XADD s {START_MS}-0 f v"]),
        ("XADD s MAXLEN 2 4-* f v", ["XADD s 4-0 f v", "XTRIM s MAXLEN = 2"]),
        ("XTRIM s MINID ~ 3-1", []),
        ("XTRIM s MINID 2-1", ["XTRIM s MAXLEN = 2"]),
        ("XDEL s 1-1 9-9", ["XDEL s 1-1 9-9"]),
        ("XDEL s 9-9", []),
        ("XACK s g 9-9", []),
        ("XACK s g 1-1", ["XACK s g 1-1"]),
        (
            "XREADGROUP GROUP g bob STREAMS s >",
            [
                "XGROUP CREATECONSUMER s g bob",
                f"XCLAIM s g bob 0 3-1 TIME {START_MS} RETRYCOUNT 1 FORCE JUSTID",
                "XGROUP SETID s g 3-1 ENTRIESREAD 3",
            ],
        ),
        ("XREADGROUP GROUP g alice NOACK STREAMS s >", ["XGROUP SETID s g 3-1 ENTRIESREAD 3"]),
        (
            "XREADGROUP GROUP g alice COUNT 1 STREAMS s 0",
            [f"XCLAIM s g alice 0 1-1 TIME {START_MS} RETRYCOUNT 2 FORCE JUSTID"],
        ),
        (
            "XAUTOCLAIM s g bob 0 2-1",
            ["XGROUP CREATECONSUMER s g bob", f"XCLAIM s g bob 0 2-1 TIME {START_MS} RETRYCOUNT 2 FORCE JUSTID"],
        ),
        ("XCLAIM s g bob 0 9-9", []),
        ("XSETID s 9-1", ["XSETID s 9-1"]),
        ("XGROUP CREATE s h $", ["XGROUP CREATE s h $"]),
    ],
)
def test_effect_names_its_change(line: str, effects: list[str]) -> None:
    driver = Driver(recording=True)
    for number in (1, 2, 3):
        driver.say(f"XADD s {number}-1 f v{number}")
    driver.say("XGROUP CREATE s g 0")
    driver.say("XREADGROUP GROUP g alice COUNT 2 STREAMS s >")
    driver.engine.take_units()
    driver.say(line)
    recorded = [b" ".join(words).decode() for unit in driver.engine.take_units() for _, words in unit]
    assert recorded == effects


def test_deliveries_of_one_read_are_recorded_in_one_effect() -> None:
    """One command for each entry made journals long, and loading them slow."""
    driver = Driver(recording=True)
    for n in range(1, 251):
        driver.say(f"XADD s {n}-0 n {n}")
    driver.say("XGROUP CREATE s g 0")
    driver.engine.take_units()
    driver.say("XREADGROUP GROUP g c COUNT 250 STREAMS s >")
    assert [words[0] for unit in driver.engine.take_units() for _, words in unit].count(b"XCLAIM") == 3
    driver.now_ms += 5
    driver.say("XCLAIM s g other 0 7-0 9-0")
    driver.say("XDEL s 8-0")

    again = Driver()
    again.now_ms = driver.now_ms
    written = [words for unit in snapshot(driver.engine) for _, words in unit]
    for words in written:
        again.send(words)

    assert [words[0] for words in written].count(b"XCLAIM") < 10
    for line in ("XPENDING s g - + 1000", "XINFO GROUPS s", "XRANGE s - +"):
        assert again.say(line) == driver.say(line)


class _Gigabyte(bytes):
    """Announces a length, for which no memory may be allocated."""

    def __len__(self) -> int:
        return (1 << 30) + 1


@pytest.mark.parametrize("id", [b"*", b"9-1"])
@pytest.mark.parametrize("options", [(), (b"MAXLEN", b"~", b"10")])
def test_entry_above_one_gigabyte_is_rejected(driver: Driver, options: tuple[bytes, ...], id: bytes) -> None:
    before = list(snapshot(driver.engine))
    refused = driver.send((b"XADD", b"s", *options, id, b"f", _Gigabyte(b"v")))
    assert isinstance(refused, ErrorReply)
    assert refused.text == "ERR Elements are too large to be stored"
    assert list(snapshot(driver.engine)) == before
