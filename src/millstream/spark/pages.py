"""A range of a stream, page by page, and the proof that none of its entries left before it was read.

Each page begins at the last entry of the page before, so that seeing that entry again proves that trimming has not
passed this place. Only where it is gone, counts are asked for, in one atomic step with the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from millstream.broker import BlockingBroker, typed
from millstream.model import EntryId
from millstream.spark.data_loss import Gap, gap_after
from millstream.spark.offsets import Range, StreamPosition
from millstream.spark.survey import told
from millstream.wire import Batch, Command, ErrorReply, to_bytes

PAGE_BYTES = 1024 * 1024
"""What a page should weigh: big enough to be cheap, small enough that memory does not grow with the entries."""
_FIRST_PAGE = 64

RawEntries = list[Any]
OnGap = Callable[[str, Gap], None]


def read_range(broker: BlockingBroker, wanted: Range, page_size: int, on_gap: OnGap) -> Iterator[RawEntries]:
    """Yields raw entries with ``after < id <= upto``. ``on_gap`` is told what was lost, and may raise."""
    key, last = to_bytes(wanted.stream), bytes(wanted.upto)
    place = StreamPosition(wanted.after, wanted.added, wanted.exact)
    size = min(_FIRST_PAGE, page_size)
    while True:
        words = (b"XRANGE", key, bytes(place.id), last, b"COUNT", b"%d" % (size + 1))
        page: RawEntries = broker.link.call(Command(words, key, repeatable=True))
        gap = None
        if not page or page[0][0] != words[2]:
            page, gap = _page_with_proof(broker, wanted, words, place)
        if gap is not None:
            on_gap(wanted.stream, _within(gap, wanted, place))
            place = place._replace(added=None)
        full = len(page) > size
        if page and page[0][0] == words[2]:
            del page[0]
        if page:
            yield page
            reached = EntryId.parse(page[-1][0])
            place = StreamPosition(reached, None if place.added is None else place.added + len(page), place.exact)
            size = _next_size(page, page_size)
        if not full or place.id >= wanted.upto:
            return


def _within(gap: Gap, wanted: Range, place: StreamPosition) -> Gap:
    """No more than the batch held from this place on: the rest is the next batch's loss, and the driver counts it."""
    if gap.lost is None or wanted.most is None or wanted.added is None or place.added is None:
        return gap
    return gap._replace(lost=max(0, min(gap.lost, wanted.added + wanted.most - place.added)))


def _page_with_proof(
    broker: BlockingBroker, wanted: Range, words: tuple[bytes, ...], place: StreamPosition
) -> tuple[RawEntries, Gap | None]:
    """The page again, in one atomic step with what the stream says about itself.

    In two steps, trimming could come between them: it would be blamed for entries that had been read, or not be seen.
    """
    key = words[1]
    replies = broker.link.call_many(Batch([(b"XINFO", b"STREAM", key), words], key, atomic=True, repeatable=True))
    if isinstance(replies[1], ErrorReply):
        raise typed(replies[1])
    info = told(wanted.stream, replies[0])
    if info is None or info.last_generated < wanted.upto:
        text = f"stream {wanted.stream!r} held entries up to {wanted.upto} and was deleted: they were possibly lost."
        return replies[1], Gap(None, False, text)
    return replies[1], gap_after(wanted.stream, place, info)


def _next_size(page: RawEntries, page_size: int) -> int:
    """As many entries as fit into PAGE_BYTES, by the page just seen."""
    sample = page[:: max(1, len(page) // 16)]
    weight = sum(len(item[0]) + sum(map(len, item[1])) for item in sample) // len(sample) + 1
    return max(1, min(page_size, PAGE_BYTES // weight))
