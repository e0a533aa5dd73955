"""Commands and events as classes: one handler does a command, every handler hears an event, dependencies are given.

In: pydantic models and typed handlers, checked when they are registered. Out: routes that a Router runs.
Never transport: how messages travel is decided in ``messaging``.
"""

from millstream.cqrs.bus import CommandBus, EventBus, command_topic, event_topic
from millstream.cqrs.handlers import CommandRouter, DuplicateHandler, EventRouter
from millstream.messaging import CannotUnmarshal, Depends, HandlerRefused, Marshaler, PydanticMarshaler

__all__ = [
    "CannotUnmarshal",
    "CommandBus",
    "CommandRouter",
    "Depends",
    "DuplicateHandler",
    "EventBus",
    "EventRouter",
    "HandlerRefused",
    "Marshaler",
    "PydanticMarshaler",
    "command_topic",
    "event_topic",
]
