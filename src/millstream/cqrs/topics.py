"""Which topic and which group a command or an event travels by."""

from __future__ import annotations

from collections.abc import Callable

TopicOf = Callable[[str], str]
"""From a class's name to its topic."""

COMMAND_GROUP = "handlers"
"""The one group of every command's topic: all instances of the one handler share the work."""


def command_topic(name: str) -> str:
    return f"command.{name}"


def event_topic(name: str) -> str:
    return f"event.{name}"
