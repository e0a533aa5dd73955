"""Reads the dependencies of a handler from its signature. A mistake raises an error when the handler is registered, not
when a message arrives.

Pure: a signature goes in, a plan of calls comes out. ``calls.py`` runs the plan.
"""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from millstream.messaging.changes import row_type, type_name
from millstream.messaging.handler import HandlerRefused, annotated_part, callable_place, resolve_signature
from millstream.messaging.message import Message

T = TypeVar("T")


@dataclass(frozen=True)
class Dependency:
    """The marker that ``Depends`` puts into a signature."""

    function: Callable[..., Any]
    use_cache: bool = True


def Depends(function: Callable[..., Any], *, use_cache: bool = True) -> Any:
    """Asks for the result of ``function``: ``db: Annotated[Db, Depends(open_db)]`` or ``db: Db = Depends(open_db)``.

    ``function`` may be sync (it runs in a thread), async, or a generator of either kind that yields once: what follows
    its ``yield`` runs when the handler has ended and before its message is acknowledged, so a failing clean-up counts
    as a failed handler. It may have dependencies itself, and a parameter annotated ``Message``. It is called once per
    message, also if several functions depend on it, unless ``use_cache`` is false.
    """
    return Dependency(function, use_cache)


class Given(Enum):
    """Arguments that come from the message and not from a dependency."""

    BODY = "the command or event itself"
    MESSAGE = "the message that carried it"


class Kind(Enum):
    SYNC = "sync"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"


@dataclass(frozen=True)
class Plan:
    """One function and where each of its arguments comes from."""

    function: Callable[..., Any]
    kind: Kind
    arguments: tuple[tuple[str, Given | Plan], ...]
    use_cache: bool = True


def plan_handler(function: Callable[..., Any]) -> tuple[type, Plan]:
    """The type of command or event that the handler takes, and how to call it.

    Raises HandlerRefused unless exactly one parameter is left for the body, with an annotation that is a class.
    """
    body, plan = _plan(function)
    if body is None:
        raise HandlerRefused(
            callable_place(function), "takes no command or event. Add a parameter annotated with its class."
        )
    return body, plan


def plan_topic_handler(function: Callable[..., Any]) -> tuple[type | None, Plan] | None:
    """As ``plan_handler``, for a handler of a topic, which may also take only the message; then the result is None,
    because no plan is needed."""
    parameters = [
        (parameter, annotation)
        for parameter, annotation, dependency in _parameters(function, refuse=False)
        if dependency is not None or (annotation not in _PLAIN and parameter.default is inspect.Parameter.empty)
    ]
    if not parameters:
        return None
    body, plan = _plan(function, unannotated=Given.MESSAGE)
    if body is not None and body.__module__ == "builtins" and body is not dict:
        why = (
            f"is annotated {type_name(body)}. Take a Message, whose payload holds the bytes; or a body with fields: a "
            "pydantic model, a dataclass, a TypedDict."
        )
        raise HandlerRefused(callable_place(function), why, parameter=parameters[0][0].name)
    return body, plan


def plan_batch_handler(function: Callable[..., Any]) -> tuple[type, Plan]:
    """The type of the items in a batch handler's list (messages, or bodies), and how to call it."""
    item: type | None = None
    arguments: list[tuple[str, Given | Plan]] = []
    for parameter, annotation, dependency in _parameters(function):
        if dependency is not None:
            arguments.append((parameter.name, _plan_dependency(dependency, (function,))))
        elif parameter.default is not inspect.Parameter.empty:
            continue
        else:
            item_type = _item_type(annotation)
            if item_type is None or item is not None:
                why = (
                    "a batch handler takes one list: list[Message], or list[...] of a pydantic model, a dataclass or a "
                    "ChangeEvent."
                )
                raise HandlerRefused(callable_place(function), why, parameter=parameter.name)
            item = item_type
            arguments.append((parameter.name, Given.BODY))
    if item is None:
        raise HandlerRefused(callable_place(function), "takes no list. Add a parameter annotated list[Message].")
    return item, Plan(function, _kind_of_handler(function), tuple(arguments))


def _item_type(annotation: Any) -> type | None:
    if annotation in (list, *_PLAIN[1:]):
        return Message
    if typing.get_origin(annotation) in (list, collections.abc.Sequence):
        (item,) = typing.get_args(annotation)
        if (row := row_type(item)) is not None:
            change: type = item
            return change if _can_be_a_row(row) else None
        return item if isinstance(item, type) and item.__module__ != "builtins" else None
    return None


def _can_be_a_row(row: Any) -> bool:
    """Whether ``ChangeEvent[row]`` can hold rows: objects with fields, unlike a text or a number."""
    kind = typing.get_origin(row) or row
    if isinstance(row, TypeVar) or kind in (object, Message):
        return False
    return kind is dict or getattr(kind, "__module__", "") != "builtins"


_PLAIN = (Message, Any, object, inspect.Parameter.empty)


def _plan(function: Callable[..., Any], unannotated: Given | None = None) -> tuple[type | None, Plan]:
    body: type | None = None
    arguments: list[tuple[str, Given | Plan]] = []
    for parameter, annotation, dependency in _parameters(function):
        if dependency is not None:
            arguments.append((parameter.name, _plan_dependency(dependency, (function,))))
        elif annotation is Message:
            arguments.append((parameter.name, Given.MESSAGE))
        elif unannotated is not None and parameter.default is not inspect.Parameter.empty:
            continue
        elif annotation in _PLAIN and unannotated is not None:
            arguments.append((parameter.name, unannotated))
        elif body is not None:
            if parameter.default is inspect.Parameter.empty:
                raise HandlerRefused(
                    callable_place(function),
                    "a handler takes one command or event; give the other parameters Depends(...) or a default.",
                    parameter=parameter.name,
                )
        else:
            body = _body_type(function, parameter, annotation)
            arguments.append((parameter.name, Given.BODY))
    return body, Plan(function, _kind_of_handler(function), tuple(arguments))


def _kind_of_handler(function: Callable[..., Any]) -> Kind:
    kind = _kind_of(function)
    if kind in (Kind.GENERATOR, Kind.ASYNC_GENERATOR):
        raise HandlerRefused(
            callable_place(function), "a handler returns, it does not yield. Use a plain or async function."
        )
    return kind


def plan_dependency(function: Callable[..., Any], *, use_cache: bool = True) -> Plan:
    return _plan_dependency(Dependency(function, use_cache), ())


def _plan_dependency(dependency: Dependency, asked_by: tuple[Callable[..., Any], ...]) -> Plan:
    function = dependency.function
    if not callable(function):
        raise HandlerRefused(
            callable_place(asked_by[-1]), f"Depends({function!r}) is not callable. Pass the function itself."
        )
    if function in asked_by:
        circle = " -> ".join(callable_place(asking) for asking in (*asked_by[asked_by.index(function) :], function))
        raise HandlerRefused(callable_place(function), f"depends on itself: {circle}. Break the circle.")
    arguments: list[tuple[str, Given | Plan]] = []
    for parameter, annotation, nested in _parameters(function):
        if nested is not None:
            arguments.append((parameter.name, _plan_dependency(nested, (*asked_by, function))))
        elif annotation is Message:
            arguments.append((parameter.name, Given.MESSAGE))
        elif parameter.default is inspect.Parameter.empty:
            raise HandlerRefused(
                callable_place(function),
                "a dependency's parameter needs Depends(...), the annotation Message, or a default.",
                parameter=parameter.name,
            )
    return Plan(function, _kind_of(function), tuple(arguments), dependency.use_cache)


def _parameters(
    function: Callable[..., Any], *, refuse: bool = True
) -> list[tuple[inspect.Parameter, Any, Dependency | None]]:
    """Each parameter that can be given by name, with its bare annotation and the dependency that it asks for."""
    signature, hints = resolve_signature(function)
    parameters: list[tuple[inspect.Parameter, Any, Dependency | None]] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and refuse:
            raise HandlerRefused(
                callable_place(function), "is positional-only. Remove the '/'.", parameter=parameter.name
            )
        annotation = hints.get(parameter.name, inspect.Parameter.empty)
        dependency = parameter.default if isinstance(parameter.default, Dependency) else None
        if typing.get_origin(annotation) is typing.Annotated:
            annotation, *extras = typing.get_args(annotation)
            dependency = next((extra for extra in extras if isinstance(extra, Dependency)), dependency)
        parameters.append((parameter, annotation, dependency))
    return parameters


def _body_type(function: Callable[..., Any], parameter: inspect.Parameter, annotation: Any) -> type:
    if annotation is inspect.Parameter.empty:
        raise HandlerRefused(
            callable_place(function),
            "has no annotation, so it is unknown which messages it handles. "
            "Annotate it with the class of the command or event.",
            parameter=parameter.name,
        )
    if (row := row_type(annotation)) is not None:
        if not _can_be_a_row(row):
            raise HandlerRefused(
                callable_place(function),
                f"no row of a change event is a {type_name(row)}. Use ChangeEvent[...] of a pydantic model, a "
                "dataclass, a TypedDict or a dict.",
                parameter=parameter.name,
            )
        change: type = annotation
        return change
    if not isinstance(annotation, type) or annotation is Any or annotation is object:
        raise HandlerRefused(
            callable_place(function),
            f"{annotation!r} is not the class of a command or event. Annotate it with one class.",
            parameter=parameter.name,
        )
    return annotation


def _kind_of(function: Callable[..., Any]) -> Kind:
    part = annotated_part(function) if not inspect.isclass(function) else function
    if inspect.isasyncgenfunction(part):
        return Kind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(part):
        return Kind.GENERATOR
    if inspect.iscoroutinefunction(part):
        return Kind.ASYNC
    return Kind.SYNC
