"""Every parameter of every operation with invalid values: an error names it before a command is sent.

An operation that raises before its first command is rejected on every transport alike, and changes no stream.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.broker import Broker, open_broker
from millstream.broker.context import Context
from millstream.broker.operations import groups, info, pending, plain_keys, streams
from millstream.broker.operations.streams import entries_at
from millstream.broker.scripts.append_once import call as once
from millstream.broker.scripts.append_unique import call as unique
from millstream.broker.scripts.delayed import call as delayed
from millstream.broker.scripts.groups import call as moving
from millstream.broker.scripts.leases import call as leases
from millstream.broker.scripts.recovery import call as recovery
from millstream.broker.scripts.retention import call as retention
from millstream.broker.scripts.settle import Output
from millstream.broker.scripts.settle import call as settle
from millstream.errors import InvalidArgument
from millstream.model import EntryId, TrimPolicy
from millstream.model.policies import Durability, replicated
from millstream.wire.commands import Batch, Command

MODULES = (
    *(groups, info, once, pending, plain_keys, streams),
    *(delayed, moving, leases, recovery, retention, settle, unique),
)
HUGE = 10**5000
"""Python refuses to write such a number as text."""
HALF = "half a character: \ud800"


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no picture of me")


NAMES: tuple[Any, ...] = (None, 5, "", b"", [], {}, HALF, Unshowable(), HUGE)
BAD_IDS = (
    *(None, 5, "", "x", "-1", "1-", "1-2-3", "1-x", "9" * 5000, f"1-{2**64}", str(2**64), HALF, Unshowable(), HUGE),
    *(EntryId(-1, 0), EntryId(0, 2**64), EntryId(HUGE, 0), EntryId(1.5, 0)),  # type: ignore[arg-type]  # on purpose
    *(EntryId("a", "b"), EntryId(None, 1), (1, 2), b"\xff"),  # type: ignore[arg-type]
)
LEFT_TO_SERVERS = (EntryId(-1, 0), EntryId(0, 2**64), EntryId(1.5, 0))  # type: ignore[arg-type]  # on purpose
"""In a list of ids: looking at each would slow down every acknowledgement."""
NUMBERS: tuple[Any, ...] = ("5", b"5", 1.5, -1, True, HUGE, 2**64, Unshowable(), [])
FIELDS: tuple[Any, ...] = (
    *(None, 5, "x", [], {}, [("a", 1)], {"a": None}, {"a": {}}, {"a": []}, {"a": True}, {"a": HUGE}, {"a": HALF}),
    *({5: "x"}, {None: "x"}, {HALF: "x"}, Unshowable()),
)
TRIMS = (
    *("x", 5, {"max_len": 5}, (5, None, False, None), Unshowable(), TrimPolicy(), TrimPolicy(5, EntryId(1, 1))),
    *(TrimPolicy(max_len=bad) for bad in NUMBERS),
    *(TrimPolicy(min_id=bad) for bad in BAD_IDS if bad is not None),  # type: ignore[arg-type]
    *(TrimPolicy(max_len=1, approximate=True, limit=bad) for bad in NUMBERS),
    TrimPolicy(max_len=1, limit=5),
)
LEVELS: tuple[Any, ...] = (
    5,
    "",
    "x",
    "replicated(0)",
    "replicated(x)",
    "replicated(-1)",
    "replicated(²)",
    f"replicated({'9' * 5000})",
    {},
)
NO_LISTS = (None, 5, "ab", b"ab", Unshowable())
NO_PAIRS = (*NO_LISTS, [5], ["ab"], [("a",)], [("a", {"n": 1}, 1)])

GOOD: dict[str, Any] = {
    **dict.fromkeys(
        ("stream", "group", "consumer", "member", "owned", "key", "field", "channel", "value", "writer"), "n"
    ),
    "version": 1,
    "streams": ["a", "b"],
    "fields": {"n": 1},
    "ids": [EntryId(1, 1)],
    "id": EntryId(1, 1),
    "start": "0",
    "position": "0",
    "policy": TrimPolicy(max_len=1),
    "last_id": "1-1",
    "min_idle_ms": 1,
    "ms": 1,
    "payload": "x",
    "name": "n",
    "times_delivered": 1,
    "leaving": 0,
    "delay_ms": 1,
    "letter": {"n": 1},
    "keys": ["k"],
    "ttl_ms": 1,
    "outputs": [Output(EntryId(1, 1), 1, [("t", {"n": 1})])],
    "messages": [("t", {"n": 1})],
    "point": "0",
    "entries": [("e", {"n": 1})],
    "lease_ms": 1,
    "capacity": 1,
    "wanted": [("s", b"1 m")],
    "held": [("s", b"1 m")],
    "record": b"1 m",
    "reason": "x",
    "locks": [b"k"],
}
"""What each parameter may be, by its name; ``OWN`` has those that mean something else in one operation."""
OWN: dict[str, dict[str, Any]] = {
    "xread": {"streams": {"a": "0"}},
    "trim_safely": {"max_len": 5},
    "member_heartbeat": {"owned": 1},
    "delete_consumer": {"to": "other"},
    "xadd_many": {"entries": [{"n": 1}]},
    "append_once": {"entries": [{"n": 1}], "position": 0},
    "dead_letter_announcement": {"fields": {b"n": b"1"}},
}
BY_ANNOTATION: dict[str, tuple[Any, ...]] = {
    "Name": NAMES,
    "Name | None": tuple(bad for bad in NAMES if bad is not None),
    "str": NAMES,
    "Id": BAD_IDS,
    "Id | None": tuple(bad for bad in BAD_IDS if bad is not None),
    "EntryId": BAD_IDS,
    "int": (*NUMBERS, None),
    "int | None": NUMBERS,
    "Fields": FIELDS,
    "Mapping[str, Value]": FIELDS,
    "Mapping[bytes, bytes]": (None, 5, "x", [], {"a": HUGE}, {5: "x"}),
    "Value": (None, True, [], {}, HUGE, HALF, Unshowable()),
    "TrimPolicy | None": TRIMS,
    "TrimPolicy": (None, *TRIMS),
    "Wanted": LEVELS,
    "Sequence[Id] | Id": (*BAD_IDS[:-1], *([bad] for bad in BAD_IDS if bad not in LEFT_TO_SERVERS)),
    "Sequence[Id]": (None, 5, *([bad] for bad in BAD_IDS if bad not in LEFT_TO_SERVERS)),
    "Sequence[EntryId]": (5, "ab", None, *([bad] for bad in BAD_IDS if bad not in LEFT_TO_SERVERS)),
    "Sequence[Name]": (*NO_LISTS, *([bad] for bad in NAMES)),
    "Iterable[Name]": (*NO_LISTS, [], *([bad] for bad in NAMES)),
    "Mapping[str, Id]": (
        None,
        5,
        "ab",
        {},
        ["a"],
        *({"a": bad} for bad in BAD_IDS),
        *({bad: "0"} for bad in (5, "", HALF)),
    ),
    "Sequence[Fields]": (*NO_LISTS, *([bad] for bad in FIELDS), [{"n": 1}, None]),
    "Digest | None": (5, "x", b"x"),
    "Sequence[bytes]": (*NO_LISTS, [5], [None]),
    "Sequence[Output]": (*NO_LISTS, [5], [("a", {"n": 1})], [Output("x", 1, [])], [Output(EntryId(1, 1), -1, [])]),  # type: ignore[arg-type]
    "Sequence[tuple[Name, Fields]]": (*NO_PAIRS, *([("t", bad)] for bad in FIELDS), [(None, {"n": 1})]),
    "Sequence[tuple[str | bytes, Fields]]": (*NO_PAIRS, *([("t", bad)] for bad in FIELDS), [(None, {"n": 1})]),
    "Sequence[tuple[Name, bytes | None]]": (*NO_PAIRS, [("s", 5)], [(5, b"x")]),
    "Sequence[tuple[Name, bytes]]": (*NO_PAIRS, [("s", 5)], [(5, b"x")]),
    "bytes": (5, [], {}),
}
"""Flags are not here: Python takes anything for true or false."""


def operations() -> dict[str, Any]:
    result = {
        name: getattr(module_, name)
        for module_ in MODULES
        for name in vars(Broker)
        if not name.startswith("_") and hasattr(module_, name)
    }
    return {name: result[name] for name in sorted(result)}


def good_arguments(name: str) -> dict[str, Any]:
    own = OWN.get(name, {})
    parameters = list(inspect.signature(operations()[name]).parameters.values())[1:]
    values = {
        parameter.name: own.get(parameter.name, GOOD.get(parameter.name))
        for parameter in parameters
        if (parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL)
        or parameter.name in own
    }
    assert None not in values.values(), f"{name} has a parameter that GOOD does not know: {values}"
    return values


def takes_more(operation: Any) -> bool:
    return any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in inspect.signature(operation).parameters.values()
    )


def first_request(operation: Any, arguments: dict[str, Any]) -> Command | Batch:
    return operation(Context(), **arguments).send(None)  # type: ignore[no-any-return]


def refusal(name: str, arguments: dict[str, Any]) -> InvalidArgument:
    try:
        request = first_request(operations()[name], arguments)
    except InvalidArgument as error:
        return error
    pytest.fail(f"{name} was not refused, and would send {request!r:.200}")


def cases() -> Iterator[tuple[str, str, Any]]:
    for name, operation in operations().items():
        for parameter in list(inspect.signature(operation).parameters.values())[1:]:
            if parameter.kind is parameter.VAR_POSITIONAL or parameter.annotation == "bool":
                continue
            yield name, parameter.name, parameter.annotation


@pytest.mark.parametrize("name", operations())
def test_valid_arguments_are_accepted(name: str) -> None:
    """Otherwise the refusals in the test below would prove nothing."""
    operation, values = operations()[name], good_arguments(name)
    request = (
        operation(Context(), *values.values(), "k").send(None)
        if takes_more(operation)
        else first_request(operation, values)
    )

    words = request.args if isinstance(request, Command) else [word for words in request.commands for word in words]
    assert all(type(word) is bytes for word in words)


@pytest.mark.parametrize(("name", "parameter", "annotation"), list(cases()))
def test_invalid_argument_is_rejected_by_name(name: str, parameter: str, annotation: str) -> None:
    hostile: tuple[Any, ...]
    if parameter in ("start", "end") and name in ("xrange", "xrevrange", "xpending_range", "xautoclaim"):
        hostile = tuple(bad for bad in BAD_IDS if bad not in ("-", "+"))
    else:
        hostile = BY_ANNOTATION[annotation]
    for bad in hostile:
        refused = refusal(name, {**good_arguments(name), parameter: bad})
        assert refused.argument.startswith((parameter, "trim", "fields", "topic", "token")), refused
        assert "Use " in str(refused)


@pytest.mark.parametrize("level", ["nonsense", None, 5])
def test_unknown_durability_is_rejected(level: Any) -> None:
    with pytest.raises(InvalidArgument):
        Durability(level)


def test_number_of_replicas_is_checked() -> None:
    for number in (0, -1, "1", None, 1.5, HUGE):
        with pytest.raises(InvalidArgument):
            replicated(number)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    "options",
    [{"limits": "x"}, {"limits": None}, {"deadline_ms": "x"}, {"max_stream_len": "x"}],
)
def test_open_broker_rejects_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        open_broker("local://", **options)


def test_immediate_xadd_rejects_the_same_arguments() -> None:
    """``xadd`` without options has a fast path over the embedded transport."""

    async def run() -> None:
        async with open_broker("local://") as broker:
            for bad in FIELDS:
                with pytest.raises(InvalidArgument):
                    await broker.xadd("s", bad)
            for name in NAMES:
                with pytest.raises(InvalidArgument):
                    await broker.xadd(name, {"n": 1})
            assert await broker.list_streams() == []

    asyncio.run(run())


def test_server_rejects_an_unchecked_id() -> None:
    async def run() -> None:
        async with open_broker("local://") as broker:
            await broker.create_group("s", "g", start="0")
            for bad in (EntryId(-1, 0), EntryId(0, 2**64)):
                for refused in (
                    broker.xack("s", "g", [bad]),
                    broker.xack("s", "g", [bad], fenced=True, consumer="c"),
                    broker.xdel("s", [bad]),
                    broker.xclaim("s", "g", "c", [EntryId(1, 1), bad], min_idle_ms=0),
                    broker.run(entries_at, "s", [bad]),
                ):
                    with pytest.raises(InvalidArgument, match="id"):
                        await refused

    asyncio.run(run())
