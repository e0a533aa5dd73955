"""Streams behind one contract, wherever they live: the operations, the links, and ``open_broker(url)``.

In: calls with plain Python values. Out: the values of ``model/``, or typed errors.
Never a second implementation of a command: both APIs and all links run the same conversations.
Other rooms import from here, and from nowhere else in this room: ``tests/house/test_doors.py`` holds the list.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millstream.broker.blocking_broker import BlockingBroker
from millstream.broker.broker import Broker
from millstream.broker.bulk import InBulk, Joined, gc_paused
from millstream.broker.context import DEFAULT_LIMITS, ROW_WORDS, BrokerProtocol, Context, Limits, Step
from millstream.broker.drivers import Gathering, together
from millstream.broker.failures import code_of, typed
from millstream.broker.keys import beside, slot_of
from millstream.broker.links.link import BlockingLink, BlockingListener, Link, Listener
from millstream.broker.open import open_blocking_broker, open_broker
from millstream.broker.operations.conversion import Fields, Id, field_words, mapping
from millstream.broker.operations.groups import (
    JoinedGroup,
    create_consumer,
    inherit_consumers,
    join_group,
    unblock,
    wait_for_streams,
    xreadgroup,
)
from millstream.broker.operations.info import (
    GroupSurvey,
    StreamSurvey,
    blocked_commands,
    group_info,
    list_keys,
    list_streams,
    server_info,
    server_setting,
    server_time_ms,
    server_version,
    stream_info,
    survey,
)
from millstream.broker.operations.pending import xpending_range
from millstream.broker.operations.streams import entries_at, xadd_many, xread, xrevrange
from millstream.broker.steps import delayed, groups, leases, recovery, retention, settle
from millstream.broker.steps.once import (
    Appended,
    BatchWriter,
    BlockingOnceWriter,
    Digest,
    Once,
    OnceAt,
    OnceWriter,
    RowsMissing,
)
from millstream.broker.steps.retention import Retained, keep_short
from millstream.broker.steps.script import Guard, script
from millstream.broker.steps.settle import Output, Settled, shares_slot
from millstream.broker.steps.unique import append_unique

if TYPE_CHECKING:
    from millstream.broker.embedded import Embedded, Turn
    from millstream.broker.links.engine_links import BlockingEngineLink
    from millstream.broker.links.targets import redacted, target_of
    from millstream.broker.migration import migrate

_LATER = {
    "Embedded": "embedded",
    "Turn": "embedded",
    "redacted": "links.targets",
    "target_of": "links.targets",
    "BlockingEngineLink": "links.engine_links",
    "migrate": "migration",
}
"""What needs the engine, or a client of Redis: loaded when somebody asks for it."""

__all__ = [
    "DEFAULT_LIMITS",
    "ROW_WORDS",
    "Appended",
    "BatchWriter",
    "BlockingBroker",
    "BlockingEngineLink",
    "BlockingLink",
    "BlockingListener",
    "BlockingOnceWriter",
    "Broker",
    "BrokerProtocol",
    "Context",
    "Digest",
    "Embedded",
    "Fields",
    "Gathering",
    "GroupSurvey",
    "Guard",
    "Id",
    "InBulk",
    "Joined",
    "JoinedGroup",
    "Limits",
    "Link",
    "Listener",
    "Once",
    "OnceAt",
    "OnceWriter",
    "Output",
    "Retained",
    "RowsMissing",
    "Settled",
    "Step",
    "StreamSurvey",
    "Turn",
    "append_unique",
    "beside",
    "blocked_commands",
    "code_of",
    "create_consumer",
    "delayed",
    "entries_at",
    "field_words",
    "gc_paused",
    "group_info",
    "groups",
    "inherit_consumers",
    "join_group",
    "keep_short",
    "leases",
    "list_keys",
    "list_streams",
    "mapping",
    "migrate",
    "open_blocking_broker",
    "open_broker",
    "recovery",
    "redacted",
    "retention",
    "script",
    "server_info",
    "server_setting",
    "server_time_ms",
    "server_version",
    "settle",
    "shares_slot",
    "slot_of",
    "stream_info",
    "survey",
    "target_of",
    "together",
    "typed",
    "unblock",
    "wait_for_streams",
    "xadd_many",
    "xpending_range",
    "xread",
    "xreadgroup",
    "xrevrange",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
