"""What messaging promises, as tests: run it over any broker, yours too.

Subclass the chapters in a test file of your own and give them a fixture ``broker`` (an open ``Broker``); pytest with
pytest-asyncio in auto mode does the rest. Topics have fresh names, so that a server may be shared; ``GroupLossChapter``
alone empties it.
"""

from millstream.testing.messaging_conformance.bounds import BoundsChapter
from millstream.testing.messaging_conformance.crashing import CrashingChapter
from millstream.testing.messaging_conformance.fanout import FanoutChapter
from millstream.testing.messaging_conformance.gone import GoneChapter
from millstream.testing.messaging_conformance.group_loss import GroupLossChapter
from millstream.testing.messaging_conformance.handling import HandlingChapter
from millstream.testing.messaging_conformance.holding import HoldingChapter
from millstream.testing.messaging_conformance.iterating import IteratingChapter
from millstream.testing.messaging_conformance.ordering import OrderingChapter
from millstream.testing.messaging_conformance.publishing import PublishingChapter
from millstream.testing.messaging_conformance.recovery import RecoveryChapter

CHAPTERS = (
    PublishingChapter,
    HandlingChapter,
    CrashingChapter,
    BoundsChapter,
    IteratingChapter,
    HoldingChapter,
    RecoveryChapter,
    GoneChapter,
    GroupLossChapter,
    OrderingChapter,
    FanoutChapter,
)

__all__ = ["CHAPTERS", *(chapter.__name__ for chapter in CHAPTERS)]  # noqa: PLE0604  # they are strings
