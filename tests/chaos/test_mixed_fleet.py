"""Members in Go and in Python share one load-balancer stream while members are killed: each stream has one owner.

The Go side is the published module of the client itself, fetched from the Go module proxy when this runs. Where Go, or
the module, cannot be had, this is skipped and says so; the bytes that both sides write and read are held by
tests/conformance/test_assignment.py everywhere.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millstream import Broker, open_broker
from millstream.assignment import Announcement, AssignmentClient, Settings
from millstream.testing import RedisProcess, eventually

MODULE = "github.com/handcoding-labs/redis-stream-client-go"
VERSION = os.environ.get("GO_CLIENT_VERSION", "latest")
PROGRAM = Path(__file__).parent / "go_member"
SETTINGS = Settings(lease_ms=3_000, renew_interval_ms=500, sweep_interval_ms=100)
STREAMS = [f"session{n}" for n in range(12)]
ROUNDS = max(1, int(os.environ.get("TRIALS", "2")))


@pytest.fixture(scope="module")
def go_member(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built against the published module."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("Go is not on this machine")
    place = tmp_path_factory.mktemp("go_member")
    for path in PROGRAM.iterdir():
        shutil.copy(path, place)
    for words in (["get", f"{MODULE}@{VERSION}"], ["mod", "tidy"]):
        fetched = subprocess.run([go, *words], cwd=place, capture_output=True, text=True, timeout=300, check=False)
        if fetched.returncode != 0:
            pytest.skip(f"the Go module cannot be fetched: {fetched.stderr.strip().splitlines()[-1]}")
    built = subprocess.run([go, "build", "-o", "member", "."], cwd=place, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return place / "member"


@asynccontextmanager
async def go_process(program: Path, server: RedisProcess, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A member in Go that has joined. It is ended by SIGKILL, so it reports nothing."""
    process = await asyncio.create_subprocess_exec(
        *(str(program), f"127.0.0.1:{server.port}", "mixed"),
        env={**os.environ, "POD_NAME": name},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    first_line = await asyncio.wait_for(process.stdout.readline(), 60)
    assert b'"ready"' in first_line, f"{name} did not join: {first_line!r}"
    reading = asyncio.create_task(process.stdout.read())
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def holders(broker: Broker) -> dict[str, set[str]]:
    """Each announced stream, and the owners of its locks, under any of its announcements."""
    result: dict[str, set[str]] = {}
    for entry in await broker.xrange("mixed-input"):
        stream = Announcement.parse(entry.fields).stream
        holder = await broker.get(f"{stream}<MUTEX_KEY_SEP>{entry.id}")
        result.setdefault(stream, set()).update({holder.decode()} if holder else set())
    return result


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_every_announced_stream_has_one_owner_while_members_of_both_kinds_are_killed(go_member: Path) -> None:
    # The Go client sets notify-keyspace-events by itself, and refuses a server where it is set already.
    with RedisProcess() as server:
        async with open_broker(server.url) as broker:
            members: list[AssignmentClient] = []
            tasks: list[asyncio.Task[None]] = []

            async def drain(client: AssignmentClient) -> None:
                async for _ in client.start():
                    pass

            def join(name: str) -> None:
                client = AssignmentClient(broker, "mixed", member=name, settings=SETTINGS)
                members.append(client)
                tasks.append(asyncio.create_task(drain(client)))

            async def one_owner_each(go: asyncio.subprocess.Process) -> bool:
                assert go.returncode is None, f"the Go member ended with {go.returncode}"
                held = await holders(broker)
                for stream, names in held.items():
                    owners = [client.id for client in members if stream in client.owned]
                    assert len(owners) <= 1, f"{stream} is owned by {owners}"
                    if owners and names and not names <= set(owners):
                        return False  # on its way from one to the other
                return set(held) == set(STREAMS) and all(len(names) == 1 for names in held.values())

            join("py-0")
            await eventually(lambda: members[0].ready, what="the first member has made the group")
            async with go_process(go_member, server, "go-0") as go:
                for stream in STREAMS:
                    await members[0].announce(stream)
                await eventually(lambda: one_owner_each(go), what="each stream has one owner", timeout_s=120)
                # Without an owner in Go, members in Python alone would pass this test.
                assert not set.union(*(await holders(broker)).values()) <= {client.id for client in members}
            for number in range(1, ROUNDS + 1):
                async with go_process(go_member, server, f"go-{number}") as go:
                    join(f"py-{number}")
                    dying = members.pop(0)
                    for task in dying._tasks:
                        task.cancel()
                    await eventually(
                        lambda go=go: one_owner_each(go),  # type: ignore[misc]
                        what="one owner each after both kinds died",
                        timeout_s=120,
                    )
            for client in members:
                await client.close()
            await asyncio.gather(*tasks, return_exceptions=True)
