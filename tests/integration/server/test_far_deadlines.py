"""A deadline in months does not stop the event loop of the server."""

from __future__ import annotations

from millstream import open_blocking_broker
from millstream.testing import ServedBroker


def test_key_with_a_far_expiry_is_served() -> None:
    with ServedBroker() as server, open_blocking_broker(server.url) as broker:
        assert broker.set("k", "v", px=90 * 86_400_000)
        assert broker.get("k") == b"v"
        assert broker.get("k") == b"v"
