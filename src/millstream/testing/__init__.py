"""For tests, ours and yours: the conformance kit, a faulty link, wait helpers, servers, the delivery ledger.

The kit is in ``millstream.testing.conformance``, and needs pytest; everything else needs only this package.
"""

from millstream.testing.answering import AnsweringProxy
from millstream.testing.faulty import Fault, FaultyBlockingLink, FaultyLink
from millstream.testing.fragile import FragileProxy
from millstream.testing.handling_ledger import HandlingLedger
from millstream.testing.ledger import DeliveryLedger
from millstream.testing.loading import LoadingRedis
from millstream.testing.postgres import PostgresDatabase, PostgresProcess, postgres_binaries
from millstream.testing.proxy import CuttingProxy
from millstream.testing.servers import (
    RedisProcess,
    ServedBroker,
    ServeProcess,
    free_port,
    redis_server_installed,
    valkey_server,
)
from millstream.testing.topologies import ClusterSetup, SentinelSetup
from millstream.testing.waiting import eventually, wait_until

__all__ = [
    "AnsweringProxy",
    "ClusterSetup",
    "CuttingProxy",
    "DeliveryLedger",
    "Fault",
    "FaultyBlockingLink",
    "FaultyLink",
    "FragileProxy",
    "HandlingLedger",
    "LoadingRedis",
    "PostgresDatabase",
    "PostgresProcess",
    "RedisProcess",
    "SentinelSetup",
    "ServeProcess",
    "ServedBroker",
    "eventually",
    "free_port",
    "postgres_binaries",
    "redis_server_installed",
    "valkey_server",
    "wait_until",
]
