"""Durations in Python are whole milliseconds, in options whose names end in ``_ms``."""

from __future__ import annotations

from collections.abc import Callable
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


OPTIONS: list[tuple[Callable[..., Any], str]] = [
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


@pytest.mark.parametrize(("make", "name"), OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_duration_is_a_whole_number_of_milliseconds(make: Callable[..., Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}_ms"):
        make(**{f"{name}_ms": 1.5})
    make(**{f"{name}_ms": 1_500})


def test_the_default_applies_where_no_value_is_given() -> None:
    assert milliseconds("per", None, 7) == 7
    assert milliseconds("per", 5, 7) == 5
    with pytest.raises(InvalidArgument, match="per_ms"):
        milliseconds("per", 0, 7, least=1)
