"""Commands and events as classes: a command has one handler, an event any number; handlers declare dependencies.

Messages are pydantic models, and typed handlers are checked when they are registered. A bus turns its handlers into
routes that a Router of ``messaging`` runs.
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
