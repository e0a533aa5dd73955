"""Packets of MariaDB's protocol that arrive in pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from millstream.cdc.mariadb.connection import Packets


class _Pieces:
    """A socket that returns ``data``, ``size`` bytes at a time, and then times out."""

    def __init__(self, data: bytes, size: int) -> None:
        self._pieces = [data[at : at + size] for at in range(0, len(data), size)]

    def settimeout(self, timeout_s: float) -> None:
        pass

    def recv(self, limit: int) -> bytes:
        if not self._pieces:
            raise TimeoutError
        return self._pieces.pop(0)


def _packet(body: bytes) -> bytes:
    return len(body).to_bytes(3, "little") + b"\0" + body


@pytest.mark.parametrize("size", [1, 3, 7, 1_448])
def test_part_of_a_packet_is_not_a_timeout(size: int) -> None:
    bodies = [b"x", b"y" * 5_000, b"z" * 3]
    packets = Packets(SimpleNamespace(_sock=_Pieces(b"".join(map(_packet, bodies)), size)))
    received: list[bytes] = []
    while (several := packets.receive(1)) is not None:
        received += several
    assert received == bodies


def test_packet_of_several_parts_is_joined_wherever_it_is_split() -> None:
    longest = 0xFFFFFF
    data = _packet(b"a" * longest) + _packet(b"") + _packet(b"b" * longest) + _packet(b"c") + _packet(b"d")
    packets = Packets(SimpleNamespace(_sock=_Pieces(data, longest + 3)))
    received: list[bytes] = []
    while (several := packets.receive(1)) is not None:
        received += several
    assert [(body[:1], len(body)) for body in received] == [(b"a", longest), (b"b", longest + 1), (b"d", 1)]
