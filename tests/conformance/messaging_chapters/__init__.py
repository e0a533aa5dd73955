"""What messaging promises, as tests that run over every broker.

Subclass the chapters in a test file of your own and give them a fixture ``broker`` (an open ``Broker``); pytest with
pytest-asyncio in auto mode does the rest. Topics have fresh names, so that a server may be shared; ``GroupLossChapter``
alone empties it.
"""

from messaging_chapters.bounds import BoundsChapter
from messaging_chapters.crashing import CrashingChapter
from messaging_chapters.fanout import FanoutChapter
from messaging_chapters.gone import GoneChapter
from messaging_chapters.group_loss import GroupLossChapter
from messaging_chapters.handling import HandlingChapter
from messaging_chapters.holding import HoldingChapter
from messaging_chapters.iterating import IteratingChapter
from messaging_chapters.ordering import OrderingChapter
from messaging_chapters.publishing import PublishingChapter
from messaging_chapters.recovery import RecoveryChapter
from messaging_chapters.surviving import SurvivingChapter

CHAPTERS = (
    PublishingChapter,
    HandlingChapter,
    CrashingChapter,
    BoundsChapter,
    IteratingChapter,
    HoldingChapter,
    RecoveryChapter,
    SurvivingChapter,
    GoneChapter,
    GroupLossChapter,
    OrderingChapter,
    FanoutChapter,
)

__all__ = ["CHAPTERS", *(chapter.__name__ for chapter in CHAPTERS)]  # noqa: PLE0604  # they are strings
