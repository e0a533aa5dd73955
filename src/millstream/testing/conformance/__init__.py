"""The conformance kit: what every broker promises, as tests. A class for each chapter of the contract.

Subclass the chapters in a test file of your own and give them a fixture ``broker`` (an open ``Broker``, or a
``BlockingBroker`` in ``Unblocked``); pytest with pytest-asyncio in auto mode does the rest::

    class TestGroups(GroupChapter):
        @pytest.fixture
        async def broker(self): ...

Streams have fresh names, so that a server may be shared.
"""

from millstream.testing.conformance.appending import AppendOnceChapter, AppendUniqueChapter, DurabilityChapter
from millstream.testing.conformance.arguments import ArgumentChapter, ErrorChapter
from millstream.testing.conformance.chapter import Unblocked
from millstream.testing.conformance.groups import GroupChapter, PendingChapter
from millstream.testing.conformance.info import InfoChapter, KeyChapter
from millstream.testing.conformance.reading import ReadingChapter, WaitingChapter
from millstream.testing.conformance.writing import TrimmingChapter, WritingChapter

CHAPTERS = (
    WritingChapter,
    ReadingChapter,
    GroupChapter,
    PendingChapter,
    WaitingChapter,
    AppendOnceChapter,
    AppendUniqueChapter,
    TrimmingChapter,
    InfoChapter,
    KeyChapter,
    ErrorChapter,
    ArgumentChapter,
    DurabilityChapter,
)
"""All of them, in the order in which they read best."""

__all__ = [
    "CHAPTERS",
    "AppendOnceChapter",
    "AppendUniqueChapter",
    "ArgumentChapter",
    "DurabilityChapter",
    "ErrorChapter",
    "GroupChapter",
    "InfoChapter",
    "KeyChapter",
    "PendingChapter",
    "ReadingChapter",
    "TrimmingChapter",
    "Unblocked",
    "WaitingChapter",
    "WritingChapter",
]
