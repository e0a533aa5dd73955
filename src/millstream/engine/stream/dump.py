"""A stream as the bytes that DUMP gives and RESTORE takes: Redis 7.0's form, and the one that Redis 5 and 6 wrote.

A payload is a type, the value, two bytes of version and a CRC-64. What does not fit is BadPayload; nothing is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millstream.engine.stream.group import UNKNOWN_READS, Consumer, Group, reads_up_to
from millstream.engine.stream.ids import SEQ_BITS, SEQ_MAX
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
"""Redis 7.0's; payloads of newer servers are refused, as it refuses them."""
STREAM: Final = 19
OLD_STREAM: Final = 15
"""Before 7.0: without the counters."""

_DELETED: Final = 1
_SAME_FIELDS: Final = 2
_MOST: Final = (1 << 64) - 1


def _table() -> list[int]:
    """CRC-64 of Jones, reflected."""
    table = []
    for number in range(256):
        rest = number
        for _ in range(8):
            rest = rest >> 1 ^ (0x95AC9329AC4BC9B5 if rest & 1 else 0)
        table.append(rest)
    return table


_CRC: Final = _table()


def crc64(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = crc >> 8 ^ _CRC[crc & 0xFF ^ byte]
    return crc


# --- out ------------------------------------------------------------------------------------------------------------


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
    elements: list[int | bytes] = [node.live, node.gone, len(names), *names, 0]
    for index, words in enumerate(node.words(0, node.total)):
        entry_id = node.id_at(index)
        ms = _difference(entry_id >> SEQ_BITS, first_id >> SEQ_BITS)
        seq = _difference(entry_id & SEQ_MAX, first_id & SEQ_MAX)
        flags = 0 if node.is_live(index) else _DELETED
        fields, values = tuple(words[::2]), words[1::2]
        if fields == names:
            elements += [flags | _SAME_FIELDS, ms, seq, *values, len(values) + 3]
        else:
            elements += [flags, ms, seq, len(fields), *words, len(words) + 4]
    return elements


def _difference(number: int, base: int) -> int:
    """Of two unsigned numbers, as the signed one that Redis stores."""
    found = number - base & _MOST
    return found - (1 << 64) if found >> 63 else found


def _raw_id(entry_id: int) -> bytes:
    return entry_id.to_bytes(16, "big")


def _id(entry_id: int) -> bytes:
    return pack_number(entry_id >> SEQ_BITS) + pack_number(entry_id & SEQ_MAX)


def _group(group: Group) -> Iterator[bytes]:
    yield pack_string(group.name) + _id(group.last_id) + pack_number(group.entries_read & _MOST)
    yield pack_number(len(group.pending))
    for entry_id, (_, time_ms, count) in group.pending.items():
        yield _raw_id(entry_id) + time_ms.to_bytes(8, "little", signed=True) + pack_number(count)
    yield pack_number(len(group.consumers))
    for consumer in group.consumers_by_name():
        yield pack_string(consumer.name) + consumer.seen_ms.to_bytes(8, "little", signed=True)
        yield pack_number(len(consumer.pending))
        yield b"".join(_raw_id(entry_id) for entry_id, _ in consumer.pending.items())


# --- in -------------------------------------------------------------------------------------------------------------


def is_sound(payload: bytes) -> bool:
    """Whether version and checksum are what they must be."""
    if len(payload) < 10 or int.from_bytes(payload[-10:-8], "little") > VERSION:
        return False
    return crc64(payload[:-8]) == int.from_bytes(payload[-8:], "little")


def restore(payload: bytes, limits: NodeLimits) -> Stream:
    """The stream of a sound payload. BadPayload where it holds something else, or does not hold together."""
    if payload[0] not in (STREAM, OLD_STREAM):
        raise BadPayload("not a stream")
    reader = RdbReader(payload[1:-10])
    try:
        stream = _read_stream(reader, limits, counted=payload[0] == STREAM)
    except (ValueError, IndexError, OverflowError) as error:
        raise BadPayload(str(error)) from error
    if not reader.at_end:
        raise BadPayload("it goes on behind its end")
    return stream


def _read_stream(reader: RdbReader, limits: NodeLimits, *, counted: bool) -> Stream:
    stream = Stream(limits)
    gone: list[int] = []
    before = -1
    for _ in range(reader.number()):
        first_id = int.from_bytes(_exactly(reader.string(), 16), "big")
        entries: list[tuple[int, int, tuple[bytes, ...]]] = []
        for ms, seq, words, deleted in _read_node(first_id, list(read_listpack(reader.string()))):
            entry_id = ms << SEQ_BITS | seq
            if entry_id <= before:
                raise BadPayload("ids that do not ascend")
            before = entry_id
            entries.append((ms, seq, words))
            if deleted:
                gone.append(entry_id)
        if not entries:
            raise BadPayload("a node without entries")
        stream.append_node(entries)
    for entry_id in gone:
        stream.delete(entry_id)
    if reader.number() != stream.length:
        raise BadPayload("another number of entries than it says")
    last_id = _read_id(reader)
    if last_id < stream.top_id:
        raise BadPayload("its last id is behind its entries")
    first_id, stream.max_deleted_id, added = stream.first_id, 0, stream.length
    if counted:
        first_id, stream.max_deleted_id, added = _read_id(reader), _read_id(reader), reader.number()
    stream.last_id = last_id
    stream.entries_added = added
    if first_id != stream.first_id:
        raise BadPayload("its first id is not that of its first entry")
    for _ in range(reader.number()):
        group = _read_group(reader, stream, counted=counted)
        if group.name in stream.groups:
            raise BadPayload("a group twice")
        stream.groups[group.name] = group
    return stream


def _exactly(word: bytes, length: int) -> bytes:
    if len(word) != length:
        raise BadPayload("an id of another length")
    return word


def _read_node(first_id: int, words: list[bytes]) -> Iterator[tuple[int, int, tuple[bytes, ...], bool]]:
    """Its entries, and whether each is deleted: those keep their place until the whole node goes."""
    fields = int(words[2])
    names = words[3 : 3 + fields]
    at = 4 + fields
    while at < len(words):
        flags = int(words[at])
        ms = (first_id >> SEQ_BITS) + int(words[at + 1]) & _MOST
        seq = (first_id & SEQ_MAX) + int(words[at + 2]) & _MOST
        at += 3
        if flags & _SAME_FIELDS:
            pairs = [word for pair in zip(names, words[at : at + fields], strict=True) for word in pair]
            at += fields
        else:
            count = int(words[at])
            pairs = words[at + 1 : at + 1 + 2 * count]
            at += 1 + 2 * count
        if at >= len(words) or not pairs or len(pairs) % 2:
            raise BadPayload("an entry that is not whole")
        at += 1
        yield ms, seq, tuple(pairs), bool(flags & _DELETED)


def _read_id(reader: RdbReader) -> int:
    return reader.number() << SEQ_BITS | reader.number()


def _read_group(reader: RdbReader, stream: Stream, *, counted: bool) -> Group:
    name, last_id = reader.string(), _read_id(reader)
    reads = reader.number() if counted else reads_up_to(stream, last_id)
    group = Group(name, last_id, UNKNOWN_READS if reads == _MOST else reads)
    times: dict[int, tuple[int, int]] = {}
    for _ in range(reader.number()):
        entry_id = int.from_bytes(reader.take(16), "big")
        times[entry_id] = reader.milliseconds(), reader.number()
    for _ in range(reader.number()):
        consumer = Consumer(reader.string(), reader.milliseconds())
        if consumer.name in group.consumers:
            raise BadPayload("a consumer twice")
        group.consumers[consumer.name] = consumer
        for _ in range(reader.number()):
            entry_id = int.from_bytes(reader.take(16), "big")
            if entry_id not in times:
                raise BadPayload("a consumer holds what is not pending")
            group.hold(entry_id, (consumer, *times.pop(entry_id)))
    if times:
        raise BadPayload("what is pending is with nobody")
    return group


def duplicate(stream: Stream, limits: NodeLimits) -> Stream:
    """Another stream that is the same in every respect."""
    return _read_stream(RdbReader(b"".join(_parts(stream))), limits, counted=True)
