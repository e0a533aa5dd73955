"""Checksums of the journal: every changed byte is detected, and a torn tail is distinguished from damage."""

import io
import random
from itertools import pairwise
from pathlib import Path

import pytest

from millstream.engine.journal.frames import FIRST_CHAIN, HEAD, SEAL_SIZE, FrameReader, seal
from millstream.errors import JournalCorrupt
from millstream.wire.resp import pack
from support.resp_decoder import decode

PAYLOADS = [pack((b"SET", b"k%d" % number, b"v" * number)) for number in range(8)]
PATH = Path("journal.aof")


def journal(payloads=PAYLOADS):
    data, chain = HEAD, FIRST_CHAIN
    for payload in payloads:
        head, chain = seal(payload, chain)
        data += head + payload
    return data


def read(data):
    reader = FrameReader(io.BytesIO(data), PATH, len(data))
    return [payload for _, payload in reader], reader


def ends():
    """Where the head and each frame end."""
    at = [len(HEAD)]
    for payload in PAYLOADS:
        at.append(at[-1] + SEAL_SIZE + len(payload))
    return at


def test_written_commands_are_read_back():
    payloads, reader = read(journal())
    assert payloads == PAYLOADS
    assert (reader.end, reader.torn) == (len(journal()), False)


def test_journal_is_plain_resp():
    assert [words[0] for words in decode(journal())] == [b"PING"] + [b"PING", b"SET"] * 8


def test_truncated_file_yields_its_complete_frames():
    data = journal()
    for cut in range(1, len(data)):
        payloads, reader = read(data[:cut])
        whole = sum(end <= cut for end in ends()) - 1
        assert payloads == PAYLOADS[: max(whole, 0)]
        assert reader.end == ([0, *ends()])[whole + 1]
        assert reader.torn == (reader.end != cut)


def test_changed_byte_is_detected_in_its_frame():
    data = journal()
    boundaries = ends()
    for at in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF, data[at]):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises(JournalCorrupt) as caught:
                read(bytes(damaged))
            frame = max((end for end in boundaries if end <= at), default=0)
            assert caught.value.offset == frame
            assert f"at byte {frame}" in str(caught.value)


def test_random_damage_is_detected():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    data = journal()
    for _ in range(3000):
        start = dice.randrange(len(data) - 1)
        length = dice.randrange(1, min(64, len(data) - start) + 1)
        damaged = data[:start] + dice.randbytes(length) + data[start + length :]
        if damaged != data:
            with pytest.raises(JournalCorrupt):
                read(damaged)


def test_missing_or_repeated_frame_is_detected():
    data, at = journal(), ends()
    for first, second in pairwise(at[1:-1]):
        with pytest.raises(JournalCorrupt):
            read(data[:first] + data[second:])
        with pytest.raises(JournalCorrupt):
            read(data[:second] + data[first:])


def test_trailing_zeros_are_treated_as_a_torn_tail():
    data, at = journal(), ends()
    for cut in range(at[-2], len(data) - 1):
        payloads, reader = read(data[:cut] + b"\0" * 300)
        assert payloads == PAYLOADS[:-1]
        assert (reader.end, reader.torn) == (at[-2], True)


def test_zeros_inside_the_file_are_damage():
    data, at = journal(), ends()
    with pytest.raises(JournalCorrupt):
        read(data[: at[3]] + b"\0" * (at[4] - at[3]) + data[at[4] :])


def test_file_of_another_format_is_rejected():
    with pytest.raises(JournalCorrupt, match="damaged at byte 0"):
        read(b"REDIS0011" + bytes(100))
