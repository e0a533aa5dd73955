"""Streams behind one contract, wherever they live: the operations, the links, and ``open_broker(url)``.

In: calls with plain Python values. Out: the values of ``model/``, or typed errors.
Never a second implementation of a command: both APIs and all links run the same conversations.
"""

from millstream.broker.blocking_broker import BlockingBroker
from millstream.broker.broker import Broker
from millstream.broker.context import Context
from millstream.broker.keys import beside
from millstream.broker.limits import Limits
from millstream.broker.open import open_blocking_broker, open_broker
from millstream.broker.operations.info import GroupSurvey, StreamSurvey, server_setting, server_version, survey
from millstream.broker.steps import delayed, groups, leases, recovery, retention, settle
from millstream.broker.steps.once import Appended, BlockingOnceWriter, Digest, OnceWriter, RowsMissing
from millstream.broker.steps.script import Guard

__all__ = [
    "Appended",
    "BlockingBroker",
    "BlockingOnceWriter",
    "Broker",
    "Context",
    "Digest",
    "GroupSurvey",
    "Guard",
    "Limits",
    "OnceWriter",
    "RowsMissing",
    "StreamSurvey",
    "beside",
    "delayed",
    "groups",
    "leases",
    "open_blocking_broker",
    "open_broker",
    "recovery",
    "retention",
    "server_setting",
    "server_version",
    "settle",
    "survey",
]
