"""Random corruption of a real journal is always detected. A truncated journal yields a prefix of the history."""

from __future__ import annotations

import os
import random
import shutil

import pytest

from millstream.broker.embedded import Embedded
from millstream.engine.effects import effects_of_key
from millstream.engine.journal.journal import JOURNAL_NAME
from millstream.errors import JournalCorrupt
from millstream.model.clock import ManualClock
from millstream.wire.commands import ErrorReply

CASES = int(os.environ.get("CASES", "600"))


def state(embedded):
    return {(db.index, key): list(effects_of_key(db, key)) for db in embedded.engine.databases for key in db.values}


def opened(directory):
    return Embedded(directory=directory, housekeeping=False, appendfsync="no", clock=ManualClock(1_800_000_000_000))


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A directory with a journal, and the states that its frames led through."""
    directory = tmp_path_factory.mktemp("history")
    embedded = opened(directory)
    session = embedded.session()
    states = [{}]
    entries: list[bytes] = []

    def run(*words: bytes | str | int):
        reply = embedded.execute(session, [word if isinstance(word, bytes) else str(word).encode() for word in words])
        assert not isinstance(reply, ErrorReply), reply.text
        now = state(embedded)
        if now != states[-1]:
            states.append(now)
        return reply

    dice = random.Random(7)
    run("XGROUP", "CREATE", "s", "g", 0, "MKSTREAM")
    for number in range(60):
        entries.append(run("XADD", "s", "MAXLEN", "~", 40, "*", "n", number, b"\0\r\n*", "x" * dice.randrange(60)))
        if number % 4 == 0:
            run("XREADGROUP", "GROUP", "g", f"c{number % 3}", "COUNT", 3, "STREAMS", "s", ">")
        if number % 9 == 0:
            run("XACK", "s", "g", entries[number // 2])
            run("XDEL", "s", entries[number // 3])
        if number % 10 == 0:
            run("SELECT", number // 10)
            run("SET", "k", number, "PX", 10_000_000)
            run("SELECT", 0)
        if number % 11 == 0:
            run("MULTI")
            run("INCR", "a")
            run("INCR", "b")
            run("EXEC")
    assert embedded.engine.databases[0].values
    embedded.close()
    return directory, states


def damaged(directory, tmp_path, data: bytes):
    target = tmp_path / "damaged"
    target.mkdir(exist_ok=True)
    (target / JOURNAL_NAME).write_bytes(data)
    return target


def test_any_corruption_is_detected(history, tmp_path):
    directory, _ = history
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    dice = random.Random(seed)
    data = (directory / JOURNAL_NAME).read_bytes()
    for _ in range(CASES):
        broken = _corrupt(dice, data)
        target = damaged(directory, tmp_path, broken)
        with pytest.raises(JournalCorrupt) as caught:
            opened(target)
        assert 0 <= caught.value.offset < len(broken)
        assert (target / JOURNAL_NAME).read_bytes() == broken, "a journal that is refused is left as it is"


def _corrupt(dice: random.Random, data: bytes) -> bytes:
    """Something other than a shorter file: bytes changed, exchanged, left out in the middle, or added."""
    while True:
        broken = bytearray(data)
        at = dice.randrange(len(data) - 1)
        match dice.randrange(6):
            case 0:
                broken[at] ^= 1 << dice.randrange(8)
            case 1:
                broken[at] = dice.randrange(256)
            case 2:
                length = dice.randrange(1, 200)
                broken[at : at + length] = dice.randbytes(len(broken[at : at + length]))
            case 3:
                # Not at the end: a last frame that has become shorter cannot be distinguished from a torn one, and is
                # cut off.
                at = dice.randrange(len(data) * 9 // 10)
                del broken[at : at + dice.randrange(1, 300)]
            case 4:
                broken[at:at] = dice.randbytes(dice.randrange(1, 50))
            case _:
                block = 64
                first, second = dice.randrange(len(data) // block), dice.randrange(len(data) // block)
                single, other = slice(first * block, (first + 1) * block), slice(second * block, (second + 1) * block)
                broken[single], broken[other] = broken[other], broken[single]
        if not data.startswith(bytes(broken)) and broken != data:
            return bytes(broken)


def test_truncated_journal_yields_a_prefix_of_the_history(history, tmp_path):
    directory, states = history
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    dice = random.Random(seed)
    data = (directory / JOURNAL_NAME).read_bytes()
    reached = set()
    for _ in range(CASES // 3):
        target = damaged(directory, tmp_path, data[: dice.randrange(len(data) + 1)])
        embedded = opened(target)
        result = state(embedded)
        assert result in states, "a state that never was"
        reached.add(states.index(result))
        embedded.close()
    assert len(reached) > 20


def test_complete_journal_yields_the_last_state(history, tmp_path):
    directory, states = history
    shutil.copytree(directory, tmp_path / "copy")
    embedded = opened(tmp_path / "copy")
    assert state(embedded) == states[-1]
    embedded.close()
