"""Shares are even, within capacities, and no stream is handed over without need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.assignment.membership import Member, living, targets

tables = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=3),
    st.builds(Member, st.just(1), st.integers(0, 50), st.integers(0, 40)),
    max_size=8,
)


@given(tables, st.integers(0, 200))
def test_sum_of_shares_is_limited_by_streams_and_capacity(members: dict[str, Member], total: int) -> None:
    shares = targets(members, total)
    assert sum(shares.values()) == min(total, sum(member.capacity for member in members.values()))
    assert all(0 <= share <= members[name].capacity for name, share in shares.items())


@given(tables, st.integers(0, 200))
def test_shares_differ_by_one_at_most_where_capacity_allows(members: dict[str, Member], total: int) -> None:
    shares = targets(members, total)
    below_capacity = [share for name, share in shares.items() if share < members[name].capacity]
    if below_capacity:
        assert max(shares.values()) <= min(below_capacity) + 1


def test_remainder_goes_to_members_that_own_the_most() -> None:
    members = {"a": Member(1, 3, 100), "b": Member(1, 4, 100), "c": Member(1, 3, 100)}
    assert targets(members, 10) == {"a": 3, "b": 4, "c": 3}


@given(tables, st.integers(0, 200))
def test_even_distribution_is_not_changed(members: dict[str, Member], total: int) -> None:
    balanced = {name: Member(1, share, members[name].capacity) for name, share in targets(members, total).items()}
    assert targets(balanced, total) == {name: member.owned for name, member in balanced.items()}


def test_member_is_dead_when_its_lease_ends() -> None:
    members = {"a": Member(100, 0, 1), "b": Member(101, 0, 1)}
    assert set(living(members, 100)) == {"b"}
