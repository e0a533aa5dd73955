"""What may be registered as a handler: checked when it is registered, with an error that names its place."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from millstream.errors import MillstreamError
from millstream.messaging.handler import Handler, Output
from millstream.messaging.message import Message
from millstream.messaging.place import place_of
from millstream.messaging.threads import in_thread


class HandlerRefused(MillstreamError):
    """A handler or a dependency cannot be called as its signature stands. Raised when it is registered.

    ``place`` names the function, ``parameter`` the parameter at fault, where it is one.
    """

    place: str
    parameter: str | None

    def __init__(self, place: str, why: str, *, parameter: str | None = None) -> None:
        at = f"{place}, parameter {parameter!r}" if parameter is not None else place
        super().__init__(f"{at}: {why}", place=place, parameter=parameter)


def resolve(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """A function's signature and its annotations as objects. Raises HandlerRefused where they cannot be resolved."""
    try:
        return inspect.signature(function), typing.get_type_hints(annotated_part(function), include_extras=True)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise HandlerRefused(
            place_of(function),
            f"its signature cannot be resolved: {error}. Annotations must name classes that its module can see.",
        ) from error


def annotated_part(function: Callable[..., Any]) -> Any:
    """Where the annotations are: a class's are on ``__init__``, a callable object's on ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    if inspect.isclass(function):
        return function.__init__
    return function if inspect.isroutine(function) else type(function).__call__


def message_handler(function: Callable[..., Any]) -> Handler:
    """The function as a handler of messages: it takes one Message. A sync one runs in a thread.

    An annotation may be left out here, because there is nothing else that it could be.
    """
    if not callable(function):
        raise HandlerRefused(repr(function), "is not callable. Register a function that takes a Message.")
    signature, hints = resolve(function)
    required = [
        each
        for each in signature.parameters.values()
        if each.default is inspect.Parameter.empty
        and each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if not signature.parameters or len(required) > 1 or any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in required):
        raise HandlerRefused(place_of(function), f"takes {signature}. A handler takes one Message.")
    first = next(iter(signature.parameters.values()))
    annotation = hints.get(first.name, Message)
    if annotation not in (Message, Any, object):
        shown = getattr(annotation, "__name__", annotation)
        why = f"is annotated {shown}. A router's handler takes a Message; for typed bodies use a command or event bus."
        raise HandlerRefused(place_of(function), why, parameter=first.name)
    part = annotated_part(function)
    if inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part):
        raise HandlerRefused(place_of(function), "a handler returns, it does not yield. Return a list of messages.")
    if inspect.iscoroutinefunction(part):
        return function

    @wraps(function)
    async def threaded(message: Message) -> Output:
        return await in_thread(function, message)

    return threaded
