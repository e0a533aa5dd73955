"""What a codec promises: a message becomes an entry's fields, and fields become a message again. Pure."""

from __future__ import annotations

from typing import Protocol

from millstream.messaging.message import Message


class Codec(Protocol):
    name: str

    def encode(self, message: Message) -> dict[bytes, bytes]:
        """The entry's fields. Any payload and any metadata can be encoded; binary zeros too."""

    def decode(self, fields: dict[bytes, bytes]) -> Message:
        """The message. Raises Undecodable, and nothing else, whatever the fields hold; on the hot path: quick."""
