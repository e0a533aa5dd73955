"""CONTRIBUTING's table is true: each change is made in a copy of the house, in those files alone, and then it works.

A sink and a source are made in ``test_parts_of_pipelines.py``.
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

SCRIPT = """-- KEYS stream. ARGV how many at most. Answers with the newest ids, the oldest of them first.
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1])
local answer = {}
for at = #newest, 1, -1 do
  answer[#answer + 1] = newest[at][1]
end
return answer
"""

TWIN = '''
"""The twin of the script in this folder."""

from millstream.engine import Call
from millstream.wire import Reply


def newest_ids(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    newest = call(b"XREVRANGE", keys[0], b"+", b"-", b"COUNT", argv[0])
    return [entry[0] for entry in reversed(newest)]
'''

CALL = '''
"""newest_ids: the last entries of a stream, by their ids."""

from millstream.broker.context import Context
from millstream.broker.operations.conversion import Name, entry_id, name_word
from millstream.broker.steps.script import run_script, script
from millstream.model import EntryId
from millstream.wire import Conversation


def newest_ids(context: Context, stream: Name, count: int) -> Conversation[list[EntryId]]:
    reply = yield from run_script(script("newest_ids"), [name_word(stream, "stream")], [b"%d" % count], repeatable=True)
    return [entry_id(raw) for raw in reply]
'''

MIDDLEWARE = '''
"""Counts what passes."""

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

TYPED = '''
"""``millstream greet``: says hello."""

import typer


def command(name: str) -> None:
    typer.echo(f"hello {name}")
'''


class House:
    """A copy of the product, to be changed."""

    def __init__(self, root: Path) -> None:
        shutil.copytree(SOURCE, root / "src", ignore=shutil.ignore_patterns("__pycache__"))
        self._source = root / "src"
        self._rooms = self._source / "millstream"

    def add(self, path: str, text: str) -> None:
        at = self._rooms / path
        assert not at.exists()
        at.parent.mkdir(exist_ok=True)
        at.write_text(text.lstrip("\n"))

    def add_line(self, path: str, after: str, line: str) -> None:
        at = self._rooms / path
        before = at.read_text()
        assert before.count(after) == 1
        at.write_text(before.replace(after, after + line))

    def run(self, *words: str) -> str:
        """What Python prints, with this house as its millstream."""
        environment = {**os.environ, "PYTHONPATH": str(self._source), "COLUMNS": "80"}
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_redis_command_is_one_function_in_its_family(house: House) -> None:
    house.add_line("engine/commands/strings.py", "    return old if options.get else OK\n", COMMAND)
    asked = """
from millstream.broker.embedded import Embedded
embedded = Embedded()
session = embedded.session()
embedded.execute(session, [b"SET", b"k", b"abc"])
print(embedded.execute(session, [b"GETREV", b"k"]), embedded.execute(session, [b"GETREV"]))
embedded.close()
"""
    assert house.run("-c", asked) == "b'cba' ERR wrong number of arguments for 'getrev' command"


@pytest.mark.parametrize("kind", ["embedded", "redis"])
def test_an_atomic_step_is_one_folder(house: House, kind: str) -> None:
    house.add("broker/steps/newest/__init__.py", '"""The newest entries of a stream."""\n')
    house.add("broker/steps/newest/newest_ids.lua", SCRIPT)
    house.add("broker/steps/newest/twin.py", TWIN)
    house.add("broker/steps/newest/call.py", CALL)
    asked = """
import sys
from millstream import open_blocking_broker
from millstream.broker.steps.newest.call import newest_ids
with open_blocking_broker(sys.argv[1]) as broker:
    added = [broker.xadd("s", {"n": str(n)}) for n in range(5)]
    assert broker.run(newest_ids, "s", 3) == added[-3:]
    print("the same")
"""
    if kind == "embedded":
        assert house.run("-c", asked, "local://") == "the same"
    else:
        with RedisProcess() as server:
            assert house.run("-c", asked, server.url) == "the same"


def test_a_middleware_is_one_file_and_one_line(house: House) -> None:
    house.add("messaging/middleware/tally.py", MIDDLEWARE)
    house.add_line(
        "messaging/middleware/__init__.py",
        "from millstream.messaging.middleware.retry import retry\n",
        "from millstream.messaging.middleware.tally import tally\n",
    )
    asked = """
import asyncio
from millstream.messaging import Message
from millstream.messaging.middleware import tally

passed = []

async def handle(message):
    return None

asyncio.run(tally(passed)(handle)(Message(b"x", uuid="m-1")))
print(passed)
"""
    assert house.run("-c", asked) == "['m-1']"


def test_a_command_of_the_command_line_is_one_file_and_one_line(house: House) -> None:
    house.add("cli/greet.py", TYPED)
    house.add_line("cli/main.py", "CHAPTERS = {\n", '    "greet": Chapter("greet:command", "Say hello.", False),\n')
    assert house.run("-m", "millstream", "greet", "you") == "hello you"
    assert "greet" in house.run("-m", "millstream", "--help")
