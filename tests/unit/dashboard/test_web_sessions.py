"""A session is a signed cookie: what is changed, over, or of another process is none."""

from __future__ import annotations

import pytest

from millstream.dashboard.guard import FAILURES, LIFE_S, Sessions


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


def test_a_cookie_tells_who_it_was_given_to(sessions: Sessions) -> None:
    session, cookie = sessions.begin("Zoë; Path=/", trusted=True)

    assert sessions.read(cookie) == session
    assert session.name == "Zoë; Path=/"
    assert all(char.isalnum() or char in "-_.=" for char in cookie), "nothing in it can end a header"


@pytest.mark.parametrize("place", range(5))
def test_a_cookie_with_one_part_changed_is_no_cookie(sessions: Sessions, place: int) -> None:
    _, cookie = sessions.begin("a", trusted=False)
    parts = cookie.split(".")
    parts[place] = "1" + parts[place][1:] if parts[place][0] != "1" else "2" + parts[place][1:]

    assert sessions.read(".".join(parts)) is None


@pytest.mark.parametrize("cookie", ["", ".", "....", "a.b.c.d.e", "\u2603", "x" * 10_000])
def test_nonsense_is_no_cookie(sessions: Sessions, cookie: str) -> None:
    assert sessions.read(cookie) is None


def test_a_session_ends_with_its_time_with_logging_out_and_with_the_process(sessions: Sessions, now: Now) -> None:
    session, cookie = sessions.begin("a", trusted=True)
    assert Sessions(now=now).read(cookie) is None
    _, other = sessions.begin("b", trusted=True)
    sessions.end(session)
    assert sessions.read(cookie) is None
    assert sessions.read(other) is not None
    now.s += LIFE_S
    assert sessions.read(other) is None


def test_a_form_of_another_session_does_not_fit(sessions: Sessions) -> None:
    mine, _ = sessions.begin("a", trusted=True)
    theirs, _ = sessions.begin("b", trusted=True)

    assert sessions.csrf_fits(mine, sessions.csrf(mine))
    assert not sessions.csrf_fits(mine, sessions.csrf(theirs))
    assert not sessions.csrf_fits(mine, "")
    assert not sessions.csrf_fits(mine, "\udcff")


def test_guessing_is_slowed_for_everybody_and_begins_anew_after_a_minute(sessions: Sessions, now: Now) -> None:
    for _ in range(FAILURES):
        assert sessions.may_try()
        sessions.failed()
    assert not sessions.may_try()
    now.s += 61
    assert sessions.may_try()
