"""Sample data for pictures: streams with lag, dead letters of two kinds, sessions with owners."""

from __future__ import annotations

import json

from millstream import BlockingBroker
from millstream.assignment import Announcement, announce_stream
from millstream.broker import companion_key
from millstream.broker.scripts import leases

TRACE = 'Traceback (most recent call last):\n  File "shop/billing.py", line 40, in bill\n    raise error\n'


def fill_shop(broker: BlockingBroker) -> None:
    orders = [{"uuid": f"o-{n}", "payload": json.dumps({"order": n, "total": 129.9 + n})} for n in range(400)]
    broker.xadd_many("shop.orders", orders)
    for name, length, group, read in (
        ("shop.payments", 900, "ledger", 900),
        ("shop.mail", 1_200, "mailer", 260),
        ("shop.audit", 3_000, "archive", 2_990),
    ):
        broker.xadd_many(name, [{"payload": "{}"}] * length)
        broker.create_group(name, group, start="0")
        taken = broker.xreadgroup(name, group, "worker-1", count=read)
        broker.xack(name, group, [item.id for item in taken[:-5]])
    broker.create_group("shop.orders", "billing", start="0")
    broker.create_group("shop.orders", "shipping", start="0")
    for group, count in (("billing", 380), ("shipping", 399)):
        taken = broker.xreadgroup("shop.orders", group, "worker-1", count=count)
        broker.xack("shop.orders", group, [item.id for item in taken[:-12]])
    for number in range(11):
        kind, words = ("TimeoutError", f"no answer in {number} ms") if number % 3 else ("KeyError", "'customer'")
        why = {
            "stream": "shop.orders",
            "original_id": "1-1",
            "group": "billing",
            "consumer": "worker-1",
            "deliveries": "5",
        }
        why |= {"error": words, "error_type": kind, "traceback": f"{TRACE}{kind}: {words}\n"}
        letter = {"payload": json.dumps({"order": number}), **{f"dlq.{key}": value for key, value in why.items()}}
        broker.xadd(companion_key("shop.orders", "dlq"), letter)
    for number in range(6):
        announce_stream(broker, "desk", Announcement(f"session-{number}"))
        if number < 5:
            began = broker.server_time_ms() - 60_000 * (5 - number)
            broker.set(companion_key(f"session-{number}", "owner"), f"{began} member-{'ab'[number % 2]}")
    for member in ("member-a", "member-b"):
        broker.run(leases.heartbeat, "desk-input", member, lease_ms=60_000, owned=3, capacity=100)
    broker.create_group("desk-input", "desk-group", start="0", exist_ok=True)
