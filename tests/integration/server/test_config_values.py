"""CONFIG SET with odd values: a real redis-server says what each of them means."""

from __future__ import annotations

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
def test_odd_values_mean_what_they_mean_to_redis(name: str, redis_server: RedisProcess) -> None:
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
