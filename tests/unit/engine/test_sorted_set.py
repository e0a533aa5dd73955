"""The sorted set against a simple model: a sorted list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine import sorted_set
from millstream.engine.sorted_set import SortedSet

MEMBERS = st.binary(min_size=0, max_size=2)
SCORES = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e300, float("inf"), float("-inf")])
ACTIONS = st.lists(st.tuples(st.booleans(), MEMBERS, SCORES), max_size=300)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_order_is_kept(actions: list[tuple[bool, bytes, float]]) -> None:
    ours, model = SortedSet(), {}
    for put, member, score in actions:
        if put:
            ours.put(member, score)
            model[member] = score
        else:
            assert ours.discard(member) == (model.pop(member, None) is not None)
    expected = sorted((score, member) for member, score in model.items())
    assert list(ours) == expected
    assert len(ours) == len(expected)
    for rank, (score, member) in enumerate(expected):
        assert ours.rank(member) == rank
        assert ours.count_below((score, member)) == rank
    assert ours.slice(2, 5) == expected[2:5]
    assert ours.rank(b"not there") is None


def test_many_members_are_kept_in_runs() -> None:
    ours = SortedSet()
    for number in range(5000):
        ours.put(b"%d" % (number * 7919 % 5000), float(number * 31 % 997))
    expected = sorted((score, member) for member, score in ours.scores.items())
    assert list(ours) == expected
    assert len(ours._runs) > 3
    assert all(0 < len(run) < 2 * sorted_set.RUN_ITEMS for run in ours._runs)
    for start, stop in ((0, 5000), (1000, 1003), (511, 1540), (4999, 5000)):
        assert ours.slice(start, stop) == expected[start:stop]
    for rank in range(0, 5000, 333):
        assert ours.rank(expected[rank][1]) == rank
    for _, member in expected:
        ours.discard(member)
    assert ours._runs == []


def test_effects_restore_the_state() -> None:
    ours, again = SortedSet(), SortedSet()
    for number in range(100):
        ours.put(b"%d" % number, number / 3)
    ours.put(b"end", float("inf"))
    for name, key, *words in ours.effects(b"key"):
        assert (name, key) == (b"ZADD", b"key")
        for score, member in zip(words[::2], words[1::2], strict=True):
            again.put(member, float(score))
    assert again.scores == ours.scores
