"""Decides how a command reaches a server and when it is retried. No I/O: it yields exchanges and pauses.

Requests that were not sent are retried until the deadline. Requests that were sent are repeated only if they are
repeatable. Transient errors are retried, and redirections are followed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from millstream.broker.bulk import CombinedCommands, PackedCommands
from millstream.broker.failures import REPLACED, TRANSIENT, code_of, typed_error
from millstream.broker.scripts.script import source_of
from millstream.broker.transport.routes import Exchange, Exchanges, NoAnswer, NodeRoute, NotSent, Pause
from millstream.broker.transport.targets import Node
from millstream.errors import BrokerUnavailable
from millstream.model import Backoff, Clock, Observer
from millstream.wire import Args, Batch, Command, ErrorReply, Reading, return_unchanged

log = logging.getLogger("millstream.broker")

BACKOFF = Backoff(initial_ms=20, max_ms=800, jitter=0.25)
WARN_AFTER_MS = 2_000
"""A call that waits longer logs a warning, because the program would otherwise seem to hang."""
MAX_REDIRECTS = 5
"""The number of consecutive redirections that are followed at once; then it pauses, because the cluster is
resharding.
"""
MAX_SCRIPT_LOADS = 3
"""How often in a row an unknown script is loaded into a node at once; then it pauses in between."""
ASKING: Args = (b"ASKING",)
MULTI: Args = (b"MULTI",)
EXEC: Args = (b"EXEC",)


class RetryPolicy:
    """The retries of one transport: what is sent again, to which node, after which pause, and until when."""

    def __init__(
        self,
        route: NodeRoute,
        clock: Clock,
        deadline_ms: int,
        observer: Observer,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.route = route
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._observer = observer
        self._chance = chance
        self._waiting = False
        """True after the log warned about missing replies: it warns once for all calls."""

    def call(self, command: Command) -> Exchanges[Any]:
        """One command's reply; an error reply is raised as its typed error."""
        block_ms = command.block_ms
        wait_ms = None if block_ms == 0 else block_ms or 0
        replies = yield from self._send_until_answered(
            [command.args],
            command.key,
            command.repeatable,
            wait_ms,
            alone=block_ms is not None,
            on_wait=command.on_wait,
        )
        reply = replies[0]
        if type(reply) is ErrorReply:
            raise typed_error(reply)
        return reply

    def call_many(self, batch: Batch) -> Exchanges[list[Any]]:
        """A batch's replies, error replies as values; the reply of ``after`` comes last."""
        if batch.keys is not None:
            return batch.reading((yield from self._send_to_each_node(batch, batch.keys)))
        requests = in_transaction(batch.commands) if batch.atomic else batch.commands
        # Some replies must not be passed to ``reading``, so it is applied after all have arrived.
        read_at_end = batch.atomic or batch.after is not None
        wait_ms = 0
        if batch.after is not None:
            requests = [*requests, batch.after]
            if batch.after[0] == b"WAIT":
                wait_ms = int(batch.after[2])
        replies = yield from self._send_until_answered(
            requests,
            batch.key,
            batch.repeatable,
            wait_ms,
            alone=batch.same_connection or batch.after is not None,
            atomic=batch.atomic,
            trailing=int(batch.after is not None),
            reading=return_unchanged if read_at_end else batch.reading,
        )
        if not read_at_end:
            return replies
        if batch.atomic:
            tail = [replies.pop()] if batch.after is not None else []
            replies = [*unwrap(replies), *tail]
        return batch.read(replies)

    def _send_to_each_node(self, batch: Batch, keys: Sequence[bytes]) -> Exchanges[list[Any]]:
        """A batch with many keys: each node receives its share in one round trip; failed commands are then sent one by
        one.

        One deadline applies to all of them. If a node does not answer, its commands get an error as reply and the
        others are not affected; if no node answered, the error is raised.
        """
        deadline = self._clock.monotonic_ms() + self._deadline_ms
        replies: list[Any] = [None] * len(batch.commands)
        shares, unroutable = yield from self._shares(keys)
        unsent_shares = [unroutable]
        refused: list[int] = []
        for node, share in shares.items():
            rejected, unsent = yield from self._send_share(node, share, batch, replies)
            refused += rejected
            unsent_shares.append(unsent)
        for index in refused:
            yield from self._send_single(batch, keys, index, replies, deadline)
        for share in unsent_shares:
            for at, index in enumerate(share):
                error = yield from self._send_single(batch, keys, index, replies, deadline)
                if error is not None and not error.may_have_been_applied:
                    for other in share[at + 1 :]:  # do not wait for the same node again for each key
                        replies[other] = error
                    break
        if all(isinstance(reply, BrokerUnavailable) for reply in replies):
            raise next((reply for reply in replies if reply.may_have_been_applied), replies[0])
        return replies

    def _send_share(
        self, node: Node, share: Sequence[int], batch: Batch, replies: list[Any]
    ) -> Exchanges[tuple[list[int], list[int]]]:
        """Sends one node's share of a batch; returns the commands with a transient error, and those that were
        not sent.
        """
        commands = batch.commands
        refused: list[int] = []
        unsettled = share
        for _ in range(2):  # the second time after loading scripts that the node did not know
            unanswered: Sequence[int] = ()
            try:
                is_whole_batch = type(unsettled) is range
                selected = commands if is_whole_batch else [commands[index] for index in unsettled]
                answered = yield Exchange(node, selected)
            except NotSent:
                return refused, list(unsettled)
            except NoAnswer as failure:
                answered = failure.replies
                remaining = unsettled[len(answered) :]
                if batch.repeatable:
                    unanswered = remaining
                else:
                    lost = no_answer_error(str(failure), (), commands[remaining[0]][0] if remaining else b"")
                    for index in remaining:
                        replies[index] = lost
            sources: dict[bytes, list[int]] = {}
            for index, answer in zip(unsettled, answered, strict=False):
                replies[index] = answer
                if type(answer) is not ErrorReply:
                    continue
                if is_transient(answer):
                    refused.append(index)
                elif (source := script_to_load(commands[index], answer)) is not None:
                    sources.setdefault(source, []).append(index)
            unsettled = [index for indexes in sources.values() for index in indexes]
            if unanswered or not sources:
                return [*refused, *unsettled], list(unanswered)
            yield from self._load(node, list(sources))
        return [*refused, *unsettled], []

    def _send_single(
        self, batch: Batch, keys: Sequence[bytes], index: int, replies: list[Any], deadline: float
    ) -> Exchanges[BrokerUnavailable | None]:
        """Sends one command of a batch and stores its reply in ``replies``; returns the error if it was not
        answered.
        """
        try:
            (replies[index],) = yield from self._send_until_answered(
                [batch.commands[index]], keys[index], batch.repeatable, 0, alone=False, deadline=deadline
            )
        except BrokerUnavailable as error:
            replies[index] = error
            return error
        return None

    def _shares(self, keys: Sequence[bytes]) -> Exchanges[tuple[dict[Node, Sequence[int]], list[int]]]:
        """The indexes of each node's keys, and those of keys without a node.

        If one node has all keys, its share is a range, so that the keys are not examined one by one.
        """
        if not self.route.by_key:
            try:
                return {(yield from self.route.node_for(None)): range(len(keys))}, []
            except NotSent:
                return {}, list(range(len(keys)))
        shares: dict[Node, list[int]] = {}
        alone: list[int] = []
        for index, key in enumerate(keys):
            try:
                shares.setdefault((yield from self.route.node_for(key)), []).append(index)
            except NotSent:
                alone.append(index)
        return dict(shares), alone

    def _send_until_answered(
        self,
        requests: Sequence[Args],
        key: bytes | None,
        repeatable: bool,
        wait_ms: int | None,
        *,
        alone: bool,
        atomic: bool = False,
        trailing: int = 0,
        reading: Reading = return_unchanged,
        on_wait: Callable[[int], None] | None = None,
        deadline: float | None = None,
    ) -> Exchanges[list[Any]]:
        """Sends requests until they are answered or the deadline is over, at least once. ``deadline`` replaces the
        default.
        """
        if deadline is None:
            deadline = self._clock.monotonic_ms() + self._deadline_ms
        done: list[Any] = []
        attempt = redirects = loads = 0
        redirect: Node | None = None
        asking = False
        while True:
            reason: ErrorReply | str
            try:
                node = redirect or (yield from self.route.node_for(key))
                sent = [command for args in requests for command in (ASKING, args)] if asking else requests
                replies: list[Any] = yield Exchange(
                    node, sent, wait_ms, alone, atomic, return_unchanged if asking else reading, on_wait
                )
                if asking:
                    replies = reading(replies[1::2])
            except NotSent as failure:
                reason = str(failure)
                redirect, asking = None, False
                self.route.forget()
            except NoAnswer as failure:
                reason = str(failure)
                redirect, asking = None, False
                self.route.forget()
                if not repeatable:
                    raise no_answer_error(reason, [*done, *failure.replies], requests[0][0]) from failure
            else:
                if len(replies) == 1 + trailing and (source := script_to_load(requests[0], replies[0])) is not None:
                    # Load it into the node that refused the command; for a migrating slot it is not the slot's owner.
                    reason = replies[0]
                    yield from self._load(node, [source])
                    loads += 1
                    if loads <= MAX_SCRIPT_LOADS:
                        continue
                    redirect, asking = None, False
                else:
                    refused = refused_from(replies[: len(replies) - trailing], atomic=atomic)
                    if refused is None:
                        if self._waiting:
                            self._log_recovery()
                        return [*done, *replies] if done else replies
                    done += replies[:refused]
                    requests, replies = requests[refused:] if refused else requests, replies[refused:]
                    refusal: ErrorReply = next(filter(is_transient, replies))
                    reason = refusal
                    redirect, asking = self._redirect(refusal, node, atomic=atomic)
                    redirects = redirects + 1 if redirect else 0
                    if 0 < redirects <= MAX_REDIRECTS:
                        continue
            attempt += 1
            pause_ms = BACKOFF.delay_ms(attempt, self._chance())
            if self._clock.monotonic_ms() + pause_ms >= deadline:
                if isinstance(reason, ErrorReply):
                    return [*done, *replies]
                raise BrokerUnavailable(
                    f"no server answered within {self._deadline_ms} ms ({attempt} tries): {reason.rstrip('.')}. "
                    "Check that it runs and that the URL is right."
                )
            self._observer("broker.retry", reason=str(reason), attempt=attempt, pause_ms=pause_ms)
            waited_ms = self._clock.monotonic_ms() + pause_ms - (deadline - self._deadline_ms)
            if waited_ms > WARN_AFTER_MS and not self._waiting:
                self._waiting = True
                log.warning("broker: no reply yet, retrying for up to %g s: %s", self._deadline_ms / 1000, reason)
            yield Pause(pause_ms / 1000)

    def _log_recovery(self) -> None:
        self._waiting = False
        log.warning("broker: the server replies again")

    def _load(self, node: Node, sources: Sequence[bytes]) -> Exchanges[None]:
        """Loads scripts into a node. A failure is ignored: without the script, the next try is refused again."""
        try:
            yield Exchange(node, [(b"SCRIPT", b"LOAD", source) for source in sources])
        except (NotSent, NoAnswer):
            pass

    def _redirect(self, reason: ErrorReply, node: Node, *, atomic: bool) -> tuple[Node | None, bool]:
        """The node to which the error redirects (None: ask the route again), and whether ASKING must be sent there."""
        code = code_of(reason)
        if code not in ("MOVED", "ASK"):
            if code in REPLACED:
                self.route.suspect_failover()
            return None, False
        _, slot, address = reason.text.split(" ")[:3]
        host, _, port = address.rpartition(":")
        target = Node(host or node.host, int(port))
        if code == "MOVED":
            self.route.moved(int(slot), target)
            return target, False
        # ASKING applies to one command, not to a MULTI: wait until the slot has migrated completely.
        return (None, False) if atomic else (target, True)


def in_transaction(commands: Sequence[Args]) -> Sequence[Args]:
    """The commands between MULTI and EXEC."""
    return (
        CombinedCommands((MULTI,), commands, (EXEC,))
        if isinstance(commands, PackedCommands)
        else [MULTI, *commands, EXEC]
    )


def refused_from(replies: Sequence[Any], *, atomic: bool) -> int | None:
    """The index from which on all replies are transient errors; None if the last reply is not.

    Only such a tail is sent again. An error followed by a success is not retried, because that would change the order
    of entries.
    """
    if atomic:
        return 0 if not isinstance(replies[-1], list) and any(map(is_transient, replies)) else None
    index = len(replies)
    while index and is_transient(replies[index - 1]):
        index -= 1
    return index if index < len(replies) else None


def is_transient(reply: Any) -> bool:
    """Whether the reply is an error that may pass."""
    if type(reply) is not ErrorReply:
        return False
    code = code_of(reply)
    return code in TRANSIENT or code in ("MOVED", "ASK")


def script_to_load(args: Args, reply: Any) -> bytes | None:
    """The source of a script of this package, if the reply says that the node does not know it."""
    if type(reply) is ErrorReply and args[0] == b"EVALSHA" and code_of(reply) == "NOSCRIPT":
        return source_of(args[1])
    return None


def unwrap(replies: Sequence[Any]) -> list[Any]:
    """EXEC's replies. If the transaction was rejected, every command gets the error that rejected it."""
    results = replies[-1]
    if isinstance(results, list):
        return results
    queued = replies[1:-1]
    cause = next((reply for reply in queued if isinstance(reply, ErrorReply)), results)
    if not isinstance(cause, ErrorReply):
        cause = ErrorReply("EXECABORT Transaction discarded because of a watched key")
    return [cause] * len(queued)


_ADVICE = {
    b"XREADGROUP": "Entries of the lost reply are pending for this consumer: read_history returns them.",
    b"XADD": "Check whether it was applied before you repeat it, or use append_once.",
}


def no_answer_error(reason: str, replies: Sequence[Any], command: bytes = b"") -> BrokerUnavailable:
    """The error for a command that was sent and has no reply: it is ambiguous whether it was applied."""
    error = BrokerUnavailable(
        f"the connection broke before the reply arrived ({reason}); the command may have been executed. "
        f"{_ADVICE.get(command, 'Check whether it was applied before you repeat it.')}",
        may_have_been_applied=True,
    )
    error.__dict__["replies"] = list(replies)
    return error


def unexpected_error(error: Exception) -> BrokerUnavailable:
    """The error for an unexpected exception in a transport: it is unknown whether the command was applied."""
    return no_answer_error(f"{type(error).__name__}: {error}", ())
