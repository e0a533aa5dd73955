"""Files of a pipeline, on a local disk or in a store that all hosts of a cluster reach (HDFS, an object store).

``open_storage`` selects the implementation by the location's scheme. Stores with a scheme are reached through Spark's
JVM on the driver host, so that no process needs another client: see ``gateway``.
"""

from millstream.storage.errors import (
    ConnectorMissing,
    InvalidLocation,
    ObjectMissing,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from millstream.storage.gateway import connect, hand_over
from millstream.storage.location import has_scheme, open_storage
from millstream.storage.storage import Storage, StoredObject

__all__ = [
    "ConnectorMissing",
    "InvalidLocation",
    "ObjectMissing",
    "Storage",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StorageUnavailable",
    "StoredObject",
    "connect",
    "hand_over",
    "has_scheme",
    "open_storage",
]
