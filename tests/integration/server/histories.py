"""A history of commands for every type of key, and a snapshot of what clients can read."""

from __future__ import annotations

import redis

from millstream.server import Server


def make_history(embedded):
    with Server(embedded, port=0) as server:
        client = redis.Redis(port=server.port, protocol=3)
        client.set("string", b"\0\r\n binary")
        client.set("expiring", "v", ex=1000)
        client.hset("hash", mapping={f"f{n}": n for n in range(200)})
        client.rpush("list", *range(200))
        client.sadd("set", *range(100))
        client.zadd("zset", {f"m{n}": n / 7 for n in range(100)})
        client.xgroup_create("s", "g", id="0", mkstream=True)
        client.xgroup_create("s", "idle", id="0")
        client.xgroup_create("empty", "g", id="$", mkstream=True)
        for number in range(500):
            client.xadd(
                "s",
                {"n": number, "text": "x" * (number % 50)},
                id=f"{1000 + number}-{number}",
                maxlen=400,
                approximate=False,
            )
        client.xreadgroup("g", "alice", {"s": ">"}, count=50)
        client.xreadgroup("g", "bob", {"s": ">"}, count=50)
        client.xreadgroup("g", "alice", {"s": "0"}, count=10)
        client.xack("s", "g", *[entry for entry, _ in client.xrange("s", count=5)])
        client.xdel("s", *[entry for entry, _ in client.xrange("s", count=12)])
        client.xclaim(
            "s", "g", "carol", 0, [entry["message_id"] for entry in client.xpending_range("s", "g", "-", "+", 30)]
        )
        client.xtrim("s", minid="1150-0", approximate=False)
        client.xgroup_setid("s", "idle", "1200-200", entries_read=77)
        client.xgroup_createconsumer("s", "idle", "unused")
        other = redis.Redis(port=server.port, db=7, protocol=3)
        with other.pipeline() as pipeline:
            pipeline.xadd("other", {"a": 1}, id="5-5")
            pipeline.incr("counter")
            pipeline.execute()
        return picture(client), picture(other)


def picture(client):
    """All that a client can read of the keys, except values that depend on the time of the call."""
    received = {}
    for key in sorted(client.keys("*")):
        kind = client.type(key)
        if kind == b"stream":
            full = client.execute_command("XINFO", "STREAM", key, "FULL", "COUNT", "0")
            received[key] = (_without_times(full), client.xrange(key))
        elif kind == b"string":
            received[key] = client.get(key)
        elif kind == b"hash":
            received[key] = client.hgetall(key)
        elif kind == b"list":
            received[key] = client.lrange(key, 0, -1)
        elif kind == b"set":
            received[key] = client.smembers(key)
        else:
            received[key] = client.zrange(key, 0, -1, withscores=True)
        received[key, "expires"] = client.expiretime(key)
    return received


def _without_times(full):
    """radix-tree figures are the server's own affair, and a consumer's seen-time is when the journal was loaded."""
    if isinstance(full, dict):
        skipped = ("radix-tree-keys", "radix-tree-nodes", "seen-time", "entries")
        return {key: _without_times(value) for key, value in full.items() if _text(key) not in skipped}
    if isinstance(full, list):
        return [_without_times(item) for item in full]
    return full


def _text(key):
    return key.decode() if isinstance(key, bytes) else key
