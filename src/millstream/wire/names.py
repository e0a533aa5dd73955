"""Names of streams, groups and consumers between ``str`` (what people write) and ``bytes`` (what travels).

Names are just bytes to Redis. Bytes that are not UTF-8 become surrogate escapes, and come back as the same bytes.
"""

from __future__ import annotations


def to_bytes(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


def to_name(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
