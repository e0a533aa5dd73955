"""Runs the conformance kit against a server without pytest's runner: ``millstream verify`` and people's own scripts.

Every test gets a stream of its own in a namespace of the run, and whatever lies in that namespace is deleted at the
end: a server that others use is left as it was found.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from millstream.broker import Broker, list_keys, open_broker, server_setting
from millstream.errors import MillstreamError
from millstream.testing.conformance import CHAPTERS, DurabilityChapter

__all__ = ["PromiseResult", "verify_server"]

TEST_TIMEOUT_S = 30.0
"""A server that holds a test for longer than this does not behave."""


class PromiseResult(NamedTuple):
    """One test. ``failure`` is None where the server behaves; ``skipped`` says why it was not asked."""

    chapter: str
    test: str
    failure: str | None = None
    skipped: str | None = None


class _Case(NamedTuple):
    chapter: type
    name: str
    arguments: dict[str, Any]

    @property
    def title(self) -> str:
        """``AppendOnceChapter`` as people read it."""
        return re.sub(r"(?<!^)(?=[A-Z])", " ", self.chapter.__name__.removesuffix("Chapter")).lower()

    @property
    def sentence(self) -> str:
        """``test_ids_only_grow`` as people read it."""
        shown = self.name.removeprefix("test_").replace("_", " ")
        given = ", ".join(repr(value) for value in self.arguments.values())
        return f"{shown} [{given}]" if given else shown


def cases(chapters: Sequence[type] = CHAPTERS) -> Iterator[_Case]:
    """Every test of the kit, once for each set of its parameters."""
    for chapter in chapters:
        for name, function in inspect.getmembers(chapter, inspect.isfunction):
            if name.startswith("test_"):
                for arguments in _parameters(function):
                    yield _Case(chapter, name, arguments)


def _parameters(function: Any) -> Iterator[dict[str, Any]]:
    """What ``pytest.mark.parametrize`` says, multiplied out."""
    sets = []
    for mark in getattr(function, "pytestmark", ()):
        names = [name.strip() for name in mark.args[0].split(",")]
        values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
        sets.append([dict(zip(names, value, strict=True)) for value in values])
    for chosen in itertools.product(*sets):
        yield {name: value for one in chosen for name, value in one.items()}


async def verify_server(url: str, *, prefix: str = "millstream:verify") -> AsyncIterator[PromiseResult]:
    """Asks the server everything, one verdict at a time. Raises BrokerUnavailable where none answers."""
    namespace = f"{prefix}:{uuid4().hex[:8]}"
    async with open_broker(url) as broker:
        await broker.ping()
        unasked = await _durability_is_not_memory(broker)
        try:
            for number, case in enumerate(cases()):
                if case.chapter is DurabilityChapter and unasked:
                    yield PromiseResult(case.title, case.sentence, skipped=unasked)
                    continue
                async with open_broker(url) as own:  # some tests close theirs
                    failure = await _ask(own, case, f"{namespace}:{number}")
                yield PromiseResult(case.title, case.sentence, failure)
        finally:
            await _tidy(broker, namespace)


async def _ask(broker: Broker, case: _Case, stream: str) -> str | None:
    test = getattr(case.chapter(), case.name)
    given = {"broker": broker, "stream": stream} | case.arguments
    wanted = {name: given[name] for name in inspect.signature(test).parameters}
    try:
        await asyncio.wait_for(test(**wanted), TEST_TIMEOUT_S)
    except (Exception, _pytest_failure()) as error:
        return _reason(error)
    return None


def _pytest_failure() -> type[BaseException]:
    """What ``pytest.raises`` raises where nothing was raised: no Exception, so that tests do not catch it."""
    import pytest

    return pytest.fail.Exception


def _reason(error: BaseException) -> str:
    """What was expected and did not hold: the failed line of the test, and what the server said."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "conformance" in frame.filename]
    line = (frames[-1].line or "").strip() if frames else ""
    said = " ".join(f"{type(error).__name__}: {error}".split()) if str(error) else type(error).__name__
    return f"{line}  ({said})" if line else said


async def _durability_is_not_memory(broker: Broker) -> str | None:
    """That chapter is for a server without an append-only file and without replicas; why this is none."""
    try:
        appends = await broker.run(server_setting, "appendonly")
        replicas = int((await broker.server_info("replication")).get("connected_slaves", 0))
    except MillstreamError:
        return "the server does not tell its durability"
    if appends == "yes":
        return "the server keeps an append-only file"
    return f"the server has {replicas} replicas" if replicas else None


async def _tidy(broker: Broker, namespace: str) -> None:
    for key in await broker.run(list_keys, f"*{namespace}*"):
        await broker.delete(key)
