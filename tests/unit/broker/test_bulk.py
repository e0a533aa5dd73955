"""Column packing produces the same bytes as single commands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.bulk import CombinedCommands, uniform_commands
from millstream.broker.context import Limits
from millstream.broker.operations.conversion import field_args
from millstream.broker.operations.streams import entry_commands
from millstream.broker.transport.blocking_connection import chunks_of, pack, pack_all, pieces_of

HEAD = (b"XADD", b"s", b"*")
LIMITS = Limits()

names = st.one_of(st.text(max_size=5), st.binary(max_size=5))
rows = st.lists(names, min_size=1, max_size=4, unique=True).flatmap(
    lambda fields: st.lists(st.tuples(*[st.binary(max_size=20)] * len(fields)), min_size=1, max_size=30).map(
        lambda values: [dict(zip(fields, row, strict=True)) for row in values]
    )
)


@given(rows)
def test_bulk_packing_equals_single_packing(entries: list[dict[str | bytes, bytes]]) -> None:
    plain = [(*HEAD, *field_args(entry, LIMITS)) for entry in entries]

    columns = uniform_commands(HEAD, entries, LIMITS.max_entry_bytes)

    assert columns is not None
    assert columns.packed() == b"".join(map(pack, plain))
    assert list(columns) == plain
    assert [columns[index] for index in range(len(columns))] == plain
    assert list(columns[1:3]) == plain[1:3]


@given(rows, st.integers(1, 7), st.integers(20, 300))
def test_chunks_are_bounded_and_complete(entries: list[dict[str | bytes, bytes]], count: int, size: int) -> None:
    limits = Limits(chunk_commands=count, chunk_bytes=size)
    plain = [(*HEAD, *field_args(entry, LIMITS)) for entry in entries]
    for commands in (plain, uniform_commands(HEAD, entries, LIMITS.max_entry_bytes)):
        assert commands is not None
        chunks = list(chunks_of(commands, limits))
        assert b"".join(data for data, _ in chunks) == pack_all(plain)
        assert sum(number for _, number in chunks) == len(plain)
        assert all(number <= count for _, number in chunks)
        assert all(number == 1 or len(data) <= 2 * size for data, number in chunks)


@given(st.integers(1, 400), st.integers(0, 1_500), st.integers(0, 40), st.integers(0, 399))
def test_command_of_any_length_is_packed_as_resp(count: int, long: int, short: int, at: int) -> None:
    words = [b"\r\n$"[: number % 4] + b"x" * short for number in range(count)]
    words[at % count] = b"y" * long

    expected = b"*%d\r\n" % count + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    assert pack(tuple(words)) == expected


@given(rows, rows)
def test_combined_commands_stay_packed(
    entries: list[dict[str | bytes, bytes]], more: list[dict[str | bytes, bytes]]
) -> None:
    plain = [(*HEAD, *field_args(entry, LIMITS)) for entry in entries]
    columns = uniform_commands(HEAD, entries, LIMITS.max_entry_bytes)
    others = [(*HEAD, *field_args(entry, LIMITS)) for entry in more]
    assert columns is not None

    joined = CombinedCommands([(b"MULTI",)], CombinedCommands(others, columns, others), [(b"EXEC",)])

    expected = [(b"MULTI",), *others, *plain, *others, (b"EXEC",)]
    assert list(joined) == expected
    assert len(joined) == len(expected)
    assert joined[1:3] == expected[1:3]
    assert pack_all(joined) == b"".join(map(pack, expected))
    assert list(pieces_of(joined))[1] == columns.packed()
    assert b"".join(pieces_of(joined)) == b"".join(map(pack, expected))


def test_irregular_entries_are_not_packed_as_columns() -> None:
    for entries in (
        [{"a": b"1"}, {"b": b"1"}],
        [{"a": b"1", "b": b"2"}, {"b": b"1", "a": b"2"}],
        [{"a": b"1"}, {}],
        [{"a": "text"}],
        [{"a": b"1"}, {"a": 1}],
        [{"a": b"x" * 100}],
        [],
    ):
        assert uniform_commands(HEAD, entries, 50) is None
    assert entry_commands(HEAD, [{"a": 1}, {"a": "b"}], LIMITS) == [(*HEAD, b"a", b"1"), (*HEAD, b"a", b"b")]
