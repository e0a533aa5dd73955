"""One table with every type: a value read from the table and the same value from the log are the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from following import Follower

from millstream.cdc.mariadb import connection
from millstream.testing import MariadbDatabase

COLUMNS = {
    "tiny": ("tinyint", ["-128", "127", "NULL"]),
    "tiny_u": ("tinyint unsigned", ["255", "0", "NULL"]),
    "small": ("smallint", ["-32768", "-1", "NULL"]),
    "medium": ("mediumint", ["-8388608", "8388607", "NULL"]),
    "medium_u": ("mediumint unsigned", ["16777215", "0", "NULL"]),
    "whole": ("int", ["-2147483648", "2147483647", "NULL"]),
    "whole_u": ("int unsigned", ["4294967295", "0", "NULL"]),
    "big": ("bigint", ["-9223372036854775808", "9007199254740993", "NULL"]),
    "big_u": ("bigint unsigned", ["18446744073709551615", "0", "NULL"]),
    "filled": ("int(6) zerofill", ["42", "0", "NULL"]),
    "exact": ("decimal(30,10)", ["-12345678901234567890.0123456789", "0", "0.5"]),
    "exact_whole": ("decimal(18,0)", ["-999999999999999999", "7", "NULL"]),
    "exact_behind": ("decimal(5,5)", ["-0.00001", "0.99999", "NULL"]),
    "exact_long": ("decimal(65,30)", ["99999999999999999999999999999999999.000000000000000000000000000001", "-1", "0"]),
    "exact_filled": ("decimal(6,2) unsigned zerofill", ["1.5", "0", "NULL"]),
    "single": ("float", ["0.1", "-3.4e38", "16777217"]),
    "double_": ("double", ["1e-300", "-1.7976931348623157e308", "0.1"]),
    "double_cut": ("double(8,3)", ["1.23456", "-0.0004", "NULL"]),
    "bit_one": ("bit(1)", ["b'1'", "b'0'", "NULL"]),
    "bit_ten": ("bit(10)", ["b'1010000001'", "b'0'", "NULL"]),
    "bit_all": ("bit(64)", ["~0", "1", "NULL"]),
    "day": ("date", ["'2024-02-29'", "'0000-00-00'", "'2024-02-31'"]),
    "year_": ("year", ["2155", "'0000'", "1901"]),
    "hour": ("time", ["'-838:59:59'", "'00:00:00'", "'100:00:01'"]),
    "hour_1": ("time(1)", ["'-00:00:00.1'", "'23:59:59.9'", "NULL"]),
    "hour_3": ("time(3)", ["'-12:34:56.789'", "'00:00:00.001'", "NULL"]),
    "hour_6": ("time(6)", ["'-00:00:00.000001'", "'838:59:59.999999'", "NULL"]),
    "moment": ("datetime", ["'9999-12-31 23:59:59'", "'0000-00-00 00:00:00'", "'2024-00-31 00:00:00'"]),
    "moment_2": ("datetime(2)", ["'1000-01-01 00:00:00.12'", "'0000-00-00 00:00:00'", "NULL"]),
    "moment_5": ("datetime(5)", ["'2024-06-01 12:00:00.00001'", "'2024-06-01 12:00:00.99999'", "NULL"]),
    "stamp": ("timestamp null", ["'2038-01-19 03:14:07'", "'1970-01-01 00:00:01'", "0"]),
    "stamp_6": ("timestamp(6) null", ["'2024-02-29 23:59:59.123456'", "0", "NULL"]),
    "fixed": ("char(5)", ["'ab'", "''", "'grün☃'"]),
    "fixed_long": ("char(255)", ["repeat('ü', 255)", "''", "NULL"]),
    "fixed_latin": ("char(9) character set latin1", ["'Grün€'", "'ab'", "NULL"]),
    "limited": ("varchar(20)", ["'it''s \"x\" \\\\ \\n'", "''", "'\\N𝄞'"]),
    "limited_long": ("varchar(2000) character set ascii", ["repeat('x', 300)", "'  '", "NULL"]),
    "small_text": ("tinytext", ["'a'", "''", "NULL"]),
    "word": ("text", ["repeat('long ', 200)", "'\\t'", "NULL"]),
    "large_text": ("longtext character set utf8mb3", ["'grün'", "''", "NULL"]),
    "document": ("json", ['\'{"a": 1,  "a": [2]}\'', "'null'", "NULL"]),
    "bytes_16": ("binary(16)", ["x'00ff0000'", "x''", "NULL"]),
    "bytes_300": ("varbinary(300)", ["x'00ff00'", "x''", "repeat(x'0a', 280)"]),
    "blob_": ("blob", ["x'00015c27'", "x''", "NULL"]),
    "large_blob": ("longblob", ["repeat(x'ff', 700)", "x''", "NULL"]),
    "mood": ("enum('happy', 'it''s ok', 'ü')", ["'happy'", "'ü'", "'it''s ok'"]),
    "mood_latin": ("enum('é', 'b') character set latin1", ["'é'", "'b'", "NULL"]),
    "several": ("set('a', 'b', 'ü')", ["'a,ü'", "''", "NULL"]),
    "many": (f"set({','.join(repr(f's{n}') for n in range(64))})", ["'s0,s63'", "'s7,s8'", "NULL"]),
    "unique_1": ("uuid", ["'123e4567-e89b-12d3-a456-426655440000'", "'00000000-0000-0000-0000-000000000000'", "NULL"]),
    "unique_4": (
        "uuid",
        ["'2c1f3a9e-7b6d-4e5f-8a9b-0c1d2e3f4a00'", "'0190163d-8694-739b-aea5-966c26f8ad91'", "NULL"],
    ),
    "address_4": ("inet4", ["'192.168.0.1'", "'0.0.0.0'", "NULL"]),
    "address_6": ("inet6", ["'::ffff:1.2.3.4'", "'2001:db8::'", "'::'"]),
    "place": ("point", ["ST_GeomFromText('POINT(1.5 -2)', 4326)", "POINT(0, 0)", "NULL"]),
    "shape": ("geometry", ["ST_GeomFromText('POLYGON((0 0,0 1,1 1,0 0))')", "NULL", "NULL"]),
    "hidden": ("int invisible", ["7", "8", "NULL"]),
}
KEYS = (
    "CREATE TABLE keyed (mood enum('z', 'a') , many set('x', 'y'), one bit(4), tag binary(3), word varchar(9) "
    "CHARACTER SET latin1, born datetime(3), y year, size decimal(5,1), u uuid, n int, "
    "PRIMARY KEY (mood, many, one, tag, word, born, y, size, u))"
)


def fill(database: MariadbDatabase, first: int) -> None:
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'")
        for row in range(3):
            values = ", ".join(values[row] for _, values in COLUMNS.values())
            cursor.execute(f"INSERT INTO everything (id, {', '.join(COLUMNS)}) VALUES ({first + row}, {values})")


def test_snapshot_and_log_have_equal_values_for_every_type(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    made = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
    mariadb.execute(
        f"CREATE TABLE everything (id int PRIMARY KEY, {made}, twice int AS (whole / 2) VIRTUAL, "
        "thrice bigint AS (whole * 3) STORED)",
        "SET GLOBAL time_zone = '+09:00'",  # a session's own settings must not matter
    )
    try:
        fill(mariadb, 0)
        follower = Follower(mariadb, tmp_path, chunkRows="2")
        snapshot = follower.drain()
        fill(mariadb, 10)
        mariadb.execute("UPDATE everything SET id = id + 10 WHERE id >= 10", "DELETE FROM everything WHERE id >= 20")
        mariadb.execute("UPDATE everything SET tiny = 1 WHERE id = 0")
        changes = follower.drain()
        follower.stop()
    finally:
        mariadb.execute("SET GLOBAL time_zone = 'SYSTEM'")
    assert [event["op"] for event in snapshot + changes] == list("rrrcccdcdcdcdddu")

    def row(text: str) -> str:
        return text.partition(",")[2]  # without the id

    read = [row(event["after"]) for event in snapshot]
    assert [row(event["after"]) for event in changes[:3]] == read
    assert [row(event["before"]) for event in changes[3:9] if event["op"] == "d"] == read
    assert [row(event["after"]) for event in changes[3:9] if event["op"] == "c"] == read
    assert [row(event["before"]) for event in changes[9:12]] == read
    assert changes[12]["before"] == snapshot[0]["after"]
    first, second, third = [json.loads(event["after"]) for event in snapshot]
    assert set(first) == {"id", *COLUMNS}, "generated columns are in neither"
    assert (first["big_u"], first["bit_all"], first["medium_u"]) == (2**64 - 1, 2**64 - 1, 2**24 - 1)
    assert (first["filled"], first["exact_filled"], second["exact_filled"]) == (42, "1.50", "0.00")
    assert (first["exact"], first["exact_behind"]) == ("-12345678901234567890.0123456789", "-0.00001")
    assert first["exact_long"] == "99999999999999999999999999999999999.000000000000000000000000000001"
    assert (first["single"], third["single"], first["double_"]) == (0.1, 16777216, 1e-300)
    assert (second["day"], third["day"], second["year_"]) == ("0000-00-00", "2024-02-31", 0)
    assert (first["hour"], third["hour"], first["hour_6"]) == ("-838:59:59", "100:00:01", "-00:00:00.000001")
    assert (second["moment"], third["moment"]) == ("0000-00-00 00:00:00", "2024-00-31 00:00:00")
    assert (first["stamp"], third["stamp"]) == ("2038-01-19 03:14:07", "0000-00-00 00:00:00")
    assert second["stamp_6"] == "0000-00-00 00:00:00.000000"
    assert (first["fixed_latin"], first["limited_long"], second["limited_long"]) == ("Grün€", "x" * 300, "  ")
    assert (first["bytes_16"], second["bytes_16"]) == ("0x00ff0000" + "00" * 12, "0x" + "00" * 16)
    assert (first["bytes_300"], second["blob_"]) == ("0x00ff00", "0x")
    assert (first["mood_latin"], second["several"], first["several"], first["many"]) == ("é", "", "a,ü", "s0,s63")
    assert first["unique_1"] == "123e4567-e89b-12d3-a456-426655440000"
    assert (first["address_4"], first["address_6"], second["address_6"]) == (
        "192.168.0.1",
        "::ffff:1.2.3.4",
        "2001:db8::",
    )
    assert first["document"] == '{"a": 1,  "a": [2]}'
    assert first["place"] == "0xe6100000" + "0101000000000000000000f83f00000000000000c0"


def test_keys_of_many_types_can_be_split_into_chunks(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    """An enum sorts by its number and compares by its text; a chunk must not be cut by one and read by the other."""
    mariadb.execute(KEYS)
    moods, days = ("z", "a"), ("2024-01-01 00:00:00.001", "0000-00-00 00:00:00")
    rows = [
        f"('{mood}', '{many}', b'{event:b}', x'00{event:02x}00', '{'é' * event}', '{day}', 1999, {event}.5, "
        f"'00000000-0000-0000-0000-00000000000{event}', 0)"
        for mood in moods
        for many in ("", "x", "x,y")
        for event in range(3)
        for day in days
    ]
    mariadb.execute(f"INSERT INTO keyed VALUES {', '.join(rows)}")
    follower = Follower(mariadb, tmp_path, chunkRows="5", snapshot="initial")
    follower.start = follower.reader.initialOffset()
    mariadb.execute("UPDATE keyed SET n = 1 WHERE one = 1")  # in the log before the chunks, and seen by all of them
    assert follower.plan(5)
    first = follower.read()
    follower.commit()
    mariadb.execute("UPDATE keyed SET n = n + 1")  # seen by the chunks that are read from now on
    events = first + follower.drain()
    follower.stop()
    read = [event["key"] for event in events if event["op"] == "r"]
    assert len(read) == len(set(read)) == len(rows)
    changed = [event for event in events if event["op"] == "u"]
    assert [event["key"] for event in changed] == read[: len(first)], "of the first chunk alone, which did not see it"
    assert all(json.loads(event["after"])["n"] == json.loads(event["before"])["n"] + 1 for event in changed)


@pytest.mark.parametrize("kind", ["ENUM", "SET"])
def test_labels_with_quotes_and_backslashes_can_be_a_key(mariadb: MariadbDatabase, tmp_path: Path, kind: str) -> None:
    labels = ["z", "it's", "\\", 'a"b', "a\\'b", "line\nbreak", "é", "'"]
    labels += ["a','b", ","] if kind == "ENUM" else []
    literals = [connection.literal(label) for label in labels]
    mariadb.execute(f"CREATE TABLE labelled (k {kind}({', '.join(literals)}) PRIMARY KEY, n int)")
    mariadb.execute(*(f"INSERT INTO labelled VALUES ({literal}, 0)" for literal in literals))
    follower = Follower(mariadb, tmp_path, tables="labelled", chunkRows="1")
    events = []
    while len(events) < len(labels):  # after each chunk, changes that it does not have and that later chunks have
        assert follower.plan(1)
        events += follower.read()
        follower.commit()
        mariadb.execute("UPDATE labelled SET n = n + 1")
    events += follower.drain()
    follower.stop()
    numbers: dict[str, list[int]] = {label: [] for label in labels}
    for event in events:
        row = json.loads(event["after"])
        numbers[row["k"]].append(row["n"])
    assert numbers == {label: list(range(at, len(labels) + 1)) for at, label in enumerate(labels)}
