"""A deadline in months does not stop the server's loop."""

from __future__ import annotations

from millstream import open_blocking_broker
from millstream.testing import ServedBroker


def test_a_key_that_expires_in_months_is_served_like_any_other() -> None:
    with ServedBroker() as server, open_blocking_broker(server.url) as broker:
        assert broker.set("k", "v", px=90 * 86_400_000)
        assert broker.get("k") == b"v"
        assert broker.get("k") == b"v"
