"""For tests, ours and yours: the conformance kit, a faulty link, wait helpers, servers, the delivery ledger.

The kit is in ``millstream.testing.conformance``, and needs pytest; everything else needs only this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.testing.answering import AnsweringProxy as AnsweringProxy
    from millstream.testing.databases import MariadbDatabase as MariadbDatabase
    from millstream.testing.databases import MariadbProcess as MariadbProcess
    from millstream.testing.databases import PostgresDatabase as PostgresDatabase
    from millstream.testing.databases import PostgresProcess as PostgresProcess
    from millstream.testing.databases import mariadb_server as mariadb_server
    from millstream.testing.databases import postgres_binaries as postgres_binaries
    from millstream.testing.faults import CuttingProxy as CuttingProxy
    from millstream.testing.faults import Fault as Fault
    from millstream.testing.faults import FaultyBlockingLink as FaultyBlockingLink
    from millstream.testing.faults import FaultyLink as FaultyLink
    from millstream.testing.faults import FragileProxy as FragileProxy
    from millstream.testing.ledger import DeliveryLedger as DeliveryLedger
    from millstream.testing.ledger import HandlingLedger as HandlingLedger
    from millstream.testing.servers import LoadingRedis as LoadingRedis
    from millstream.testing.servers import RedisProcess as RedisProcess
    from millstream.testing.servers import ServedBroker as ServedBroker
    from millstream.testing.servers import ServeProcess as ServeProcess
    from millstream.testing.servers import free_port as free_port
    from millstream.testing.servers import redis_server_installed as redis_server_installed
    from millstream.testing.servers import valkey_server as valkey_server
    from millstream.testing.topologies import ClusterSetup as ClusterSetup
    from millstream.testing.topologies import SentinelSetup as SentinelSetup
    from millstream.testing.verify import PromiseResult as PromiseResult
    from millstream.testing.verify import verify_server as verify_server
    from millstream.testing.waiting import eventually as eventually
    from millstream.testing.waiting import wait_until as wait_until

_HOMES = {
    "AnsweringProxy": "answering",
    "ClusterSetup": "topologies",
    "CuttingProxy": "faults",
    "DeliveryLedger": "ledger",
    "Fault": "faults",
    "FaultyBlockingLink": "faults",
    "FaultyLink": "faults",
    "FragileProxy": "faults",
    "HandlingLedger": "ledger",
    "LoadingRedis": "servers",
    "MariadbDatabase": "databases",
    "MariadbProcess": "databases",
    "PostgresDatabase": "databases",
    "PostgresProcess": "databases",
    "PromiseResult": "verify",
    "RedisProcess": "servers",
    "SentinelSetup": "topologies",
    "ServeProcess": "servers",
    "ServedBroker": "servers",
    "eventually": "waiting",
    "free_port": "servers",
    "mariadb_server": "databases",
    "postgres_binaries": "databases",
    "redis_server_installed": "servers",
    "valkey_server": "servers",
    "verify_server": "verify",
    "wait_until": "waiting",
}
"""Names and their modules: pytest loads our plugin from this room at its every start, and only that."""

__all__ = [*_HOMES]  # noqa: PLE0604  # the keys are strings, which the rule does not see


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'millstream.testing' has no attribute {name!r}")
    value = getattr(import_module(f"millstream.testing.{home}"), name)
    globals()[name] = value
    return value
