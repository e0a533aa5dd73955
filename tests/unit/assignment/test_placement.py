"""Everybody computes the same even shares, within capacities, and nobody hands over without need."""

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
def test_shares_add_up_to_what_there_is_or_to_what_fits(members: dict[str, Member], total: int) -> None:
    shares = targets(members, total)
    assert sum(shares.values()) == min(total, sum(member.capacity for member in members.values()))
    assert all(0 <= share <= members[name].capacity for name, share in shares.items())


@given(tables, st.integers(0, 200))
def test_shares_differ_by_one_at_most_where_capacity_allows(members: dict[str, Member], total: int) -> None:
    shares = targets(members, total)
    roomy = [share for name, share in shares.items() if share < members[name].capacity]
    if roomy:
        assert max(shares.values()) <= min(roomy) + 1


def test_what_does_not_divide_goes_to_those_who_hold_the_most() -> None:
    members = {"a": Member(1, 3, 100), "b": Member(1, 4, 100), "c": Member(1, 3, 100)}
    assert targets(members, 10) == {"a": 3, "b": 4, "c": 3}


@given(tables, st.integers(0, 200))
def test_an_even_spread_is_left_alone(members: dict[str, Member], total: int) -> None:
    settled = {name: Member(1, share, members[name].capacity) for name, share in targets(members, total).items()}
    assert targets(settled, total) == {name: member.owned for name, member in settled.items()}


def test_a_member_is_dead_at_the_millisecond_at_which_its_lease_ends() -> None:
    members = {"a": Member(100, 0, 1), "b": Member(101, 0, 1)}
    assert set(living(members, 100)) == {"b"}
