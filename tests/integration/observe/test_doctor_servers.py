"""The doctor names a server and the newer commands that it has, which it asks for instead of judging by the version."""

from __future__ import annotations

import pytest

from millstream import open_blocking_broker
from millstream.broker.operations.info import known_commands
from millstream.observe import examine_server
from millstream.testing import RedisProcess


@pytest.mark.parametrize(
    ("fixture", "commands"), [("shared_redis", []), ("redis82", ["XACKDEL", "XDELEX"]), ("valkey", [])]
)
def test_newer_commands_are_detected(fixture: str, commands: list[str], request: pytest.FixtureRequest) -> None:
    server: RedisProcess = request.getfixturevalue(fixture)
    with open_blocking_broker(server.url) as broker:
        assert broker.run(known_commands, ["XADD", "XACKDEL", "XDELEX", "XNACK"]) == ["XADD", *commands]
        version = next(finding.found for finding in examine_server(broker) if finding.what == "server version")
    text = f"(with {', '.join(commands)})" if commands else ""
    assert version.endswith(text)
    assert ("with" in version.partition("compatible")[0]) == bool(commands)
