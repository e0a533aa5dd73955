"""A sweep comes to every entry of a dead consumer, however many there are and however few may be taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.assignment import leases
from millstream.assignment.leases import Page, is_free, lock_that_counts, without_fresh
from millstream.assignment.membership import Member
from millstream.errors import ServerError
from millstream.model import EntryId, PendingEntry

ALIVE = {"me": Member(1, 0, 1), "other": Member(1, 0, 1)}


def pending(count: int) -> list[PendingEntry]:
    return [PendingEntry(EntryId(n + 1, 0), "dead", 0, 1) for n in range(count)]


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 10))
def test_windows_come_to_every_entry(count: int, size: int, page_size: int) -> None:
    everything, page = pending(count), Page()
    whole, leases.PAGE = leases.PAGE, page_size
    try:
        seen = set()
        for _ in range(4 * count + 4):
            start = EntryId.parse(page.start[1:]) if page.start != "-" else EntryId(0, 0)
            listed = [item for item in everything if item.id > start][:page_size]
            if not listed:
                page = Page()
                continue
            seen.update(item.id for item in page.next_window(listed, size))
        assert seen == {item.id for item in everything}
    finally:
        leases.PAGE = whole


def test_a_stream_is_free_unless_a_living_member_or_a_foreign_lock_holds_it() -> None:
    assert is_free(None, None, "me", ALIVE)
    assert is_free(b"7 ", None, "me", ALIVE)
    assert is_free(b"7 gone", None, "me", ALIVE)
    assert is_free(b"7 me", b"me", "me", ALIVE)
    assert not is_free(b"7 other", None, "me", ALIVE)
    assert not is_free(None, b"a-go-member", "me", ALIVE)


def test_what_a_go_member_has_just_read_is_left_to_it_until_its_lock_is_there() -> None:
    fresh, old = PendingEntry(EntryId(1, 0), "go", 1_999, 1), PendingEntry(EntryId(2, 0), "go", 2_000, 1)
    assert without_fresh([fresh, old]) == [old]


def test_of_several_locks_the_one_counts_that_keeps_us_away() -> None:
    refused = ServerError("TRYAGAIN")
    assert lock_that_counts([], "me") is None
    assert lock_that_counts([b"me", b"me"], "me") == b"me"
    assert lock_that_counts([b"me", None], "me") is None
    assert lock_that_counts([None, b"go"], "me") == b"go"
    assert lock_that_counts([b"me", b"go"], "me") == b"go"
    assert lock_that_counts([b"go", refused], "me") is refused
