"""Commands as bytes, in C, and a long batch cut into chunks that are bounded by count and by size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import hiredis

from millstream.broker.bulk import InBulk, Joined, SameShape
from millstream.broker.context import Limits
from millstream.wire import Args

pack = cast("Callable[[Args], bytes]", hiredis.pack_command)


def chunks_of(requests: Sequence[Args], limits: Limits) -> Iterator[tuple[bytes, int]]:
    """Packed chunks with the number of commands in each.

    The number that fits is guessed from the chunk before; a chunk that came out too big is cut in two.
    """
    if type(requests) is SameShape:
        yield from _chunks_of_columns(requests, limits)
        return
    start, step = 0, limits.chunk_commands
    while start < len(requests):
        packed = list(map(pack, requests[start : start + step]))
        data = b"".join(packed)
        if len(data) > limits.chunk_bytes and len(packed) > 1:
            kept = max(1, len(packed) * limits.chunk_bytes // (2 * len(data)))
            step = kept
            packed = packed[:kept]
            data = b"".join(packed)
        elif len(data) < limits.chunk_bytes // 4:
            step = min(limits.chunk_commands, step * 2)
        start += len(packed)
        yield data, len(packed)


def _chunks_of_columns(requests: SameShape, limits: Limits) -> Iterator[tuple[bytes, int]]:
    start, total = 0, len(requests)
    while start < total:
        piece = requests[start : start + limits.chunk_commands]
        while len(piece) > 1 and piece.size() > limits.chunk_bytes:
            piece = piece[: (len(piece) + 1) // 2]
        yield piece.packed(), len(piece)
        start += len(piece)


def pieces_of(requests: Sequence[Args]) -> Iterable[bytes | memoryview]:
    """What ``pack_all`` gives, uncopied where it is large already."""
    return requests.pieces() if type(requests) is Joined else (pack_all(requests),)


def pack_all(requests: Sequence[Args]) -> bytes | memoryview:
    return requests.packed() if isinstance(requests, InBulk) else b"".join(map(pack, requests))
