"""For tests, ours and yours: the conformance kit, a faulty link, wait helpers, servers, the delivery ledger."""

from millstream.testing.servers import RedisProcess, free_port, redis_server_installed
from millstream.testing.waiting import eventually, wait_until

__all__ = ["RedisProcess", "eventually", "free_port", "redis_server_installed", "wait_until"]
