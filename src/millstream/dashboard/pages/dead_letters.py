"""The dead-letter pages: streams with dead letters, groups by error, one dead letter, and replay and purge.

A confirmation page counts the dead letters that are affected and records the newest id. Dead letters that arrive after
that are not affected.
"""

from __future__ import annotations

from typing import Any

from millstream.broker import companion_key
from millstream.dashboard.entries import view
from millstream.dashboard.render import MAX_PARAMETER_LENGTH, Query, address, clock, encode_name, time_of
from millstream.dashboard.shared import Action, Outcome, Question, Shared, Values, WebPage
from millstream.errors import InvalidArgument
from millstream.messaging import DeadLetter, DeadLetters
from millstream.messaging.dead_letters import FailureGroup, NoSuchDeadLetter, Replayed, Selection
from millstream.model import Entry, EntryId
from millstream.observe.format import age, count_of
from millstream.wire import to_name

MAX_COUNTED = 10_000
"""The newest dead letters, which are grouped by error."""
MAX_LISTED = 100
MAX_SELECTED = 1_000
SUFFIX = ".dlq"


def stream_of(dlq: str) -> str:
    """Derive the name of the stream from the name of its dead-letter stream."""
    inner = dlq.removesuffix(SUFFIX)
    plain = inner[1:-1] if inner.startswith("{") and inner.endswith("}") else inner
    try:
        return plain if to_name(companion_key(plain, "dlq")) == dlq else inner
    except InvalidArgument:
        return inner


def letters_of(shared: Shared, dlq: str) -> DeadLetters:
    return DeadLetters(shared.broker, stream_of(dlq) or dlq, dlq=dlq)


async def load(shared: Shared, query: Query, root: str) -> Values:
    stats = shared.stats
    await stats.request()
    now_ms = stats.latest.at_ms if stats.latest else 0
    rates = {row.stream: row.added_per_s for row in stats.rows}
    streams = [stream for name, stream in stats.streams.items() if name.endswith(SUFFIX) and stream.length]
    return {
        "streams": [
            {
                "dlq": stream.name,
                "stream": stream_of(stream.name),
                "count": stream.length,
                "rate": rates.get(stream.name),
                "rates": stats.rates.of(stream.name),
                "last": age(now_ms, stream.last_generated) if stream.last_generated else "",
            }
            for stream in sorted(streams, key=lambda stream: (-stream.length, stream.name))
        ]
    }


async def load_of(shared: Shared, query: Query, root: str) -> Values:
    """The page of one stream's dead letters."""
    dlq = query.name("dlq")
    await shared.stats.request()
    is_filtered = query.text("group") == "1"
    selection = _same_error(query) if is_filtered else Selection()
    letters = letters_of(shared, dlq)
    total = await letters.count()
    errors, examined = await _by_error(shared, letters, total)
    listed = await letters.list(selection, limit=MAX_LISTED, max_examined=MAX_COUNTED)
    now_ms = await shared.broker.server_time_ms()
    return {
        "dlq": dlq,
        "encoded_dlq": encode_name(dlq),
        "stream": stream_of(dlq),
        "total": total,
        "examined": examined,
        "chosen": is_filtered,
        "errors": [_error_values(group, dlq, root) for group in errors],
        "letters": [_letter_values(letter, now_ms) for letter in listed],
    }


async def _by_error(shared: Shared, letters: DeadLetters, total: int) -> tuple[list[FailureGroup], int]:
    """Group the dead letters by error, again only if one was added or removed. Also return how many were examined."""
    stream_stats = shared.stats.streams.get(letters.name)
    cache_key = (total, shared.stats.version if stream_stats is None else stream_stats.last_generated)
    cached = shared.page_state.setdefault("errors", {})
    if cached.get(letters.name, (None,))[0] != cache_key:
        groups = list(await letters.by_error(max_examined=MAX_COUNTED))
        if len(cached) > 50:
            cached.clear()
        cached[letters.name] = (cache_key, groups)
    return cached[letters.name][1], min(total, MAX_COUNTED)


def _error_values(group: FailureGroup, dlq: str, root: str) -> dict[str, Any]:
    parameters = [("dlq", encode_name(dlq)), ("group", "1"), *_error_parameters(group.error_type, group.error)]
    # Too long parameters are not cut, because cut ones would select other dead letters.
    fits = sum(len(value) for _, value in parameters) < MAX_PARAMETER_LENGTH
    return {
        "count": group.count,
        "error_type": group.error_type,
        "error": group.error,
        "groups": ", ".join(sorted(group.groups)),
        "first": time_of(group.first) or str(group.first),
        "last": time_of(group.last) or str(group.last),
        "address": root + address("/dead-letters", parameters) if fits else None,
        "replay": root + address("/dead-letters/confirm", [*parameters, ("verb", "replay")]),
        "purge": root + address("/dead-letters/confirm", [*parameters, ("verb", "purge")]),
    }


def _error_parameters(error_type: str, signature: str) -> list[tuple[str, str]]:
    return [("type", encode_name(error_type)), ("like", encode_name(signature))]


def _same_error(query: Query) -> Selection:
    """Select the dead letters of one error. An empty type or message matches only an empty one."""
    newest = query.text("newest", max_length=50)
    newest_id = EntryId.parse(newest, argument="newest") if newest else None
    before = None if newest_id is None else EntryId(newest_id.ms, newest_id.seq + 1)
    return Selection(error_type=query.name("type"), signature=query.name("like"), before=before)


def _letter_values(letter: DeadLetter, now_ms: int) -> dict[str, Any]:
    details = letter.details
    return {
        "id": letter.id,
        "age": age(now_ms, letter.id),
        "group": letter.group,
        "deliveries": details.deliveries if details else None,
        "error_type": letter.error_type,
        "error": letter.error or ("" if details else "not written by millstream"),
    }


async def load_one(shared: Shared, query: Query, root: str) -> Values:
    """The page of one dead letter, with its traceback and the original entry."""
    dlq = query.name("dlq")
    values: Values = {"dlq": dlq, "stream": stream_of(dlq), "id": query.text("id", max_length=50), "gone": ""}
    try:
        letter = await letters_of(shared, dlq).show(values["id"])
    except (NoSuchDeadLetter, InvalidArgument) as error:
        return values | {"gone": str(error)}
    now_ms = await shared.broker.server_time_ms()
    details = letter.details
    confirm = [("dlq", encode_name(dlq)), ("id", str(letter.id))]
    return values | {
        "details": details,
        "failure": letter.failure,
        "dead_lettered_at": clock(details.buried_at_ms) if details else "",
        "entry": view(Entry(letter.id, letter.fields), now_ms),
        "original": await _original(shared, letter, root),
        "replay": root + address("/dead-letters/confirm", [*confirm, ("verb", "replay")]),
        "purge": root + address("/dead-letters/confirm", [*confirm, ("verb", "purge")]),
    }


async def _original(shared: Shared, letter: DeadLetter, root: str) -> str | None:
    """The URL of the original entry, if it is still in its stream."""
    details = letter.details
    if details is None or not details.stream:
        return None
    try:
        id = EntryId.parse(details.original_id)
        entries = await shared.broker.xrange(details.stream, id, id)
    except InvalidArgument:
        return None
    return root + address("/stream", [("name", encode_name(details.stream)), ("from", str(id))]) if entries else None


# --- replay and purge ---


def _selection(query: Query) -> Selection:
    """Return the selected dead letters, or those of one error; refuses an empty selection, which would mean all."""
    ids = frozenset(EntryId.parse(id, argument="id") for id in query.all("id")[:MAX_SELECTED])
    if ids:
        return Selection(ids=ids)
    if query.text("group") != "1":
        raise InvalidArgument("letters", "none", "at least one selected dead letter")
    return _same_error(query)


async def ask(shared: Shared, query: Query, root: str) -> Question:
    dlq, verb = query.name("dlq"), "purge" if query.text("verb") == "purge" else "replay"
    back = root + address("/dead-letters", [("dlq", encode_name(dlq))])
    title = "Purge dead letters" if verb == "purge" else "Replay dead letters"
    try:
        selection = _selection(query)
    except InvalidArgument as error:
        return Question(title, str(error), "", back, (), possible=False)
    letters = letters_of(shared, dlq)
    newest = await letters.list(selection, limit=1)
    ids = [("id", str(id)) for id in sorted(selection.ids)]
    hidden = [("dlq", encode_name(dlq)), ("verb", verb), *ids]
    if not ids:
        hidden += [("group", "1"), *_error_parameters(query.name("type"), query.name("like"))]
        hidden += [("newest", str(newest[0].id))] if newest else []
    if verb == "purge":
        count = await letters.purge(selection, dry_run=True)
        counted = count_of(count, "dead letter", "dead letters")
        question = f"Delete {counted} of {stream_of(dlq)} permanently?" if count else "No dead letter is left to purge."
        return Question(title, question, f"Purge {count:,}", back, hidden, dangerous=True, possible=bool(count))
    plan = await letters.replay(selection, dry_run=True)
    counted = count_of(plan.added, "dead letter", "dead letters")
    affected = [(f"to {name}", count_of(number, "message", "messages")) for name, number in plan.streams.items()]
    question = f"Replay {counted}?" if plan.added else "None of these dead letters can be replayed."
    return Question(
        title,
        question,
        f"Replay {plan.added:,}",
        back,
        hidden,
        affected=affected,
        warning=_remaining(plan),
        possible=bool(plan.added),
    )


def _remaining(done: Replayed) -> str:
    """Explain why some dead letters are not replayed, and what to do about it."""
    reasons = [f"{done.left:,} cannot be replayed: they do not name their stream."] if done.left else []
    for (name, group), number in done.without_handler.items():
        missing = f"no group {group!r}" if group else "no group that would read them"
        reasons.append(
            f"{number:,} cannot be replayed: {name} has {missing}. "
            "`millstream dlq replay` can send them to another group."
        )
    return " ".join(reasons)


async def act(shared: Shared, query: Query) -> Outcome:
    letters, selection = letters_of(shared, query.name("dlq")), _selection(query)
    if query.text("verb") == "purge":
        purged = await letters.purge(selection)
        return Outcome(f"{count_of(purged, 'dead letter was', 'dead letters were')} purged.", succeeded=purged > 0)
    done = await letters.replay(selection)
    replayed = count_of(done.added, "dead letter was", "dead letters were")
    already = f" {done.already:,} had been replayed by an interrupted replay." if done.already else ""
    remaining = _remaining(done)
    return Outcome(
        f"{replayed} replayed.{already}{' ' + remaining if remaining else ''}",
        succeeded=bool(done.added or done.already),
    )


def describe(query: Query) -> str:
    verb = "purge" if query.text("verb") == "purge" else "replay"
    ids = query.all("id")[:MAX_SELECTED]
    selected = f"{len(ids):,} selected: {', '.join(ids[:20])}"
    which = selected if ids else f"error {query.name('type')}: {query.name('like')}, up to {query.text('newest')}"
    return f"{verb} dead letters of {query.name('dlq')}: {which}"


PAGES = (
    WebPage("/dead-letters", "dead_letters.html", "/dead-letters", load),
    WebPage("/dead-letter", "dead_letter.html", "/dead-letters", load_one, live=False),
)
OF_ONE_STREAM = WebPage("/dead-letters", "dead_letters_of.html", "/dead-letters", load_of)
"""The same path with the parameter ``dlq``."""
ACTIONS = (Action("/dead-letters/confirm", "/dead-letters", ask, act, describe),)
