"""Runs the conformance kit against a server without pytest's runner, for ``millstream verify`` and scripts of users.

Every test gets its own stream in a namespace of the run. All keys of the namespace are deleted at the end, so that a
shared server can be verified.
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

from millstream.broker import Broker, open_broker
from millstream.broker.operations.info import list_keys, server_setting
from millstream.errors import MillstreamError
from millstream.testing.conformance import CHAPTERS, DurabilityChapter

__all__ = ["PromiseResult", "verify_server"]

TEST_TIMEOUT_S = 30.0
"""A test that takes longer fails."""


class PromiseResult(NamedTuple):
    """The result of one test. ``failure`` is None if it passed; ``skipped`` is the reason why it did not run."""

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
        """``AppendOnceChapter`` as words."""
        return re.sub(r"(?<!^)(?=[A-Z])", " ", self.chapter.__name__.removesuffix("Chapter")).lower()

    @property
    def sentence(self) -> str:
        """``test_ids_only_grow`` as words, with the parameters."""
        words = self.name.removeprefix("test_").replace("_", " ")
        parameters = ", ".join(repr(value) for value in self.arguments.values())
        return f"{words} [{parameters}]" if parameters else words


def cases(chapters: Sequence[type] = CHAPTERS) -> Iterator[_Case]:
    """Yields every test of the kit, once for each combination of its parameters."""
    for chapter in chapters:
        for name, function in inspect.getmembers(chapter, inspect.isfunction):
            if name.startswith("test_"):
                for arguments in _parameters(function):
                    yield _Case(chapter, name, arguments)


def _parameters(function: Any) -> Iterator[dict[str, Any]]:
    """Yields all combinations of the test's ``pytest.mark.parametrize`` values."""
    sets = []
    for mark in getattr(function, "pytestmark", ()):
        names = [name.strip() for name in mark.args[0].split(",")]
        values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
        sets.append([dict(zip(names, value, strict=True)) for value in values])
    for chosen in itertools.product(*sets):
        yield {name: value for parameters in chosen for name, value in parameters.items()}


async def verify_server(url: str, *, prefix: str = "millstream:verify") -> AsyncIterator[PromiseResult]:
    """Runs all tests and yields their results. Raises BrokerUnavailable if the server does not answer."""
    namespace = f"{prefix}:{uuid4().hex[:8]}"
    async with open_broker(url) as broker:
        await broker.ping()
        skip_reason = await _durability_skip_reason(broker)
        try:
            for number, case in enumerate(cases()):
                if case.chapter is DurabilityChapter and skip_reason:
                    yield PromiseResult(case.title, case.sentence, skipped=skip_reason)
                    continue
                async with open_broker(url) as own:  # some tests close theirs
                    failure = await _run_case(own, case, f"{namespace}:{number}")
                yield PromiseResult(case.title, case.sentence, failure)
        finally:
            await _delete_namespace(broker, namespace)


async def _run_case(broker: Broker, case: _Case, stream: str) -> str | None:
    test = getattr(case.chapter(), case.name)
    available = {"broker": broker, "stream": stream} | case.arguments
    arguments = {name: available[name] for name in inspect.signature(test).parameters}
    try:
        await asyncio.wait_for(test(**arguments), TEST_TIMEOUT_S)
    except (Exception, _pytest_failure()) as error:  # the case failed, however it did
        return _reason(error)
    return None


def _pytest_failure() -> type[BaseException]:
    """The exception of a failed ``pytest.raises``. It is no ``Exception``, so that tests do not catch it."""
    import pytest

    return pytest.fail.Exception


def _reason(error: BaseException) -> str:
    """The failed line of the test, and the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "conformance" in frame.filename]
    line = (frames[-1].line or "").strip() if frames else ""
    error_text = " ".join(f"{type(error).__name__}: {error}".split()) if str(error) else type(error).__name__
    return f"{line}  ({error_text})" if line else error_text


async def _durability_skip_reason(broker: Broker) -> str | None:
    """Why the durability chapter does not apply. It needs a server without append-only file and without replicas."""
    try:
        appends = await broker.run(server_setting, "appendonly")
        replicas = int((await broker.server_info("replication")).get("connected_slaves", 0))
    except MillstreamError:
        return "the server does not report its durability settings"
    if appends == "yes":
        return "the server keeps an append-only file"
    return f"the server has {replicas} replicas" if replicas else None


async def _delete_namespace(broker: Broker, namespace: str) -> None:
    for key in await broker.run(list_keys, f"*{namespace}*"):
        await broker.delete(key)
