"""How a command gets to a server and its answer back, whatever happens on the way. Decisions only: no I/O.

It yields exchanges with nodes, and pauses. What was not sent is tried again until the deadline; what was sent is
repeated only if it is safe to repeat; what was refused for a passing reason is asked again; redirections are followed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from millstream.broker.bulk import InBulk, Joined
from millstream.broker.failures import REPLACED, TRANSIENT, code_of, typed
from millstream.broker.links.routes import Exchange, Exchanges, NoAnswer, NodeRoute, NotSent, Pause
from millstream.broker.links.targets import Node
from millstream.broker.steps.script import source_of
from millstream.errors import BrokerUnavailable
from millstream.model import Backoff, Clock, Observer
from millstream.wire import Args, Batch, Command, ErrorReply, Reading, as_they_are

log = logging.getLogger("millstream.broker")

BACKOFF = Backoff(initial_ms=20, max_ms=800, jitter=0.25)
TELL_AFTER_MS = 2_000
"""Whoever waits for longer is told for whom: a program that says nothing looks as if it hung."""
MAX_HOPS = 5
"""Redirections in a row that are followed at once; after that it waits between them, for the cluster is rearranging."""
MAX_LOADS = 3
"""Times in a row that a node which does not know a script is given it at once; after that it waits in between."""
ASKING: Args = (b"ASKING",)
MULTI: Args = (b"MULTI",)
EXEC: Args = (b"EXEC",)


class RetryPolicy:
    """One for each link: what is asked again, where, after which pause, and until when."""

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
        """The log says that there is no answer; told once, however many calls wait."""

    def call(self, command: Command) -> Exchanges[Any]:
        """One command's reply; an error reply is raised as its typed error."""
        block_ms = command.block_ms
        wait_ms = None if block_ms == 0 else block_ms or 0
        replies = yield from self._ask_until_answered(
            *([command.args], command.key, command.repeatable, wait_ms),
            alone=block_ms is not None,
            on_wait=command.on_wait,
        )
        reply = replies[0]
        if type(reply) is ErrorReply:
            raise typed(reply)
        return reply

    def call_many(self, batch: Batch) -> Exchanges[list[Any]]:
        """A batch's replies, error replies as values; the reply of ``after`` comes last."""
        if batch.keys is not None:
            return batch.reading((yield from self._ask_each_node(batch, batch.keys)))
        requests = in_transaction(batch.commands) if batch.atomic else batch.commands
        # Among the replies are some that ``reading`` must not see: it waits until all of them are there.
        at_once = batch.atomic or batch.after is not None
        wait_ms = 0
        if batch.after is not None:
            requests = [*requests, batch.after]
            if batch.after[0] == b"WAIT":
                wait_ms = int(batch.after[2])
        replies = yield from self._ask_until_answered(
            requests,
            batch.key,
            batch.repeatable,
            wait_ms,
            alone=batch.same_connection or batch.after is not None,
            atomic=batch.atomic,
            trailing=int(batch.after is not None),
            reading=as_they_are if at_once else batch.reading,
        )
        if not at_once:
            return replies
        if batch.atomic:
            tail = [replies.pop()] if batch.after is not None else []
            replies = [*unwrap(replies), *tail]
        return batch.read(replies)

    def _ask_each_node(self, batch: Batch, keys: Sequence[bytes]) -> Exchanges[list[Any]]:
        """A batch over many keys: each node gets its share in one go; what that did not settle goes one by one, until
        one deadline for all of them. What a node did not answer is an error in its place, and costs the others nothing;
        where nobody answered anything it is raised."""
        deadline = self._clock.monotonic_ms() + self._deadline_ms
        replies: list[Any] = [None] * len(batch.commands)
        shares, homeless = yield from self._shares(keys)
        unreached = [homeless]
        refused: list[int] = []
        for node, share in shares.items():
            again, unsent = yield from self._ask_share(node, share, batch, replies)
            refused += again
            unreached.append(unsent)
        for index in refused:
            yield from self._ask_one(batch, keys, index, replies, deadline)
        for some in unreached:
            for at, index in enumerate(some):
                error = yield from self._ask_one(batch, keys, index, replies, deadline)
                if error is not None and not error.may_have_been_applied:
                    for other in some[at + 1 :]:  # nobody waits for that node once more for each of its keys
                        replies[other] = error
                    break
        if all(isinstance(reply, BrokerUnavailable) for reply in replies):
            raise next((one for one in replies if one.may_have_been_applied), replies[0])
        return replies

    def _ask_share(
        self, node: Node, share: Sequence[int], batch: Batch, replies: list[Any]
    ) -> Exchanges[tuple[list[int], list[int]]]:
        """One node's part of a batch. What it refused for a passing reason, and what has not reached it."""
        commands = batch.commands
        refused: list[int] = []
        unsettled = share
        for _ in range(2):  # the second time with what the node had to be given first
            unheard: Sequence[int] = ()
            try:
                all_of_them = type(unsettled) is range
                answers = yield Exchange(node, commands if all_of_them else [commands[one] for one in unsettled])
            except NotSent:
                return refused, list(unsettled)
            except NoAnswer as failure:
                answers = failure.replies
                rest = unsettled[len(answers) :]
                if batch.repeatable:
                    unheard = rest
                else:
                    lost = unanswered(str(failure), ())
                    for index in rest:
                        replies[index] = lost
            sources: dict[bytes, list[int]] = {}
            for index, answer in zip(unsettled, answers, strict=False):
                replies[index] = answer
                if type(answer) is not ErrorReply:
                    continue
                if passing(answer):
                    refused.append(index)
                elif (source := script_to_load(commands[index], answer)) is not None:
                    sources.setdefault(source, []).append(index)
            unsettled = [index for some in sources.values() for index in some]
            if unheard or not sources:
                return [*refused, *unsettled], list(unheard)
            yield from self._load(node, list(sources))
        return [*refused, *unsettled], []

    def _ask_one(
        self, batch: Batch, keys: Sequence[bytes], index: int, replies: list[Any], deadline: float
    ) -> Exchanges[BrokerUnavailable | None]:
        """One of a batch, in its place of ``replies``; the error where it was not answered."""
        try:
            (replies[index],) = yield from self._ask_until_answered(
                [batch.commands[index]], keys[index], batch.repeatable, 0, alone=False, deadline=deadline
            )
        except BrokerUnavailable as error:
            replies[index] = error
            return error
        return None

    def _shares(self, keys: Sequence[bytes]) -> Exchanges[tuple[dict[Node, Sequence[int]], list[int]]]:
        """Which of the keys each node has, by their places; and those that no node has now. Where one node has all of
        them, that is a range: it is not looked at key by key."""
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

    def _ask_until_answered(
        self,
        requests: Sequence[Args],
        key: bytes | None,
        repeatable: bool,
        wait_ms: int | None,
        *,
        alone: bool,
        atomic: bool = False,
        trailing: int = 0,
        reading: Reading = as_they_are,
        on_wait: Callable[[int], None] | None = None,
        deadline: float | None = None,
    ) -> Exchanges[list[Any]]:
        """``deadline``: another than this call's own; it is asked once in any case."""
        if deadline is None:
            deadline = self._clock.monotonic_ms() + self._deadline_ms
        done: list[Any] = []
        attempt = hops = loads = 0
        detour: Node | None = None
        asking = False
        while True:
            trouble: ErrorReply | str
            try:
                node = detour or (yield from self.route.node_for(key))
                sent = [words for args in requests for words in (ASKING, args)] if asking else requests
                replies: list[Any] = yield Exchange(
                    node, sent, wait_ms, alone, atomic, as_they_are if asking else reading, on_wait
                )
                if asking:
                    replies = reading(replies[1::2])
            except NotSent as failure:
                trouble = str(failure)
                detour, asking = None, False
                self.route.forget()
            except NoAnswer as failure:
                trouble = str(failure)
                detour, asking = None, False
                self.route.forget()
                if not repeatable:
                    raise unanswered(trouble, [*done, *failure.replies]) from failure
            else:
                if len(replies) == 1 + trailing and (source := script_to_load(requests[0], replies[0])) is not None:
                    # Where the command goes, not where its key belongs: for a slot on its way these are two nodes.
                    trouble = replies[0]
                    yield from self._load(node, [source])
                    loads += 1
                    if loads <= MAX_LOADS:
                        continue
                    detour, asking = None, False
                else:
                    refused = refused_from(replies[: len(replies) - trailing], atomic=atomic)
                    if refused is None:
                        if self._waiting:
                            self._answered()
                        return [*done, *replies] if done else replies
                    done += replies[:refused]
                    requests, replies = requests[refused:] if refused else requests, replies[refused:]
                    refusal: ErrorReply = next(filter(passing, replies))
                    trouble = refusal
                    detour, asking = self._redirect(refusal, node, atomic=atomic)
                    hops = hops + 1 if detour else 0
                    if 0 < hops <= MAX_HOPS:
                        continue
            attempt += 1
            pause_ms = BACKOFF.delay_ms(attempt, self._chance())
            if self._clock.monotonic_ms() + pause_ms >= deadline:
                if isinstance(trouble, ErrorReply):
                    return [*done, *replies]
                raise BrokerUnavailable(
                    f"no server answered within {self._deadline_ms} ms ({attempt} tries): {trouble.rstrip('.')}. "
                    "Check that it runs and that the URL is right."
                )
            self._observer("broker.retry", reason=str(trouble), attempt=attempt, pause_ms=pause_ms)
            waited_ms = self._clock.monotonic_ms() + pause_ms - (deadline - self._deadline_ms)
            if waited_ms > TELL_AFTER_MS and not self._waiting:
                self._waiting = True
                log.warning("no answer yet, trying for %g s: %s", self._deadline_ms / 1000, trouble)
            yield Pause(pause_ms / 1000)

    def _answered(self) -> None:
        self._waiting = False
        log.warning("the server answers again")

    def _load(self, node: Node, sources: Sequence[bytes]) -> Exchanges[None]:
        """Whether it worked, the next try tells: without its script the command is refused again."""
        try:
            yield Exchange(node, [(b"SCRIPT", b"LOAD", source) for source in sources])
        except (NotSent, NoAnswer):
            pass

    def _redirect(self, trouble: ErrorReply, node: Node, *, atomic: bool) -> tuple[Node | None, bool]:
        """The node that the refusal sends us to (None: ask the route again), and whether to say ASKING there."""
        code = code_of(trouble)
        if code not in ("MOVED", "ASK"):
            if code in REPLACED:
                self.route.doubt()
            return None, False
        _, slot, place = trouble.text.split(" ")[:3]
        host, _, port = place.rpartition(":")
        there = Node(host or node.host, int(port))
        if code == "MOVED":
            self.route.moved(int(slot), there)
            return there, False
        # Inside MULTI nobody can ask for each command: wait until the slot has moved as a whole.
        return (None, False) if atomic else (there, True)


def in_transaction(commands: Sequence[Args]) -> Sequence[Args]:
    return Joined((MULTI,), commands, (EXEC,)) if isinstance(commands, InBulk) else [MULTI, *commands, EXEC]


def refused_from(replies: Sequence[Any], *, atomic: bool) -> int | None:
    """The index from which on everything was refused for a passing reason; None: nothing to ask again.

    Only such a tail may be sent again. A hole in the middle may not: filling it would change the order of entries.
    """
    if atomic:
        return 0 if not isinstance(replies[-1], list) and any(map(passing, replies)) else None
    index = len(replies)
    while index and passing(replies[index - 1]):
        index -= 1
    return index if index < len(replies) else None


def passing(reply: Any) -> bool:
    if type(reply) is not ErrorReply:
        return False
    code = code_of(reply)
    return code in TRANSIENT or code in ("MOVED", "ASK")


def script_to_load(args: Args, reply: Any) -> bytes | None:
    """The text of one of our scripts, where the reply says that the node does not know it."""
    if type(reply) is ErrorReply and args[0] == b"EVALSHA" and code_of(reply) == "NOSCRIPT":
        return source_of(args[1])
    return None


def unwrap(replies: Sequence[Any]) -> list[Any]:
    """EXEC's replies. Refused as a whole, every command gets the error that refused it."""
    results = replies[-1]
    if isinstance(results, list):
        return results
    queued = replies[1:-1]
    cause = next((reply for reply in queued if isinstance(reply, ErrorReply)), results)
    if not isinstance(cause, ErrorReply):
        cause = ErrorReply("EXECABORT Transaction discarded because of a watched key")
    return [cause] * len(queued)


def unanswered(reason: str, replies: Sequence[Any]) -> BrokerUnavailable:
    error = BrokerUnavailable(
        f"the connection broke before the answer came ({reason}): the command may have been executed. "
        "Look before you repeat it, or use append_once.",
        may_have_been_applied=True,
    )
    error.__dict__["replies"] = list(replies)
    return error


def unforeseen(error: Exception) -> BrokerUnavailable:
    """What nobody has thought of, below the link or in an answer: nobody knows what the server has done."""
    return unanswered(f"{type(error).__name__}: {error}", ())
