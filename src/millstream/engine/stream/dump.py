"""The payload of a stream for DUMP and RESTORE. Reads the formats of Redis 7.0 and of Redis 5 and 6; writes 7.0.

A payload consists of a type, the value, a version (2 bytes) and a CRC-64. An invalid payload raises BadPayload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millstream.engine.numbers import INT64_MAX
from millstream.engine.stream.group import UNKNOWN_READS, Consumer, Group, reads_up_to
from millstream.engine.stream.ids import ID_MAX, SEQ_BITS, SEQ_MAX
from millstream.engine.stream.listpack import (
    BadPayload,
    RdbReader,
    pack_listpack,
    pack_number,
    pack_string,
    read_listpack,
)
from millstream.engine.stream.node import StreamNode
from millstream.engine.stream.stream import NodeLimits, Stream

VERSION: Final = 10
"""The RDB version of Redis 7.0. Like Redis 7.0, payloads with a higher version are rejected."""
STREAM: Final = 19
OLD_STREAM: Final = 15
"""The type before Redis 7.0, without the counters."""

_DELETED: Final = 1
_SAME_FIELDS: Final = 2
_UINT64_MAX: Final = (1 << 64) - 1


def _crc_table() -> list[int]:
    """The table of the CRC-64 with the Jones polynomial, reflected."""
    table = []
    for number in range(256):
        remainder = number
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x95AC9329AC4BC9B5 if remainder & 1 else 0)
        table.append(remainder)
    return table


_CRC: Final = _crc_table()


def crc64(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = crc >> 8 ^ _CRC[crc & 0xFF ^ byte]
    return crc


# --- writing --------------------------------------------------------------------------------------------------------


def dump(stream: Stream) -> bytes:
    body = bytes((STREAM,)) + b"".join(_parts(stream)) + VERSION.to_bytes(2, "little")
    return body + crc64(body).to_bytes(8, "little")


def _parts(stream: Stream) -> Iterator[bytes]:
    yield pack_number(len(stream.nodes))
    for first_id, node in zip(stream.nodes.first_ids(), stream.nodes, strict=True):
        yield pack_string(_raw_id(first_id))
        yield pack_string(pack_listpack(_elements(node, first_id)))
    yield pack_number(stream.length)
    for entry_id in (stream.last_id, stream.first_id, stream.max_deleted_id):
        yield _id(entry_id)
    yield pack_number(stream.entries_added)
    yield pack_number(len(stream.groups))
    for group in stream.groups_by_name():
        yield from _group(group)


def _elements(node: StreamNode, first_id: int) -> list[int | bytes]:
    names = node.names
    elements: list[int | bytes] = [node.live, node.deleted, len(names), *names, 0]
    for index, fields in enumerate(node.fields(0, node.total)):
        entry_id = node.id_at(index)
        ms = _difference(entry_id >> SEQ_BITS, first_id >> SEQ_BITS)
        seq = _difference(entry_id & SEQ_MAX, first_id & SEQ_MAX)
        flags = 0 if node.is_live(index) else _DELETED
        entry_names, values = tuple(fields[::2]), fields[1::2]
        if entry_names == names:
            elements += [flags | _SAME_FIELDS, ms, seq, *values, len(values) + 3]
        else:
            elements += [flags, ms, seq, len(entry_names), *fields, len(fields) + 4]
    return elements


def _difference(number: int, base: int) -> int:
    """The difference of two unsigned numbers, as the signed 64-bit number that Redis stores."""
    difference = number - base & _UINT64_MAX
    return difference - (1 << 64) if difference >> 63 else difference


def _raw_id(entry_id: int) -> bytes:
    return entry_id.to_bytes(16, "big")


def _id(entry_id: int) -> bytes:
    return pack_number(entry_id >> SEQ_BITS) + pack_number(entry_id & SEQ_MAX)


def _group(group: Group) -> Iterator[bytes]:
    yield pack_string(group.name) + _id(group.last_id) + pack_number(group.entries_read & _UINT64_MAX)
    yield pack_number(len(group.pending))
    for entry_id, (_, time_ms, count) in group.pending.items():
        yield _raw_id(entry_id) + time_ms.to_bytes(8, "little", signed=True) + pack_number(count)
    yield pack_number(len(group.consumers))
    for consumer in group.consumers_by_name():
        yield pack_string(consumer.name) + consumer.seen_ms.to_bytes(8, "little", signed=True)
        yield pack_number(len(consumer.pending))
        yield b"".join(_raw_id(entry_id) for entry_id, _ in consumer.pending.items())


# --- reading --------------------------------------------------------------------------------------------------------


def is_valid(payload: bytes) -> bool:
    """Whether the version is supported and the checksum is correct."""
    if len(payload) < 10 or int.from_bytes(payload[-10:-8], "little") > VERSION:
        return False
    return crc64(payload[:-8]) == int.from_bytes(payload[-8:], "little")


def restore(payload: bytes, limits: NodeLimits) -> Stream:
    """Reads the stream of a payload that passed ``is_valid``. BadPayload if it is no stream or is inconsistent."""
    if payload[0] not in (STREAM, OLD_STREAM):
        raise BadPayload("not a stream")
    reader = RdbReader(payload[1:-10])
    try:
        stream = _read_stream(reader, limits, counted=payload[0] == STREAM)
    except (ValueError, IndexError, OverflowError) as error:
        raise BadPayload(str(error)) from error
    if not reader.at_end:
        raise BadPayload("there is data after the end of the stream")
    return stream


def _read_stream(reader: RdbReader, limits: NodeLimits, *, counted: bool) -> Stream:
    stream = Stream(limits)
    previous_id = -1
    for _ in range(reader.number()):
        first_id = int.from_bytes(_exactly(reader.string(), 16), "big")
        entries: list[tuple[int, int, tuple[bytes, ...]]] = []
        deleted: list[int] = []
        rows = list(_read_node(first_id, list(read_listpack(reader.string()))))
        for (ms, seq, fields, is_deleted), next_live_id in zip(rows, _next_live_ids(rows), strict=True):
            entry_id = ms << SEQ_BITS | seq
            if is_deleted:
                deleted.append(len(entries))
                if entries and not previous_id <= entry_id < next_live_id:
                    entry_id = previous_id  # deleted before XSETID set the last id back: smaller ids follow it
            elif entry_id <= previous_id:
                raise BadPayload("the ids are not in ascending order")
            if entry_id < previous_id or entry_id >= next_live_id:
                raise BadPayload("the ids are not in ascending order")
            previous_id = entry_id
            entries.append((entry_id >> SEQ_BITS, entry_id & SEQ_MAX, fields))
        if len(deleted) == len(entries):
            raise BadPayload("a node has no entries")
        stream.append_node(entries, deleted)
    if reader.number() != stream.length:
        raise BadPayload("the number of entries does not match")
    last_id = _read_id(reader)
    if last_id < stream.top_id:
        raise BadPayload("the last id is smaller than that of the last entry")
    first_id, stream.max_deleted_id, added = stream.first_id, 0, stream.length
    if counted:
        first_id, stream.max_deleted_id, added = _read_id(reader), _read_id(reader), reader.number()
    if not stream.length <= added <= INT64_MAX:
        raise BadPayload("the number of added entries is not possible")
    stream.last_id = last_id
    stream.entries_added = added
    if first_id != stream.first_id:
        raise BadPayload("the first id is not that of the first entry")
    for _ in range(reader.number()):
        group = _read_group(reader, stream, counted=counted)
        if group.name in stream.groups:
            raise BadPayload("a group name is not unique")
        stream.groups[group.name] = group
    return stream


def _next_live_ids(rows: list[tuple[int, int, tuple[bytes, ...], bool]]) -> list[int]:
    """For each entry of a node, the id of the next existing entry after it in the node."""
    next_ids: list[int] = []
    next_id = ID_MAX + 1
    for ms, seq, _, is_deleted in reversed(rows):
        next_ids.append(next_id)
        if not is_deleted:
            next_id = ms << SEQ_BITS | seq
    return next_ids[::-1]


def _exactly(raw: bytes, length: int) -> bytes:
    if len(raw) != length:
        raise BadPayload("an id has the wrong length")
    return raw


def _read_node(first_id: int, elements: list[bytes]) -> Iterator[tuple[int, int, tuple[bytes, ...], bool]]:
    """Yields milliseconds, sequence number, fields and deleted flag of each entry, deleted entries included."""
    name_count = int(elements[2])
    names = elements[3 : 3 + name_count]
    at = 4 + name_count
    while at < len(elements):
        flags = int(elements[at])
        ms = (first_id >> SEQ_BITS) + int(elements[at + 1]) & _UINT64_MAX
        seq = (first_id & SEQ_MAX) + int(elements[at + 2]) & _UINT64_MAX
        at += 3
        if flags & _SAME_FIELDS:
            fields = [item for pair in zip(names, elements[at : at + name_count], strict=True) for item in pair]
            at += name_count
        else:
            count = int(elements[at])
            fields = elements[at + 1 : at + 1 + 2 * count]
            at += 1 + 2 * count
        if at >= len(elements) or not fields or len(fields) % 2:
            raise BadPayload("an entry is incomplete")
        at += 1
        yield ms, seq, tuple(fields), bool(flags & _DELETED)


def _read_id(reader: RdbReader) -> int:
    return reader.number() << SEQ_BITS | reader.number()


def _counter(number: int) -> int:
    if number > INT64_MAX:
        raise BadPayload("a counter is not possible")
    return number


def _read_group(reader: RdbReader, stream: Stream, *, counted: bool) -> Group:
    name, last_id = reader.string(), _read_id(reader)
    reads = reader.number() if counted else reads_up_to(stream, last_id)
    group = Group(name, last_id, UNKNOWN_READS if reads == _UINT64_MAX else _counter(reads))
    times: dict[int, tuple[int, int]] = {}
    for _ in range(reader.number()):
        entry_id = int.from_bytes(reader.read(16), "big")
        if not entry_id:
            raise BadPayload("a pending entry has no id")
        times[entry_id] = reader.milliseconds(), _counter(reader.number())
    for _ in range(reader.number()):
        consumer = Consumer(reader.string(), reader.milliseconds())
        if consumer.name in group.consumers:
            raise BadPayload("a consumer name is not unique")
        group.consumers[consumer.name] = consumer
        for _ in range(reader.number()):
            entry_id = int.from_bytes(reader.read(16), "big")
            if entry_id not in times:
                raise BadPayload("an entry of a consumer is not pending in the group")
            group.assign(entry_id, (consumer, *times.pop(entry_id)))
    if times:
        raise BadPayload("a pending entry has no consumer")
    return group


def duplicate(stream: Stream, limits: NodeLimits) -> Stream:
    """Returns an independent copy of the stream."""
    return _read_stream(RdbReader(b"".join(_parts(stream))), limits, counted=True)
