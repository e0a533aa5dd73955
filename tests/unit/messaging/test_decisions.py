"""The settings of a subscriber, and the position at which it recreates a group."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millstream.errors import InvalidArgument
from millstream.messaging import Backoff
from millstream.messaging.consumer.membership import restart_point
from millstream.messaging.settings import SubscriberSettings, check_topic, default_consumer
from millstream.model import MIN_ID, EntryId


def settings(**options: object) -> SubscriberSettings:
    return SubscriberSettings(**{"group": "g", "consumer": "c", "group_start": "0", **options})  # type: ignore[arg-type]


# --- a lost group -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("oldest", "last", "generated", "point"),
    [
        (None, EntryId(9), EntryId(9), EntryId(9)),
        (None, EntryId(9), EntryId(20), EntryId(9)),
        (EntryId(5, 3), EntryId(9), EntryId(20), EntryId(5, 2)),
        (EntryId(5, 3), EntryId(9), EntryId(8), MIN_ID),
        (None, EntryId(9), MIN_ID, MIN_ID),
        (None, MIN_ID, MIN_ID, MIN_ID),
        (EntryId(12), EntryId(9), EntryId(20), EntryId(9)),
    ],
)
def test_position_of_a_recreated_group(
    oldest: EntryId | None, last: EntryId, generated: EntryId, point: EntryId
) -> None:
    assert restart_point(oldest, last, generated) == point


# --- settings ---------------------------------------------------------------------------------------------------------


def test_backoff_grows_within_bounds() -> None:
    backoff = Backoff(initial_ms=100, factor=2, max_ms=1000, jitter=0.5)
    assert [backoff.delay_ms(n, 0.5) for n in (1, 2, 3, 4, 5, 5000)] == [100, 200, 400, 800, 1000, 1000]
    assert (backoff.delay_ms(1, 0.0), backoff.delay_ms(1, 1.0)) == (50, 150)


def test_reads_return_before_entries_are_claimed() -> None:
    assert settings(claim_min_idle_ms=300).read_block_ms == 100
    assert settings().read_block_ms == 5_000
    with pytest.raises(InvalidArgument, match=r"block_ms.*at most 100.*claim_min_idle_ms"):
        settings(block_ms=101, claim_min_idle_ms=300)


def test_configured_block_time_is_used() -> None:
    assert settings(block_ms=20_000, claim_interval_ms=50).read_block_ms == 20_000
    assert settings(block_ms=100, claim_min_idle_ms=300).read_block_ms == 100


def test_max_hold_expires_entries() -> None:
    assert settings(claim_min_idle_ms=3000).heartbeat_ms == 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_start", None), ("group_start", "now"), ("count", 0), ("max_deliveries", 0), ("dlq", ""), ("consumer", "")],
)
def test_invalid_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        settings(**{name: value})


def test_fanout_needs_no_group_start() -> None:
    assert settings(group=None, group_start=None).group is None


def test_default_consumer_names_differ_between_processes_with_one_host_and_pid() -> None:
    """Containers that share a host name all run as process 1."""
    code = (
        "import os, socket; os.getpid = lambda: 1; socket.gethostname = lambda: 'vm'; "
        "from millstream.messaging.settings import default_consumer; "
        "assert default_consumer() == default_consumer(); print(default_consumer())"
    )
    names = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith(b"vm-1-") for name in names)


def test_default_consumer_name_changes_in_the_child_of_a_fork() -> None:
    name = default_consumer()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, default_consumer().rpartition("-")[2].encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() != name.rpartition("-")[2]
    os.close(reader)
    os.close(writer)


def test_an_empty_topic_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="topic"):
        check_topic("")
