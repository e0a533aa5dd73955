"""Announcements in the wire format of the Go client. Malformed ones are rejected with a reason."""

from __future__ import annotations

import json
import pickle

import pytest

from millstream.assignment.announcement import Announcement, balancer_group, balancer_stream, is_lock, lock_key
from millstream.assignment.errors import MalformedAnnouncement, StreamIsOwned
from millstream.assignment.leases import FencingToken, OwnerRecord
from millstream.assignment.membership import Settings, default_member
from millstream.errors import InvalidArgument
from millstream.model import EntryId


def test_wire_format_matches_the_go_client() -> None:
    fields = Announcement("session-7", {"tenant": "a"}).fields()
    assert list(fields) == [b"lbs-input"]
    assert json.loads(fields[b"lbs-input"]) == {"DataStreamName": "session-7", "Info": {"tenant": "a"}}
    assert Announcement.parse(fields) == Announcement("session-7", {"tenant": "a"})


def test_key_names_match_the_go_client() -> None:
    assert balancer_stream("svc") == "svc-input"
    assert balancer_group("svc") == "svc-group"
    assert lock_key("session-7", EntryId(5, 1)) == b"session-7<MUTEX_KEY_SEP>5-1"
    assert lock_key("session-7", EntryId(5, 1), ":") == b"session-7:5-1"


@pytest.mark.parametrize(
    ("key", "separators", "expected"),
    [
        (b"session0<MUTEX_KEY_SEP>1700000000000-0", ("<MUTEX_KEY_SEP>",), True),
        (b"a:b<MUTEX_KEY_SEP>1-0", ("<MUTEX_KEY_SEP>",), True),
        (b"session0MUTEX_KEY_SEP1700000000000-0", ("<MUTEX_KEY_SEP>",), False),
        (b"session0:1700000000000-0", ("<MUTEX_KEY_SEP>",), False),
        (b"session0:1700000000000-0", ("<MUTEX_KEY_SEP>", ":"), True),
        (b"cache:user:4711", ("<MUTEX_KEY_SEP>", ":"), False),
        (b"\xff<MUTEX_KEY_SEP>1-0", ("<MUTEX_KEY_SEP>",), True),
    ],
)
def test_lock_of_a_go_member_is_recognised_by_its_name(key: bytes, separators: tuple[str, ...], expected: bool) -> None:
    assert is_lock(key, separators) is expected


def test_separators_are_checked() -> None:
    assert Settings(go_lock_separators=("<MUTEX_KEY_SEP>", ":")).go_lock_separators[1] == ":"
    for wrong in ((), ":", ("",), (7,)):
        with pytest.raises(InvalidArgument, match="go_lock_separators"):
            Settings(go_lock_separators=wrong)  # type: ignore[arg-type]


def test_announcement_of_a_go_member_without_info_is_parsed() -> None:
    assert Announcement.parse({b"lbs-input": b'{"DataStreamName": "x", "Info": null}'}) == Announcement("x")


@pytest.mark.parametrize(
    "fields",
    [
        {b"other": b"x"},
        {b"lbs-input": b"not json"},
        {b"lbs-input": b"[1]"},
        {b"lbs-input": b'{"DataStreamName": ""}'},
        {b"lbs-input": b'{"DataStreamName": 7}'},
        {b"lbs-input": rb'{"DataStreamName": "\ud800"}'},
        {b"lbs-input": b'{"DataStreamName": "x", "Info": 7}'},
        {b"lbs-input": b"\xff\xfe"},
        {b"lbs-input": b"[" * 100_000},
        {b"lbs-input": b'"' + b"x" * 2_000_000 + b'"'},
    ],
)
def test_malformed_announcement_is_rejected_with_a_reason(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(MalformedAnnouncement, match="not an announcement"):
        Announcement.parse(fields)


def test_empty_stream_name_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="stream"):
        Announcement("").fields()


def test_lease_shorter_than_two_renewals_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="twice renew_interval_ms"):
        Settings(lease_ms=1000, renew_interval_ms=501)


def test_default_member_name_contains_the_pod_and_is_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    assert default_member().startswith("redis-consumer-10.0.0.7-")
    monkeypatch.setenv("POD_NAME", "worker-3")
    assert default_member().startswith("redis-consumer-worker-3-")
    assert default_member() != default_member()


def test_owner_record_with_spaces_in_the_name_is_parsed() -> None:
    token = FencingToken("s", "a member", 7)
    assert OwnerRecord.parse(token.record()) == OwnerRecord(7, "a member")
    assert OwnerRecord.parse(b"7 ") == OwnerRecord(7, "")
    assert OwnerRecord.parse(None) == OwnerRecord(0, "")


def test_assignment_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(StreamIsOwned("s", "m")))
    assert (error.stream, error.owner, str(error)) == ("s", "m", str(StreamIsOwned("s", "m")))
