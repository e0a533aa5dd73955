"""Random sequences of stream commands, sent to the engine and to a real Redis: the same replies, byte by byte, except
for times, which are compared with tolerance.

``MILLSTREAM_FUZZ_EXAMPLES=20000`` runs longer. A failure prints its steps and how to replay them; so does
``--hypothesis-seed=N`` with the seed that pytest prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, note, settings
from stream_commands import SPEAKERS, STEPS, STEPS_WITH_WAITS, ending
from stream_pair import StreamPair
from two_servers import Step

from millstream.testing import RedisProcess

EXAMPLES = int(os.environ.get("MILLSTREAM_FUZZ_EXAMPLES", "200"))
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def redis(shared_redis: RedisProcess) -> Iterator[RedisProcess]:
    """A server of this module's own, because its settings are changed. The shared one says whether one can be had."""
    with RedisProcess() as server:
        yield server


@pytest.mark.timeout(0)
@pytest.mark.parametrize("protocol", [2, 3])
@PROFILE
@given(steps=STEPS)
def test_the_same_replies(redis: RedisProcess, protocol: int, steps: list[Step]) -> None:
    with StreamPair(redis.port, connections=1, protocol=protocol) as pair:
        for at, words in [*steps, *ending()]:
            note(f"{words!r}")
            pair.step(at, words)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("protocol", [2, 3])
@PROFILE
@given(steps=STEPS_WITH_WAITS)
def test_the_same_waits(redis: RedisProcess, protocol: int, steps: list[Step]) -> None:
    with StreamPair(redis.port, connections=SPEAKERS, protocol=protocol) as pair:
        for at, words in steps:
            note(f"connection {at}: {words!r}")
            pair.step(at, words)
        pair.end_waits()
        for at, words in ending():
            pair.step(at, words)
