"""A scan examines every pending entry of a dead consumer, also if it takes only a few of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.assignment import leases
from millstream.assignment.leases import Page, effective_lock, is_free, without_recent_reads
from millstream.assignment.membership import Member
from millstream.errors import ServerError
from millstream.model import EntryId, PendingEntry

ALIVE = {"me": Member(1, 0, 1), "other": Member(1, 0, 1)}


def pending(count: int) -> list[PendingEntry]:
    return [PendingEntry(EntryId(n + 1, 0), "dead", 0, 1) for n in range(count)]


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 10))
def test_scan_examines_every_pending_entry(count: int, size: int, page_size: int) -> None:
    everything, page = pending(count), Page()
    original, leases.PAGE_SIZE = leases.PAGE_SIZE, page_size
    try:
        examined = set()
        for _ in range(4 * count + 4):
            start = EntryId.parse(page.start[1:]) if page.start != "-" else EntryId(0, 0)
            listed = [item for item in everything if item.id > start][:page_size]
            if not listed:
                page = Page()
                continue
            examined.update(item.id for item in page.next_window(listed, size))
        assert examined == {item.id for item in everything}
    finally:
        leases.PAGE_SIZE = original


def test_stream_is_free_without_live_owner_and_foreign_lock() -> None:
    assert is_free(None, None, "me", ALIVE)
    assert is_free(b"7 ", None, "me", ALIVE)
    assert is_free(b"7 gone", None, "me", ALIVE)
    assert is_free(b"7 me", b"me", "me", ALIVE)
    assert not is_free(b"7 other", None, "me", ALIVE)
    assert not is_free(None, b"a-go-member", "me", ALIVE)


def test_entry_that_a_go_member_has_just_read_is_not_taken() -> None:
    fresh, old = PendingEntry(EntryId(1, 0), "go", 1_999, 1), PendingEntry(EntryId(2, 0), "go", 2_000, 1)
    assert without_recent_reads([fresh, old]) == [old]


def test_foreign_lock_takes_precedence_over_own_locks() -> None:
    refused = ServerError("TRYAGAIN")
    assert effective_lock([], "me") is None
    assert effective_lock([b"me", b"me"], "me") == b"me"
    assert effective_lock([b"me", None], "me") is None
    assert effective_lock([None, b"go"], "me") == b"go"
    assert effective_lock([b"me", b"go"], "me") == b"go"
    assert effective_lock([b"go", refused], "me") is refused
