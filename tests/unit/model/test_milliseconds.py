"""One way to give a time in Python: milliseconds, in options whose names say so; the old ones still work, and warn."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from millstream import Router, open_broker
from millstream.cqrs import CommandBus, EventBus
from millstream.errors import InvalidArgument
from millstream.messaging import Janitor, RetentionPolicy, circuit_breaker, deduplicate, retry, throttle, timeout
from millstream.model import milliseconds
from millstream.runner import lifespan

broker = open_broker("local://units")


def janitor(**options: Any) -> Janitor:
    return Janitor(broker, {"orders": RetentionPolicy(max_len=1)}, **options)


OLD: list[tuple[Callable[..., Any], str]] = [
    (retry, "initial_interval"),
    (retry, "max_interval"),
    (retry, "max_elapsed_time"),
    (lambda **options: throttle(5, **options), "per"),
    (timeout, "limit"),
    (deduplicate, "window"),
    (circuit_breaker, "reset_after"),
    (Router, "close_timeout"),
    (lambda **options: CommandBus(broker, **options), "close_timeout"),
    (lambda **options: EventBus(broker, service="s", group_start="0", **options), "close_timeout"),
    (lifespan, "close_timeout"),
    (janitor, "interval"),
    (janitor, "dead_after"),
]


@pytest.mark.parametrize(("make", "name"), OLD, ids=lambda value: value if isinstance(value, str) else "")
def test_seconds_work_for_one_release_and_say_what_to_write(make: Callable[..., Any], name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name} in seconds goes with the next release: use {name}_ms"):
        make(**{name: 1.5})
    with pytest.raises(InvalidArgument, match=f"{name}_ms: 5 .* alone, without {name}"):
        make(**{name: 1.5, f"{name}_ms": 5})
    with pytest.raises(InvalidArgument, match=f"{name}_ms"):
        make(**{f"{name}_ms": 1.5})
    make(**{f"{name}_ms": 1_500})


def test_what_comes_of_them() -> None:
    assert milliseconds("per", None, 7) == 7
    assert milliseconds("per", 5, 7) == 5
    for old in (1.5, timedelta(seconds=1.5)):
        with pytest.warns(DeprecationWarning, match="per_ms"):
            assert milliseconds("per", None, 7, old) == 1_500
    with pytest.warns(DeprecationWarning, match="per_ms"):
        assert milliseconds("per", None, 7, 0.0001, least=1) == 1
    for bad in (-1, float("nan"), float("inf"), True):
        with pytest.warns(DeprecationWarning, match="per_ms"), pytest.raises(InvalidArgument, match="per"):
            milliseconds("per", None, 7, bad)
