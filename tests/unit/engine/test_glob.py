"""Glob patterns, compared with results of a redis-server; and patterns that are expensive to match."""

from __future__ import annotations

import pytest
from driving import Driver

from millstream.engine.glob import Glob, matches
from millstream.wire.commands import ErrorReply


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


def test_matching_many_stars_is_linear_in_the_text() -> None:
    """A matcher that tries every split would practically never end on this text."""
    assert not matches(b"*a" * 40 + b"b", b"a" * 20_000)


def test_long_pattern_is_matched_only_against_long_texts() -> None:
    assert not matches(b"?" * 900, b"a" * 899)
    assert matches(b"?" * 900, b"a" * 900)
    assert matches(b"a" * 100_000, b"a" * 100_000)


def test_pattern_with_thousands_of_wildcards_is_rejected() -> None:
    for pattern in (b"?" * 100_000, b"[a-z]" * 40_000, b"*" + b"?a" * 1000):
        with pytest.raises(ErrorReply, match="too long"):
            matches(pattern, b"k")


def test_subscribing_to_many_patterns_compiles_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = Glob.__init__
    monkeypatch.setattr(Glob, "__init__", lambda self, pattern: (made.append(pattern), real(self, pattern))[1])
    driver = Driver()
    for number in range(2000):
        driver.say(f"PSUBSCRIBE *{number}[a-z]?x")
    other = driver.session()
    for _ in range(10):
        driver.say("PUBLISH hello world", other)
    assert len(made) == 2000
