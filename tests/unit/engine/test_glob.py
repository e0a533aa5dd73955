"""Redis's patterns, whose answers were asked of a redis-server; and patterns that are meant to hurt."""

from __future__ import annotations

import pytest

from millstream.engine.glob import matches


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("*", ["", "a", "abc"], []),
        ("a*", ["a", "ab"], ["", "ba"]),
        ("*a", ["a", "ba", "aa"], ["", "ab"]),
        ("a*b*c", ["abc", "axbxc", "abbcc"], ["acb", "ab"]),
        ("a**b", ["ab", "axb"], ["a"]),
        ("**", ["a", "ab"], [""]),
        ("*ab*ab", ["abab", "abxab"], ["ab", "aab"]),
        ("?", ["a", "\n"], ["", "ab"]),
        ("h[ae]llo", ["hello", "hallo"], ["hillo"]),
        ("h[^e]llo", ["hallo"], ["hello"]),
        ("h[a-c]", ["ha", "hb", "hc"], ["hd"]),
        ("h[c-a]", ["ha", "hb", "hc"], ["hd"]),
        ("[]a", [], ["a", "]a"]),
        ("[^]a", ["xa"], ["a"]),
        ("[a", ["a"], ["[a"]),
        ("[a-", ["a", "-"], ["b"]),
        ("[\\]]", ["]"], ["\\"]),
        ("\\*", ["*"], ["a"]),
        ("a\\", ["a\\"], ["a"]),
        ("\\a", ["a"], ["\\a"]),
        ("a.c", ["a.c"], ["abc"]),
        ("__key*__:*", ["__keyspace@0__:a", "__keyevent@0__:set"], ["__key"]),
        ("", [""], ["a"]),
    ],
)
def test_pattern(pattern: str, fits: list[str], does_not: list[str]) -> None:
    for text in fits:
        assert matches(pattern.encode(), text.encode()), text
    for text in does_not:
        assert not matches(pattern.encode(), text.encode()), text


def test_many_stars_cost_no_more_than_the_text_is_long() -> None:
    """A matcher that tries every split would not come back from this one."""
    assert not matches(b"*a" * 40 + b"b", b"a" * 20_000)
