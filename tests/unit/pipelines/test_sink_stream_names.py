"""Which names of streams the Redis sink writes to, and which make an event a dead letter."""

from __future__ import annotations

import re

import pytest

from millstream.broker.keys import can_have_companions
from millstream.pipelines.sinks.redis import HASH_TAG

NAMES = ["orders", "{shop}.orders", "a{b}c", "o}x", "}", "{}", "{}x}", "{x", "a}b{c}", "{{a}", "{a\n}.b", "{a}}"]


@pytest.mark.parametrize("name", NAMES)
def test_sink_accepts_the_names_that_can_have_companion_keys(name: str) -> None:
    accepted = "}" not in name or re.search(HASH_TAG, name) is not None
    assert accepted == can_have_companions(name.encode())
