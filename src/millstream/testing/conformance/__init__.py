"""The conformance kit: the contract of every broker as tests, with one class per chapter of the contract.

Subclass the chapters in a test file and add a fixture ``broker`` (an open ``Broker``, or a ``BlockingBroker`` in
``Unblocked``). Run it with pytest and pytest-asyncio in auto mode::

    class TestGroups(GroupChapter):
        @pytest.fixture
        async def broker(self): ...

Streams have unique names, so that the tests can run against a shared server.
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
"""All chapters, in the order of the documentation."""

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
