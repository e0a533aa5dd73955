"""Rooms have doors: others import from a room's ``__init__`` alone, and it exports what others use, nothing else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "millstream"
DOORS = [
    *("assignment", "broker", "cdc", "cqrs", "engine", "messaging", "model", "observe", "pipelines"),
    *("runner", "server", "spark", "testing", "wire"),
]
"""The rooms that are entered through their doors alone."""
FOR_USERS = {
    "broker": {"Appended", "BrokerProtocol", "Context", "Step", "Fields", "Id", "OnceWriter", "together"},
    "engine": {"Block"},
    "observe": {"ServiceMetrics", "StreamSurveyor"},
    "runner": {"TargetRefused", "lifespan"},
    "testing": {
        *("AnsweringProxy", "ClusterSetup", "CuttingProxy", "DeliveryLedger", "Fault", "FaultyBlockingLink"),
        *(
            "FaultyLink",
            "FragileProxy",
            "HandlingLedger",
            "LoadingRedis",
            "MariadbDatabase",
            "MariadbProcess",
            "PostgresDatabase",
        ),
        *("SentinelSetup", "ServedBroker", "eventually", "free_port", "mariadb_server", "redis_server_installed"),
        "valkey_server",
    },
    "model": {"APPENDED", "FSYNCED", "MEMORY", "Fact", "ManualClock", "from_json_fields", "to_json_fields"},
    "messaging": {
        *("Ack", "AckPolicy", "Backoff", "Burial", "Bury", "Codec", "Handler", "Outcome", "Output", "Retry"),
        "PartitionedTopic",
        *(
            "read_burial",
            "Rejected",
            "SubscriberSettings",
            "Depends",
            "Marshaler",
            "PydanticMarshaler",
            "CannotUnmarshal",
        ),
        *("codec_names", "circuit_breaker", "correlation", "deduplicate", "duplicate", "fail_randomly", "poison_queue"),
        *("recoverer", "retry", "throttle", "timeout", "AlreadyRunning", "AlreadySettled", "AlreadySubscribed"),
        *("DeliveriesExhausted", "DuplicateRoute", "HandlerCancelled", "HandlerCrashed", "NoSuchDeadLetter"),
        *("NothingToSettle", "PublisherClosed", "RetryLater", "TooLateToSettle", "Undecodable"),
    },
    "pipelines": {
        *("EventFailed", "SinkFailed", "SourceFailed", "SparkNotStarted", "CheckpointRefused", "NoSuchCheckpoint"),
        *("load_pipeline", "parse_pipeline"),
    },
    "spark": {"FORMAT", "RedisStreamsSource"},
    "cqrs": {
        *("CannotUnmarshal", "CommandBus", "CommandRouter", "Depends", "DuplicateHandler", "EventBus", "EventRouter"),
        *("HandlerRefused", "Marshaler", "PydanticMarshaler", "command_topic", "event_topic"),
    },
    "assignment": {
        *(
            "AssignedSubscriber",
            "MalformedAnnouncement",
            "MemberClosed",
            "NotTheOwner",
            "Notification",
            "Notifications",
        ),
        *("PartitionedPublisher", "StreamAdded", "StreamDisowned", "StreamExpired", "StreamIsOwned"),
        *("StreamTerminated", "Token", "assigned_subscriber", "partition_of", "partition_streams"),
    },
}
"""What a door exports for people's own code: what methods return, and what ``run`` takes."""


@cache
def imported() -> list[tuple[str, str, str]]:
    """File, module and name of everything that the product imports from itself."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millstream."):
                found += [(str(path.relative_to(SOURCE)), node.module or "", alias.name) for alias in node.names]
    return found


def crossing(room: str) -> Iterator[tuple[str, str, str]]:
    """What of it other rooms import from this one."""
    for file, module, name in imported():
        inside = Path(file).is_relative_to(room.split(".", maxsplit=1)[0])
        if not inside and f"{module}.".startswith(f"millstream.{room}."):
            yield file, module, name


def public() -> set[str]:
    """What users import from the package itself."""
    return set(sys.modules["millstream"].__all__)


@pytest.mark.parametrize("room", DOORS)
def test_other_rooms_come_in_through_the_door(room: str) -> None:
    doors = {f"millstream.{one}" for one in DOORS}
    past = [f"{file}: {module}" for file, module, _ in crossing(room) if module not in doors]

    assert past == [], "import these names from the room's door, and export them there"


@pytest.mark.parametrize("room", DOORS)
def test_a_door_exports_what_others_use_and_nothing_else(room: str) -> None:
    door = import_module(f"millstream.{room}")
    used = {name for _, module, name in crossing(room) if module == f"millstream.{room}"}

    assert sorted(set(door.__all__) - used - public() - FOR_USERS.get(room, set())) == []
    assert sorted(used - set(door.__all__)) == []
    assert [name for name in door.__all__ if not hasattr(door, name)] == []
