"""The memory of the server and its limit are exposed, if the user may read them."""

from __future__ import annotations

import redis

from millstream import open_broker
from millstream.observe import ServiceMonitor
from millstream.testing import RedisProcess


async def exposition(url: str, times: int = 1) -> str:
    monitor = ServiceMonitor(port=None)
    async with open_broker(url) as broker:
        monitor.watch_streams(broker, "orders*", every_s=0)
        for _ in range(times):
            text, _ = await monitor.exposition()
    return text.decode()


async def test_memory_is_exposed_and_its_limit_if_it_is_set() -> None:
    with RedisProcess() as server:
        text = await exposition(server.url)
        assert "\nmillstream_server_memory_bytes " in text
        assert "\nmillstream_server_memory_limit_bytes " not in text
        redis.Redis(port=server.port).config_set("maxmemory", 104_857_600)
        assert "\nmillstream_server_memory_limit_bytes 1.048576e+08\n" in await exposition(server.url)


async def test_without_permission_for_info_the_other_metrics_are_exposed() -> None:
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        client.xadd("orders", {"n": 1})
        client.execute_command("ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all", "-info")
        text = await exposition(f"redis://plain:secret@127.0.0.1:{server.port}", times=3)
        assert "\nmillstream_survey_up 1.0\n" in text
        assert 'millstream_stream_length{stream="orders"} 1.0' in text
        assert "\nmillstream_server_memory_bytes " not in text
        refusals = [entry for entry in client.acl_log() if entry["object"] == "info"]
        assert [int(entry["count"]) for entry in refusals] == [1]
