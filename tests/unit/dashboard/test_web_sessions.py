"""A session is a signed cookie: what is modified, expired or from another process is rejected."""

from __future__ import annotations

import pytest

from millstream.dashboard.access import MAX_FAILED_LOGINS_PER_MINUTE, SESSION_LIFETIME_S, Sessions


class Now:
    def __init__(self) -> None:
        self.s = 1_000_000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def sessions(now: Now) -> Sessions:
    return Sessions(now=now)


def test_cookie_contains_its_session(sessions: Sessions) -> None:
    session, cookie = sessions.begin("Zoë; Path=/", trusted=True)

    assert sessions.read(cookie) == session
    assert session.name == "Zoë; Path=/"
    assert all(char.isalnum() or char in "-_.=" for char in cookie), "nothing in it can end a header"


@pytest.mark.parametrize("place", range(5))
def test_cookie_with_a_changed_part_is_rejected(sessions: Sessions, place: int) -> None:
    _, cookie = sessions.begin("a", trusted=False)
    parts = cookie.split(".")
    parts[place] = "1" + parts[place][1:] if parts[place][0] != "1" else "2" + parts[place][1:]

    assert sessions.read(".".join(parts)) is None


@pytest.mark.parametrize("cookie", ["", ".", "....", "a.b.c.d.e", "\u2603", "x" * 10_000])
def test_malformed_cookie_is_rejected(sessions: Sessions, cookie: str) -> None:
    assert sessions.read(cookie) is None


def test_session_ends_after_its_lifetime_at_logout_and_with_the_process(sessions: Sessions, now: Now) -> None:
    session, cookie = sessions.begin("a", trusted=True)
    assert Sessions(now=now).read(cookie) is None
    _, other = sessions.begin("b", trusted=True)
    sessions.end(session)
    assert sessions.read(cookie) is None
    assert sessions.read(other) is not None
    now.s += SESSION_LIFETIME_S
    assert sessions.read(other) is None


def test_csrf_token_of_another_session_is_rejected(sessions: Sessions) -> None:
    mine, _ = sessions.begin("a", trusted=True)
    theirs, _ = sessions.begin("b", trusted=True)

    assert sessions.is_csrf_valid(mine, sessions.csrf(mine))
    assert not sessions.is_csrf_valid(mine, sessions.csrf(theirs))
    assert not sessions.is_csrf_valid(mine, "")
    assert not sessions.is_csrf_valid(mine, "\udcff")


def test_failed_logins_are_limited_per_minute_for_all_clients(sessions: Sessions, now: Now) -> None:
    for _ in range(MAX_FAILED_LOGINS_PER_MINUTE):
        assert sessions.can_log_in()
        sessions.record_failure()
    assert not sessions.can_log_in()
    now.s += 61
    assert sessions.can_log_in()
