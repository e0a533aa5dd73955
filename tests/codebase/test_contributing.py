"""Makes each change of CONTRIBUTING's table in a copy of the repository, in the listed files only, and runs it.

``test_parts_of_pipelines.py`` adds a sink and a source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.testing import RedisProcess

SOURCE = Path(__file__).parents[2] / "src"

COMMAND = """

@command("GETREV", arity=2, flags=_READ, keys=(1, 1, 1))
def getrev(session: Session, args: Sequence[bytes]) -> Reply:
    value = session.db.read_as(args[1], bytes)
    return None if value is None else value[::-1]
"""

SCRIPT = """-- KEYS stream. ARGV maximum number of ids. Returns the newest ids, oldest first.
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1])
local ids = {}
for at = #newest, 1, -1 do
  ids[#ids + 1] = newest[at][1]
end
return ids
"""

EMULATION = '''
"""The emulation of the script in this folder."""

from millstream.engine.commands.transactions import Call
from millstream.wire import Reply


def newest_ids(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    newest = call(b"XREVRANGE", keys[0], b"+", b"-", b"COUNT", argv[0])
    return [entry[0] for entry in reversed(newest)]
'''

CALL = '''
"""newest_ids: the last entries of a stream, by their ids."""

from millstream.broker.context import Context
from millstream.broker.operations.conversion import Name, entry_id, name_arg
from millstream.broker.scripts.script import run_script, script
from millstream.model import EntryId
from millstream.wire import Operation


def newest_ids(context: Context, stream: Name, count: int) -> Operation[list[EntryId]]:
    reply = yield from run_script(script("newest_ids"), [name_arg(stream, "stream")], [b"%d" % count], repeatable=True)
    return [entry_id(raw) for raw in reply]
'''

MIDDLEWARE = '''
"""Counts messages."""

from millstream.messaging.handler import Handler, Middleware, Output
from millstream.messaging.message import Message


def tally(passed: list[str]) -> Middleware:
    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            passed.append(message.uuid)
            return await handler(message)

        return handle

    return middleware
'''

GREET = '''
"""``millstream greet``: says hello."""

import typer


def command(name: str) -> None:
    typer.echo(f"hello {name}")
'''


class Copy:
    """A copy of the source tree that a test changes."""

    def __init__(self, root: Path) -> None:
        shutil.copytree(SOURCE, root / "src", ignore=shutil.ignore_patterns("__pycache__"))
        self._source = root / "src"
        self._package = self._source / "millstream"

    def add(self, path: str, text: str) -> None:
        file = self._package / path
        assert not file.exists()
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.lstrip("\n"))

    def add_line(self, path: str, after: str, line: str) -> None:
        file = self._package / path
        before = file.read_text()
        assert before.count(after) == 1
        file.write_text(before.replace(after, after + line))

    def run(self, *args: str) -> str:
        """Runs Python on the copy, and returns what it prints."""
        environment = {**os.environ, "PYTHONPATH": str(self._source), "COLUMNS": "80"}
        done = subprocess.run(
            [sys.executable, *args], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_redis_command_is_one_function_in_its_family(copy: Copy) -> None:
    copy.add_line("engine/commands/strings.py", "    return old if options.get else OK\n", COMMAND)
    program = """
from millstream.broker.embedded import Embedded
embedded = Embedded()
session = embedded.session()
embedded.execute(session, [b"SET", b"k", b"abc"])
print(embedded.execute(session, [b"GETREV", b"k"]), embedded.execute(session, [b"GETREV"]))
embedded.close()
"""
    assert copy.run("-c", program) == "b'cba' ERR wrong number of arguments for 'getrev' command"


@pytest.mark.parametrize("kind", ["embedded", "redis"])
def test_a_lua_script_is_one_folder(copy: Copy, kind: str) -> None:
    copy.add("broker/scripts/newest/__init__.py", '"""The newest entries of a stream."""\n')
    copy.add("broker/scripts/newest/newest_ids.lua", SCRIPT)
    copy.add("broker/scripts/newest/emulation.py", EMULATION)
    copy.add("broker/scripts/newest/call.py", CALL)
    program = """
import sys
from millstream import open_blocking_broker
from millstream.broker.scripts.newest.call import newest_ids
with open_blocking_broker(sys.argv[1]) as broker:
    added = [broker.xadd("s", {"n": str(n)}) for n in range(5)]
    assert broker.run(newest_ids, "s", 3) == added[-3:]
    print("the same")
"""
    if kind == "embedded":
        assert copy.run("-c", program, "local://") == "the same"
    else:
        with RedisProcess() as server:
            assert copy.run("-c", program, server.url) == "the same"


def test_a_middleware_is_one_file_and_one_line(copy: Copy) -> None:
    copy.add("messaging/middleware/tally.py", MIDDLEWARE)
    copy.add_line(
        "messaging/middleware/__init__.py",
        "from millstream.messaging.middleware.retry import retry\n",
        "from millstream.messaging.middleware.tally import tally\n",
    )
    program = """
import asyncio
from millstream.messaging import Message
from millstream.messaging.middleware import tally

passed = []

async def handle(message):
    return None

asyncio.run(tally(passed)(handle)(Message(b"x", uuid="m-1")))
print(passed)
"""
    assert copy.run("-c", program) == "['m-1']"


def test_a_command_of_the_command_line_is_one_file_and_one_line(copy: Copy) -> None:
    copy.add("cli/greet.py", GREET)
    copy.add_line("cli/main.py", "CHAPTERS = {\n", '    "greet": Chapter("greet:command", "Say hello.", False),\n')
    assert copy.run("-m", "millstream", "greet", "you") == "hello you"
    assert "greet" in copy.run("-m", "millstream", "--help")
