"""One table with every type: a value read from the table and the same value from the log are the same text."""

from __future__ import annotations

import json
from pathlib import Path

from following import Follower

from millstream.testing import PostgresDatabase

COLUMNS = {
    "small": ("smallint", ["-32768", "0", None]),
    "whole": ("int", ["2147483647", "-1", None]),
    "big": ("bigint", ["-9223372036854775808", "9007199254740993", None]),
    "truth": ("boolean", ["true", "false", None]),
    "single": ("real", ["3.4e38", "0.1", "NaN"]),
    "double": ("double precision", ["1e-300", "-0", "-Infinity"]),
    "exact": ("numeric", ["12345678901234567890.123456789", "NaN", "-0.00"]),
    "money": ("money", ["12.34", "-1000", None]),
    "word": ("text", ['it\'s "quoted" \\ and\nbroken\ttwice', "", "grün ☃ 𝄞"]),
    "padded": ("char(5)", ["ab", "", None]),
    "limited": ("varchar(9)", ["\\N", "a,b", None]),
    "letter": ('"char"', ["x", "", None]),
    "called": ("name", ["a user", "b", None]),
    "bytes": ("bytea", ["\\x00ff5c", "\\x", None]),
    "day": ("date", ["2024-02-29", "0044-03-15 BC", "infinity"]),
    "hour": ("time", ["24:00:00", "00:00:00.000001", None]),
    "hour_zone": ("timetz", ["12:00:00+05:30", "23:59:59-08", None]),
    "moment": ("timestamp", ["20000-01-01 00:00:00", "0001-01-01 00:00:00 BC", "-infinity"]),
    "moment_zone": ("timestamptz", ["2024-01-01 12:00:00+02", "4713-01-01 00:00:00+00 BC", None]),
    "span": ("interval", ["1 year 2 mons -3 days 04:05:06.789", "0", "-1 microsecond"]),
    "unique_id": ("uuid", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", None, None]),
    "document": ("json", ['{"a": 1,  "a": [2, "\\u0041"]}', "null", "[]"]),
    "document_b": ("jsonb", ['{"a": 1,  "a": [2, "\\u0041"]}', "null", "1e400"]),
    "list": ("text[]", ['{a,"b c",NULL,"\\"q\\""}', "{}", None]),
    "grid": ("int[]", ["{{1,2},{3,4}}", "{}", None]),
    "address": ("inet", ["192.168.0.1", "192.168.0.0/24", "::1"]),
    "network": ("cidr", ["192.168.0.0/24", "10.0.0.0/8", None]),
    "card": ("macaddr", ["08:00:2b:01:02:03", None, None]),
    "bits": ("bit(3)", ["101", "000", None]),
    "more_bits": ("varbit", ["10", "", None]),
    "place": ("point", ["(1.5,-2)", "(NaN,Infinity)", None]),
    "shape": ("box", ["(2,2),(0,0)", None, None]),
    "range": ("int4range", ["[1,10)", "empty", "(,5)"]),
    "moments": ("tstzrange", ["[2024-01-01 00:00:00+00,)", None, None]),
    "lexemes": ("tsvector", ["'a':1 'it''s':2", "", None]),
    "markup": ("xml", ['<a b="c">d &amp; e</a>', None, None]),
    "mood": ("mood", ["happy", "so so", None]),
    "pair": ("pair", ['(1,"a b")', "(,)", None]),
    "even": ("even", ["2", "4", None]),
    "flag": ("flag", ["true", "false", None]),
    "name_key": ("hstore_like", ["x", "y", None]),
    "position": ("pg_lsn", ["16/B374D848", "0/0", None]),
}
MAKE = (
    "CREATE TYPE mood AS ENUM ('happy', 'so so')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN even AS int CHECK (VALUE % 2 = 0)",
    "CREATE DOMAIN flag AS boolean",
    "CREATE DOMAIN hstore_like AS varchar(20)",
    f"CREATE TABLE everything (id int PRIMARY KEY, {', '.join(f'{n} {kind}' for n, (kind, _) in COLUMNS.items())}, "
    "twice int GENERATED ALWAYS AS (whole / 2) STORED)",
)


def fill(database: PostgresDatabase, first: int) -> None:
    names = ", ".join(COLUMNS)
    with database.connect() as connection:
        for row in range(3):
            marks = ", ".join(f"%s::text::{kind}" for kind, _ in COLUMNS.values())
            values = [values[row] for _, values in COLUMNS.values()]
            connection.execute(f"INSERT INTO everything (id, {names}) VALUES ({first + row}, {marks})", values)


def test_snapshot_and_log_have_equal_values_for_every_type(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(*MAKE)
    # A session's own settings must not matter.
    for setting in ("DateStyle = 'German'", "TimeZone = 'Asia/Tokyo'", "IntervalStyle = 'sql_standard'"):
        postgres.execute(f"ALTER DATABASE {postgres.name} SET {setting}")
    postgres.execute(f"ALTER DATABASE {postgres.name} SET bytea_output = 'escape'")
    postgres.execute(f"ALTER DATABASE {postgres.name} SET extra_float_digits = -10")
    fill(postgres, 0)
    follower = Follower(postgres, tmp_path, chunkRows="2")
    snapshot = follower.drain()
    fill(postgres, 10)
    postgres.execute("ALTER TABLE everything REPLICA IDENTITY FULL")
    postgres.execute("UPDATE everything SET id = id WHERE id >= 10", "DELETE FROM everything WHERE id >= 10")
    changes = follower.drain()
    follower.stop()
    assert [event["op"] for event in snapshot + changes] == list("rrrcccuuuddd")

    def rows(events: list, side: str) -> list[str]:
        return [
            event[side].replace('{"id":1', '{"id":', 1) if len(event["key"]) > 8 else event[side] for event in events
        ]

    read = rows(snapshot, "after")
    assert rows(changes[:3], "after") == read
    assert rows(changes[3:6], "before") == read
    assert rows(changes[3:6], "after") == read
    assert rows(changes[6:], "before") == read
    parsed = [json.loads(row) for row in read]
    assert all(set(row) == {"id", *COLUMNS} for row in parsed), "generated columns are in neither"
    first, second, third = parsed
    assert (first["truth"], second["flag"], first["big"]) == (True, False, -9223372036854775808)
    assert (first["day"], second["day"], third["day"]) == ("2024-02-29", "0044-03-15 BC", "infinity")
    assert (third["single"], third["double"], second["exact"]) == ("NaN", "-Infinity", "NaN")
    assert first["moment_zone"] == "2024-01-01 10:00:00+00"
    assert first["span"] == "P1Y2M-3DT4H5M6.789S"
    assert first["bytes"] == "\\x00ff5c"
    assert first["document"] == '{"a": 1,  "a": [2, "\\u0041"]}'
    assert first["even"] == 2
    assert first["padded"] == "ab   "


def test_unchanged_large_value_is_taken_from_the_old_row_or_omitted(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, n int, body text)",
        "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO docs VALUES (1, 0, repeat('long', 5000))",
    )
    follower = Follower(postgres, tmp_path)
    follower.drain()
    postgres.execute("UPDATE docs SET n = 1", "ALTER TABLE docs REPLICA IDENTITY FULL", "UPDATE docs SET n = 2")
    plain, full = follower.drain()
    follower.stop()
    assert plain["after"] == '{"id":1,"n":1}'
    assert json.loads(full["after"]) == {"id": 1, "n": 2, "body": "long" * 5000}
    assert json.loads(full["before"]) == {"id": 1, "n": 1, "body": "long" * 5000}
