"""Faults to plant into a copy of the sources, each with the tests that must notice it.

A mutant names exact text of the sources and the tests that must fail. If the text or a test is gone, a test of
`make test` fails: update the mutant here, with the same fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "millstream"
TABLE = "tests/integration/faults/test_fault_table.py"
EVIDENCE = "tests/integration/faults/test_evidence.py"
MATRIX = "tests/chaos/test_fault_matrix.py"
IN_FLIGHT = "messaging/consumer/in_flight.py"
CLOSES = "  # the operation releases what it holds now, not when it is collected"
TABLE_TESTS = ("tests/unit/messaging/test_in_flight.py", "tests/unit/messaging/test_in_flight_model.py")


class Mutant(NamedTuple):
    name: str
    path: str
    """Under src/millstream."""
    text: str
    planted: str
    noticed_by: tuple[str, ...]
    """Arguments for pytest: at least one of these tests fails."""

    def plant(self, root: Path) -> None:
        """Changes the copy under ``root``. Raises LookupError where the text is not there exactly once."""
        path = root / self.path
        before = path.read_text()
        if before.count(self.text) != 1:
            raise LookupError(f"{self.name}: found {before.count(self.text)} times in {self.path}: {self.text!r}")
        path.write_text(before.replace(self.text, self.planted))


MUTANTS: tuple[Mutant, ...] = (
    # --- the three defects that together lost confirmed messages while Redis was loading ---
    Mutant(
        "a refused PING returns None as a connection",
        "broker/transport/redis_async.py",
        "                    check_first_answer(self._target, node, reply)\n",
        "                    check_first_answer(self._target, node, reply)\n"
        "                    if reply != b'PONG':\n"
        "                        return None\n",
        (TABLE, "-k", "loops-redis and LOADING and connecting"),
    ),
    Mutant(
        "a publisher keeps its writer after a batch was abandoned",
        "messaging/batching.py",
        "writer, self._writer = self._writer or self._begin(), None\n",
        "writer = self._writer = self._writer or self._begin()\n",
        (EVIDENCE, "-k", "abandoned_batch"),
    ),
    Mutant(
        "the driver leaves its operation to the garbage collector",
        "broker/drivers.py",
        f"    except BaseException:{CLOSES}\n        operation.close()\n        raise\n\n\ndef run_blocking",
        f"    except BaseException:{CLOSES}\n        raise\n\n\ndef run_blocking",
        ("tests/unit/broker/test_drivers.py",),
    ),
    # --- others ---
    Mutant(
        "acknowledged before it is handled",
        "messaging/consumer/subscriber.py",
        "        ack_policy: AckPolicy | str = AckPolicy.NACK_ON_ERROR,\n",
        "        ack_policy: AckPolicy | str = AckPolicy.ACK_FIRST,\n",
        (MATRIX, "-k", "letters"),
    ),
    Mutant(
        "a used idempotency key counts as new",
        "broker/scripts/append_unique/_seen.lua",
        "redis.call('SADD', seen, event) == 1",
        "redis.call('SADD', seen, event) >= 0",
        (MATRIX, "-k", "idempotency"),
    ),
    Mutant(
        "an error reply is ignored",
        "broker/transport/retry_policy.py",
        "        if type(reply) is ErrorReply:\n            raise typed_error(reply)\n        return reply\n",
        "        if type(reply) is ErrorReply:\n            return None\n        return reply\n",
        (TABLE, "-k", "WRONGTYPE and first"),
    ),
    Mutant(
        "a batch's token is not compared",
        "broker/scripts/append_once/call.py",
        "rows == self.position + count and digest == token:",
        "rows == self.position + count:",
        (EVIDENCE, "-k", "used_id_gets_no_false_confirmation"),
    ),
    Mutant(
        "a connection is used again after an error",
        "broker/transport/redis_async.py",
        "            self.discard(connection)\n            raise\n",
        "            self.put_back(exchange.node, connection)\n            raise\n",
        ("tests/integration/transport/test_faults.py", EVIDENCE, "-k", "cancelled_read_closes or transport_is_usable"),
    ),
    Mutant(
        "the marker of an append is not moved",
        "broker/scripts/append_once/append_once.lua",
        "move(#reply - 1)\n",
        "\n",
        (EVIDENCE, "-k", "repeated_after_a_lost_reply"),
    ),
    Mutant(
        "LOADING is not retried",
        "broker/failures.py",
        '"OOM", "LOADING", "READONLY"',
        '"OOM", "READONLY"',
        (TABLE, "-k", "loops-redis and LOADING and first"),
    ),
    Mutant(
        "a node that imports a slot receives no ASKING",
        "broker/transport/retry_policy.py",
        "for command in (ASKING, args)] if asking",
        "for command in ((b'PING',), args)] if asking",
        ("tests/integration/transport/test_fresh_node.py",),
    ),
    Mutant(
        "the replicas that confirmed are not counted",
        "broker/operations/durability.py",
        "confirmed >= durability.replicas:",
        "confirmed >= 0:",
        ("tests/integration/transport/test_durability.py",),
    ),
    Mutant(
        "an ambiguous command is sent again",
        "broker/transport/retry_policy.py",
        "                if not repeatable:\n                    raise no_answer_error(reason,",
        "                if False:\n                    raise no_answer_error(reason,",
        (TABLE, "-k", "no and answer and first"),
    ),
    Mutant(
        "outputs are stored although another consumer owns the message",
        "broker/scripts/settle/settle_outputs.lua",
        "  local owned = pending and pending[4] == times\n",
        "  local owned = true\n",
        ("tests/conformance/test_messaging.py", "-k", "previous_owner_stores_no_outputs and redis"),
    ),
    Mutant(
        "a dead letter is removed before it is replayed",
        "messaging/dead_letters.py",
        "        appended = await self._broker.append_unique(target, entries)\n",
        "        await self._broker.xdel(self.name, [letter.id for letter in letters])\n"
        "        appended = await self._broker.append_unique(target, entries)\n",
        (EVIDENCE, "-k", "replay"),
    ),
    Mutant(
        "a partly refused batch is sent again from its first command",
        "broker/transport/retry_policy.py",
        "requests[refused:] if refused else requests, replies[refused:]",
        "requests, replies[refused:]",
        (TABLE, "-k", "loops-redis and OOM and middle"),
    ),
    # --- the in-flight table of the consumer ---
    Mutant(
        "a lost entry that is delivered again stays lost",
        IN_FLIGHT,
        "SETTLING_LOST,\n        Event.DELIVER_AGAIN: RUNNING,\n",
        "SETTLING_LOST,\n        Event.DELIVER_AGAIN: LOST,\n",
        TABLE_TESTS,
    ),
    Mutant(
        "a transition is missing: a running entry cannot expire",
        IN_FLIGHT,
        "        Event.EXPIRE: EXPIRED,\n        Event.RELEASE: RELEASED,\n    },\n    # The entry",
        "        Event.RELEASE: RELEASED,\n    },\n    # The entry",
        TABLE_TESTS,
    ),
    Mutant(
        "a retry of a lost entry starts here",
        IN_FLIGHT,
        "        Event.DELAY: RELEASED,\n",
        "        Event.DELAY: DELAYED,\n",
        TABLE_TESTS,
    ),
    Mutant(
        "an entry that is being counted is dropped when a heartbeat is refused",
        IN_FLIGHT,
        "        Event.MARK_LOST: COUNTING,\n",
        "        Event.MARK_LOST: RELEASED,\n",
        TABLE_TESTS,
    ),
    Mutant(
        "a claimed entry starts without being counted",
        IN_FLIGHT,
        "        if not claimed:\n            if self._move(message, Event.ADD):\n",
        "        if True:\n            if self._move(message, Event.ADD):\n",
        TABLE_TESTS,
    ),
    Mutant(
        "a counted retry starts without being counted",
        IN_FLIGHT,
        "        if counted:\n            self._move(message, Event.COUNT)\n",
        "        if counted:\n            return False\n",
        TABLE_TESTS,
    ),
    Mutant(
        "no claimed entry is isolated",
        IN_FLIGHT,
        "return times > min(MAX_SHARED_DELIVERIES, self._max_deliveries - 2)",
        "return False",
        TABLE_TESTS,
    ),
    Mutant(
        "two isolated entries run at a time",
        IN_FLIGHT,
        "        if self._isolated is None and self._isolated_queue:\n",
        "        if self._isolated_queue:\n",
        TABLE_TESTS,
    ),
    Mutant(
        "the highest delivery count first",
        IN_FLIGHT,
        "(message.times_delivered, message.id, message))",
        "(-message.times_delivered, message.id, message))",
        TABLE_TESTS,
    ),
    Mutant(
        "an entry with too many deliveries starts once more",
        IN_FLIGHT,
        "if message.times_delivered >= self._max_deliveries:",
        "if message.times_delivered > self._max_deliveries:",
        TABLE_TESTS,
    ),
    Mutant(
        "the isolated entry that left blocks the next one",
        IN_FLIGHT,
        "self._isolated not in self._entries:\n            self._isolated = None\n",
        "self._isolated not in self._entries:\n            pass\n",
        TABLE_TESTS,
    ),
    Mutant(
        "a lost wake-up: the next message of a key does not become ready",
        IN_FLIGHT,
        "        return queue[0] if was_first else None\n",
        "        return None\n",
        TABLE_TESTS,
    ),
    Mutant(
        "an early release: a retry lets its key continue",
        IN_FLIGHT,
        "            self._delayed[message.id] = counted\n",
        "            self._delayed[message.id] = counted\n            self._forget([message.id])\n",
        TABLE_TESTS,
    ),
    Mutant(
        "an unverified entry starts",
        IN_FLIGHT,
        "            if message.valid_until < now:\n",
        "            if message.valid_until < 0:\n",
        TABLE_TESTS,
    ),
    Mutant(
        "verified entries start after later ones",
        IN_FLIGHT,
        "        self._ready.extendleft(message for message in reversed(verified)",
        "        self._ready.extend(message for message in verified",
        TABLE_TESTS,
    ),
    Mutant(
        "a late reply takes a delivery count back",
        IN_FLIGHT,
        "        if times < message.times_delivered and valid_until < message.valid_until:\n            return True\n",
        "",
        TABLE_TESTS,
    ),
    Mutant(
        "a released entry stays in the ready queue",
        IN_FLIGHT,
        "        if left_early:\n            self._dequeue()\n",
        "",
        TABLE_TESTS,
    ),
    Mutant(
        "the weight of released entries is kept",
        IN_FLIGHT,
        "        self.weight -= size\n        self.process.shrank(count, size)\n        if left_early",
        "        self.process.shrank(count, size)\n        if left_early",
        TABLE_TESTS,
    ),
    Mutant(
        "a start that did not happen is counted when the entry is returned",
        IN_FLIGHT,
        "        return times if started else max(0, times - 1)\n",
        "        return times\n",
        TABLE_TESTS,
    ),
    Mutant(
        "heartbeats keep an entry that was returned to the group",
        IN_FLIGHT,
        "_WITHOUT_HEARTBEAT = frozenset({LOST, EXPIRED, SETTLING_LOST})",
        "_WITHOUT_HEARTBEAT = frozenset({LOST, SETTLING_LOST})",
        TABLE_TESTS,
    ),
    Mutant(
        "an illegal transition leaves the entry where it was",
        IN_FLIGHT,
        "            message._state = RELEASED\n            self._drop([message.id])",
        "            self._drop([])",
        TABLE_TESTS,
    ),
    Mutant(
        "claimed entries may take all of the capacity",
        IN_FLIGHT,
        "max(0, min(self.capacity(), self.max_claimed - len(self._claimed)))",
        "max(0, self.capacity())",
        TABLE_TESTS,
    ),
    Mutant(
        "workers are not woken when the count of a claimed entry is confirmed",
        "messaging/consumer/topic.py",
        "            self.in_flight.requeue(message, fresh)\n        self.wake_workers()\n",
        "            self.in_flight.requeue(message, fresh)\n",
        ("tests/conformance/test_messaging.py", "-k", "embedded and were_redelivered_before"),
    ),
    Mutant(
        "nothing is counted after an isolated entry was settled",
        "messaging/consumer/settler.py",
        "        if topic.in_flight.release(ids):\n            self.count_claimed(topic)\n",
        "        topic.in_flight.release(ids)\n",
        ("tests/conformance/test_messaging.py", "-k", "embedded and were_redelivered_before"),
    ),
    Mutant(
        "a claim uses capacity that a read in progress has reserved",
        "messaging/consumer/capacity.py",
        "self._in_flight.capacity() - self.claim_reserved - self.reserved_by_reads())",
        "self._in_flight.capacity() - self.claim_reserved)",
        ("tests/conformance/test_messaging.py", "-k", "embedded and a_claim_and_a_read_together"),
    ),
    Mutant(
        "a recreated group begins after the last entry received",
        "messaging/consumer/membership.py",
        "restart_point(topic.in_flight.oldest(), group.last_delivered, last_generated)",
        "restart_point(None, group.last_delivered, last_generated)",
        ("tests/conformance/test_messaging.py", "-k", "embedded and before_the_oldest_unacknowledged"),
    ),
    Mutant(
        "new entries are read before older ones of this consumer are recovered",
        "messaging/consumer/claims.py",
        "return topic in self._scans and topic.in_flight.keeps_order",
        "return False",
        ("tests/unit/messaging/test_recovery_order.py",),
    ),
    Mutant(
        "own pending entries are not recovered after a failed read",
        "messaging/consumer/shard.py",
        "            self._own_entries.restart(read.topic)\n            self._to_recover.add(read)\n",
        "            pass\n",
        ("tests/conformance/test_messaging.py", "-k", "embedded and a_read_whose_answer_was_lost"),
    ),
    Mutant(
        "a claim whose count was refused starts all the same",
        "messaging/consumer/settler.py",
        "        counted = [message for message in messages if message.id not in refused] if refused else messages\n",
        "        counted = messages\n",
        ("tests/unit/messaging/test_lost_entries.py",),
    ),
    Mutant(
        "refused acknowledgements do not lead to a recovery",
        "messaging/consumer/settler.py",
        "        self._released(topic, bool(refused))\n",
        "        self._released(topic, False)\n",
        ("tests/unit/messaging/test_lost_entries.py",),
    ),
    Mutant(
        "a topic without capacity is not read again when messages are released",
        "messaging/consumer/reader.py",
        "        if read is not None and read.left_out and topic.capacity.for_read() > 0:\n",
        "        if read is not None and topic.ended:\n",
        ("tests/conformance/test_messaging.py", "-k", "embedded and (in_flight or limit or bound)"),
    ),
    Mutant(
        "no heartbeat is sent for unverified entries",
        "messaging/consumer/heartbeat.py",
        "        self._set_due(topic, 0.0)\n        self._wake.set()\n",
        "        pass\n",
        ("tests/unit/messaging/test_lost_entries.py", "-k", "lease_was_uncertain"),
    ),
    # --- retention ---
    Mutant(
        "acknowledged entries are deleted while another group holds them",
        "broker/scripts/retention/delete_acked.lua",
        "  if not pending[entry[1]] then acked",
        "  if true then acked",
        ("tests/conformance/test_housekeeping.py", "-k", "redis and behind_a_pending and not redis82"),
    ),
    Mutant(
        "entries are deleted while a declared group is missing",
        "broker/scripts/retention/_needs.lua",
        "(tonumber(fields[i + 1]) or now) > now then",
        "false then",
        ("tests/conformance/test_housekeeping.py", "-k", "redis and lost_between"),
    ),
    Mutant(
        "retention goes on after its lease was lost",
        "messaging/housekeeping.py",
        "            done = await self._runner.delete_acked(stream.name, stream.cursor, fence=stream.lease)\n",
        "            done = await self._runner.delete_acked(stream.name, stream.cursor)\n",
        ("tests/conformance/test_housekeeping.py", "-k", "embedded and one_worker_holds"),
    ),
    Mutant(
        "workers with different policies delete",
        "messaging/housekeeping.py",
        "if declared.lease is None or declared.others or declared.missing:",
        "if declared.lease is None or declared.missing:",
        ("tests/conformance/test_housekeeping.py", "-k", "embedded and contradicting"),
    ),
)
