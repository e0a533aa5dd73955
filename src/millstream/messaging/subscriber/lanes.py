"""Order by key, within one consumer: a key's next message starts when the one before has left. Pure.

A message that waits for a retry has not left: it holds its key back. Other keys pass by.
"""

from __future__ import annotations

from collections import deque

from millstream.messaging.message import Message
from millstream.messaging.settings import KeyOf
from millstream.model import EntryId


class Lanes:
    __slots__ = ("_key_of", "_keys", "_lanes")

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._lanes: dict[str, deque[Message]] = {}
        """Key to its messages in order; the first is the one that may be started."""
        self._keys: dict[EntryId, str] = {}

    def enter(self, message: Message) -> bool:
        """True if it may start now; False if it waits behind another of its key."""
        assert message.id is not None
        key = self._key_of(message)
        if key is None:
            return True
        lane = self._lanes.setdefault(key, deque())
        lane.append(message)
        self._keys[message.id] = key
        return len(lane) == 1

    def leave(self, entry_id: EntryId) -> Message | None:
        """The entry is settled for good. The message that may start because of that, if there is one."""
        key = self._keys.pop(entry_id, None)
        if key is None:
            return None
        lane = self._lanes[key]
        was_first = lane[0].id == entry_id
        for message in lane:
            if message.id == entry_id:
                lane.remove(message)
                break
        if not lane:
            del self._lanes[key]
            return None
        return lane[0] if was_first else None

    def waiting(self) -> list[Message]:
        """Those that have not been allowed to start, in order."""
        return [message for lane in self._lanes.values() for message in list(lane)[1:]]
