"""A broker's writes, fenced: refused, atomically, unless the owner record beside the stream equals the token."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.assignment.tokens import Token
from millstream.broker.broker import Broker
from millstream.broker.operations.arguments import Fields, Id
from millstream.model import EntryId


class GuardedBroker:
    """Writes as the owner of ``token.stream``, to it and to streams in its slot. A stale owner gets StaleOwner.

    Where Go members share the load-balancer stream, and on Cluster for streams in other slots, fencing holds between
    Python members and within the slot only.
    """

    def __init__(self, broker: Broker, token: Token) -> None:
        self.token = token
        self._broker = broker

    async def xadd(self, stream: str, fields: Fields, *, id: str = "*") -> EntryId:
        """Atomic. Not safe to repeat blindly: BrokerUnavailable says whether it may have been applied."""
        return await self._broker.guarded_xadd(
            stream, fields, owned=self.token.stream, record=self.token.record(), id=id
        )

    async def xack(self, stream: str, group: str, ids: Sequence[Id] | Id) -> int:
        """Atomic and idempotent."""
        return await self._broker.guarded_xack(stream, group, ids, owned=self.token.stream, record=self.token.record())


def guarded(broker: Broker, token: Token) -> GuardedBroker:
    """The broker as the holder of ``token`` may use it."""
    return GuardedBroker(broker, token)
