"""Faults to plant into a copy of the sources, each with the tests that must notice it.

A mutant names exact text. Whoever changes that text finds the mutant here and moves it along: one that cannot be
planted fails a test of `make test`, so that none is forgotten silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "millstream"
TABLE = "tests/integration/faults/test_fault_table.py"
EVIDENCE = "tests/integration/faults/test_evidence.py"
MATRIX = "tests/chaos/test_fault_matrix.py"


class Mutant(NamedTuple):
    name: str
    path: str
    """Under src/millstream."""
    text: str
    planted: str
    noticed_by: tuple[str, ...]
    """Arguments for pytest: of these tests at least one fails."""

    def plant(self, root: Path) -> None:
        """Changes the copy under ``root``. Raises LookupError where the text is not there exactly once."""
        path = root / self.path
        before = path.read_text()
        if before.count(self.text) != 1:
            raise LookupError(f"{self.name}: found {before.count(self.text)} times in {self.path}: {self.text!r}")
        path.write_text(before.replace(self.text, self.planted))


MUTANTS: tuple[Mutant, ...] = (
    # --- the three that met when a loading Redis lost confirmed messages ---
    Mutant(
        "a refused PING hands None on as a connection",
        "broker/links/redis_async.py",
        "                    check_first_answer(self._target, node, reply)\n",
        "                    check_first_answer(self._target, node, reply)\n"
        "                    if reply != b'PONG':\n"
        "                        return None\n",
        (TABLE, "-k", "loops-redis and LOADING and connecting"),
    ),
    Mutant(
        "a publisher's writer stays in place after a batch that was given up",
        "messaging/batching.py",
        "batches, self._batches = self._batches or self._begin(), None\n",
        "batches = self._batches = self._batches or self._begin()\n",
        (EVIDENCE, "-k", "given_up"),
    ),
    Mutant(
        "the driver leaves its conversation to the garbage collector",
        "broker/drivers.py",
        "    except BaseException:\n        conversation.close()\n        raise\n\n\ndef run_blocking",
        "    except BaseException:\n        raise\n\n\ndef run_blocking",
        ("tests/unit/broker/test_drivers.py",),
    ),
    # --- others ---
    Mutant(
        "acknowledged before it is handled",
        "messaging/subscriber/subscriber.py",
        "        ack_policy: AckPolicy | str = AckPolicy.NACK_ON_ERROR,\n",
        "        ack_policy: AckPolicy | str = AckPolicy.ACK_FIRST,\n",
        (MATRIX, "-k", "letters"),
    ),
    Mutant(
        "an idempotency key that was seen is new again",
        "broker/steps/unique/_seen.lua",
        "redis.call('SADD', seen, event) == 1",
        "redis.call('SADD', seen, event) >= 0",
        (MATRIX, "-k", "idempotency"),
    ),
    Mutant(
        "a refusal is swallowed",
        "broker/links/retry_policy.py",
        "        if type(reply) is ErrorReply:\n            raise typed(reply)\n        return reply\n",
        "        if type(reply) is ErrorReply:\n            return None\n        return reply\n",
        (TABLE, "-k", "WRONGTYPE and first"),
    ),
    Mutant(
        "a batch's token is not compared",
        "broker/steps/once/call.py",
        "rows == self.position + count and digest == token:",
        "rows == self.position + count:",
        (EVIDENCE, "-k", "name_of_another"),
    ),
    Mutant(
        "a connection is used again after an error",
        "broker/links/redis_async.py",
        "            self.discard(connection)\n            raise\n",
        "            self.give_back(asked.node, connection)\n            raise\n",
        ("tests/integration/links/test_faults.py", EVIDENCE, "-k", "cancelling_a_waiting_reader or in_order"),
    ),
    Mutant(
        "the marker of an append is not moved",
        "broker/steps/once/append_once.lua",
        "move(#answer - 1)\n",
        "\n",
        (EVIDENCE, "-k", "published_again"),
    ),
    Mutant(
        "LOADING is not retried",
        "broker/failures.py",
        '"OOM", "LOADING", "READONLY"',
        '"OOM", "READONLY"',
        (TABLE, "-k", "loops-redis and LOADING and first"),
    ),
    Mutant(
        "a node that imports a slot is not told that we were sent",
        "broker/links/retry_policy.py",
        "for words in (ASKING, args)] if asking",
        "for words in ((b'PING',), args)] if asking",
        ("tests/integration/links/test_fresh_node.py",),
    ),
    Mutant(
        "replicas that confirm are not counted",
        "broker/operations/durability.py",
        "confirmed >= wanted.replicas:",
        "confirmed >= 0:",
        ("tests/integration/links/test_durability.py",),
    ),
    Mutant(
        "what was perhaps applied is sent again",
        "broker/links/retry_policy.py",
        "                if not repeatable:\n                    raise unanswered(trouble,",
        "                if False:\n                    raise unanswered(trouble,",
        (TABLE, "-k", "no and answer and first"),
    ),
    Mutant(
        "outputs are stored though the message is held no more",
        "broker/steps/settle/settle_outputs.lua",
        "  local mine = held and held[4] == times\n",
        "  local mine = true\n",
        ("tests/conformance/test_messaging.py", "-k", "stale_owner_puts_nothing_out and redis"),
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
        "of a batch that was refused half-way everything is sent again",
        "broker/links/retry_policy.py",
        "requests[refused:] if refused else requests, replies[refused:]",
        "requests, replies[refused:]",
        (TABLE, "-k", "loops-redis and OOM and middle"),
    ),
)
