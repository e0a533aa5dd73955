"""Handlers receive their dependencies, each made once per message, and clean-up runs before the outcome is known.

No ``from __future__ import annotations`` here: classes inside tests could not be resolved by name.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import pytest

from millstream.messaging.calls import call
from millstream.messaging.dependencies import Depends, plan_handler
from millstream.messaging.handler import HandlerRefused
from millstream.messaging.message import Message


@dataclass
class Ping:
    number: int


def settings() -> dict[str, str]:
    return {"currency": "EUR"}


async def run(handler: Any, body: object = None, overrides: Any = None) -> Any:
    _, plan = plan_handler(handler)
    return await call(plan, body if body is not None else Ping(1), Message(b"raw", {"tenant": "a"}), overrides)


# --- registration -----------------------------------------------------------------------------------------------------


def test_the_body_is_the_one_annotated_parameter_without_a_dependency() -> None:
    async def handler(message: Message, ping: Ping, config: Annotated[dict[str, str], Depends(settings)]) -> None: ...

    body, _ = plan_handler(handler)
    assert body is Ping


def untyped(ping):  # type: ignore[no-untyped-def]
    ...


def unresolvable(ping: "Nowhere") -> None:  # type: ignore[name-defined] # noqa: F821 (the point of it)
    ...


def takes_two(first: Ping, two: Ping) -> None: ...


def takes_none() -> None: ...


def takes_only_the_message(message: Message) -> None: ...


def takes_a_union(ping: Ping | None) -> None: ...


def takes_anything(ping: Any) -> None: ...


def positional_only(ping: Ping, /) -> None: ...


def yields(ping: Ping) -> Iterator[int]:
    yield 1


def needs_more(what: int) -> int:
    return what


def bad_dependency(ping: Ping, value: Annotated[int, Depends(needs_more)]) -> None: ...


def not_callable(ping: Ping, value: Annotated[int, Depends(3)]) -> None: ...  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (untyped, "'ping'.*no annotation"),
        (unresolvable, "cannot be resolved.*Nowhere"),
        (takes_two, "'two'.*takes one command"),
        (takes_none, "takes no command"),
        (takes_only_the_message, "takes no command"),
        (takes_a_union, "not the class"),
        (takes_anything, "not the class"),
        (positional_only, "positional-only"),
        (yields, "does not yield"),
        (bad_dependency, "'what'.*Depends"),
        (not_callable, "not callable"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_handler_that_cannot_be_called_is_refused_and_its_place_is_named(handler: Any, says: str) -> None:
    with pytest.raises(HandlerRefused, match=says) as caught:
        plan_handler(handler)
    culprit = "needs_more" if handler is bad_dependency else handler.__name__
    assert culprit in caught.value.place
    assert "line" in caught.value.place


def test_a_circle_of_dependencies_is_refused() -> None:
    def first(second: Any = None) -> None: ...

    def other(value: Annotated[Any, Depends(first)]) -> None: ...

    first.__defaults__ = (Depends(other),)

    def handler(ping: Ping, value: Annotated[Any, Depends(first)]) -> None: ...

    with pytest.raises(HandlerRefused, match="depends on itself"):
        plan_handler(handler)


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_dependencies_are_nested_and_called_once_a_message() -> None:
    made: list[str] = []

    def config() -> str:
        made.append("config")
        return "config"

    async def database(config: Annotated[str, Depends(config)]) -> str:
        made.append("database")
        return f"database({config})"

    class Repository:
        def __init__(self, database: Annotated[str, Depends(database)], config: str = Depends(config)) -> None:
            made.append("repository")
            self.database = database

    async def handler(
        ping: Ping,
        repository: Annotated[Repository, Depends(Repository)],
        database: Annotated[str, Depends(database)],
        limit: int = 7,
    ) -> tuple[int, str, str, int]:
        return ping.number, repository.database, database, limit

    assert await run(handler, Ping(5)) == (5, "database(config)", "database(config)", 7)
    assert made == ["config", "database", "repository"]
    await run(handler)
    assert len(made) == 6


async def test_a_dependency_without_cache_is_called_each_time() -> None:
    count = iter(range(10))

    def number() -> int:
        return next(count)

    def handler(
        ping: Ping,
        first: Annotated[int, Depends(number, use_cache=False)],
        two: Annotated[int, Depends(number, use_cache=False)],
    ) -> tuple[int, int]:
        return first, two

    assert await run(handler) == (0, 1)


async def test_sync_functions_run_in_a_thread() -> None:
    def where() -> int:
        return threading.get_ident()

    def handler(ping: Ping, dependency: Annotated[int, Depends(where)]) -> set[int]:
        return {threading.get_ident(), dependency}

    assert threading.get_ident() not in await run(handler)


async def test_a_dependency_may_ask_for_the_message() -> None:
    def tenant(message: Message) -> str:
        return message.metadata["tenant"]

    async def handler(ping: Ping, tenant: Annotated[str, Depends(tenant)]) -> str:
        return tenant

    assert await run(handler) == "a"


async def test_callable_objects_and_partials_are_dependencies_too() -> None:
    class Pool:
        async def __call__(self) -> str:
            return "from the pool"

    def named(name: str = "") -> str:
        return name

    async def handler(
        ping: Ping, first: Annotated[str, Depends(Pool())], two: Annotated[str, Depends(partial(named, name="x"))]
    ) -> tuple[str, str]:
        return first, two

    assert await run(handler) == ("from the pool", "x")


async def test_generators_clean_up_in_reverse_after_the_handler() -> None:
    steps: list[str] = []

    async def connection() -> AsyncIterator[str]:
        steps.append("connect")
        yield "connection"
        steps.append("disconnect")

    def transaction(connection: Annotated[str, Depends(connection)]) -> Iterator[str]:
        steps.append("begin")
        yield f"transaction({connection})"
        steps.append("commit")

    async def handler(ping: Ping, transaction: Annotated[str, Depends(transaction)]) -> None:
        steps.append(f"handle {transaction}")

    await run(handler)
    assert steps == ["connect", "begin", "handle transaction(connection)", "commit", "disconnect"]


async def test_a_generator_sees_the_handlers_failure() -> None:
    steps: list[str] = []

    async def transaction() -> AsyncIterator[None]:
        try:
            yield
            steps.append("commit")
        except OSError:
            steps.append("rollback")
            raise

    async def handler(ping: Ping, transaction: Annotated[None, Depends(transaction)]) -> None:
        raise OSError("down")

    with pytest.raises(OSError, match="down"):
        await run(handler)
    assert steps == ["rollback"]


async def test_a_dependency_that_swallows_the_error_does_not_make_it_a_success() -> None:
    async def careless() -> AsyncIterator[None]:
        try:
            yield
        except OSError:
            pass

    async def handler(ping: Ping, careless: Annotated[None, Depends(careless)]) -> None:
        raise OSError("down")

    with pytest.raises(OSError, match="down"):
        await run(handler)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_failing_clean_up_is_the_handlers_failure(kind: str) -> None:
    def sync() -> Iterator[None]:
        yield
        raise OSError("commit failed")

    async def asynchronous() -> AsyncIterator[None]:
        yield
        raise OSError("commit failed")

    async def handler(ping: Ping, it: Annotated[None, Depends(sync if kind == "sync" else asynchronous)]) -> None: ...

    with pytest.raises(OSError, match="commit failed"):
        await run(handler)


async def test_clean_up_runs_when_the_handler_is_cancelled() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def resource() -> AsyncIterator[None]:
        try:
            yield
        finally:
            cleaned.set()

    async def handler(ping: Ping, resource: Annotated[None, Depends(resource)]) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run(handler))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


async def test_dependencies_can_be_overridden_in_tests() -> None:
    def database() -> str:
        raise AssertionError("not in a test")

    def prefix() -> str:
        return "fake "

    def fake(prefix: Annotated[str, Depends(prefix)]) -> str:
        return prefix + "database"

    def repository(database: Annotated[str, Depends(database)]) -> str:
        return f"repository({database})"

    async def handler(ping: Ping, repository: Annotated[str, Depends(repository)]) -> str:
        return repository

    assert await run(handler, overrides={database: fake}) == "repository(fake database)"
