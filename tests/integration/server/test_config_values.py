"""CONFIG SET with unusual values, compared with a real redis-server."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import redis

from millstream.engine import Engine
from millstream.testing import RedisProcess
from millstream.wire.commands import ErrorReply

ODD = (
    *("0", "-0", "00", "+1", "1", "-1", "0100", "0x10", "1e3", "1.5", "", " ", "1 ", " 1", "\t1", "1\n", "1\0", "1\0x"),
    *("abc", "1k", "1Kb", "1mb", "1G", "1gb", "1b", "1t", "1kk", "k", "kb", "-1k", "1.5k", "1_000", "1,000", "nan"),
    *(
        str(2**31 - 1),
        str(2**31),
        str(2**63 - 1),
        str(2**63),
        str(2**64 - 1),
        str(2**64),
        str(-(2**63)),
        str(-(2**63) - 1),
    ),
    *(f"{2**63 - 1}k", f"{2**53 + 1}kb", "9" * 23, "0" * 126 + "1", "0" * 127 + "1", "1" * 127, "1" * 128, "\u0661"),
)
NAMES = (
    *("stream-node-max-bytes", "stream-node-max-entries", "timeout", "auto-aof-rewrite-percentage"),
    *("auto-aof-rewrite-min-size", "maxmemory", "proto-max-bulk-len"),
)


@pytest.mark.parametrize("name", NAMES)
def test_unusual_values_have_the_meaning_of_redis(name: str, redis_server: RedisProcess) -> None:
    client = redis.Redis(port=redis_server.port, decode_responses=True)
    usual = str(client.config_get(name)[name])
    for value in ODD:
        engine = Engine()
        answer = engine.execute(engine.session(trusted=True), [b"CONFIG", b"SET", name.encode(), value.encode()], 1)
        ours = answer.text if isinstance(answer, ErrorReply) else ""
        try:
            client.config_set(name, value)
            theirs = ""
        except redis.ResponseError as error:
            theirs = str(error)

        assert ours.removeprefix("ERR ") == theirs.removeprefix("ERR "), ascii(value)
        assert engine.config[name] == client.config_get(name)[name], ascii(value)
        client.config_set(name, usual)


PERSISTENCE = (
    *("aof-disable-auto-gc", "aof-rewrite-incremental-fsync", "aof-timestamp-enabled", "aof-use-rdb-preamble"),
    *("no-appendfsync-on-rewrite", "rdb-del-sync-files", "rdb-save-incremental-fsync", "rdbcompression"),
    *("sanitize-dump-payload", "stop-writes-on-bgsave-error"),
)


def config(*words: str) -> object:
    engine = Engine()
    session = engine.session(trusted=True)
    reply = engine.execute(session, [b"CONFIG", *(word.encode() for word in words)], 1)
    if isinstance(reply, ErrorReply):
        return reply.text
    return [bytes(word).decode() for word in engine.execute(session, [b"CONFIG", b"GET", words[1].encode()], 1)]


@pytest.mark.parametrize("name", PERSISTENCE)
def test_settings_of_redis_files_are_accepted_and_shown(name: str, redis_server: RedisProcess) -> None:
    client = redis.Redis(port=redis_server.port, decode_responses=True)
    default = client.config_get(name)[name]
    assert config("GET", name) == [name, default]
    for value in ("yes", "no"):
        assert config("SET", name, value) == [name, value]
    assert "CONFIG SET failed" in str(config("SET", name, "maybe"))


def test_truncated_journal_setting_is_rejected() -> None:
    assert config("SET", "aof-load-truncated", "yes") == ["aof-load-truncated", "yes"]
    assert "only 'yes' is accepted" in str(config("SET", "aof-load-truncated", "no"))


def test_every_setting_of_redis_is_known_or_documented_as_refused(redis_server: RedisProcess) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "embedded.md").read_text()
    table = page.split("## CONFIG SET", 1)[1].split("\n## ", 1)[0].split("| why it is refused |", 1)[1]
    refused = [name for line in table.splitlines() if line.startswith("| `") for name in re.findall("`([^` ]+)`", line)]
    client = redis.Redis(port=redis_server.port, decode_responses=True)
    known = Engine().config.match([b"*"])
    unknown = [name for name in client.config_get("*") if name not in known]
    assert [name for name in unknown if not any(fnmatchcase(name, pattern) for pattern in refused)] == []
    assert "Unknown option" in str(config("SET", "repl-timeout", "60"))
