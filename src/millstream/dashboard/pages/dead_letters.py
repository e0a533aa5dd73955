"""Dead letters: where they lie, what failed alike, one of them in full; and sending them round again, or away.

A question counts what it would touch, and names the newest of it: what is buried after that is not touched.
"""

from __future__ import annotations

from typing import Any

from millstream.broker import beside
from millstream.dashboard.entries import view
from millstream.dashboard.render import MOST_WORD, Query, address, clock, name_word, time_of
from millstream.dashboard.shared import Action, Outcome, Question, Shared, Values, WebPage
from millstream.errors import InvalidArgument
from millstream.messaging import DeadLetter, DeadLetters, FailureGroup, NoSuchDeadLetter, Replayed, Selection
from millstream.model import Entry, EntryId
from millstream.observe import age, count_of
from millstream.wire import to_name

COUNTED = 10_000
"""Letters that are looked at for the groups of errors, the newest."""
LISTED = 100
MOST_MARKED = 1_000
SUFFIX = ".dlq"


def stream_of(dlq: str) -> str:
    """The stream whose dead letters lie here, as far as the name tells."""
    inner = dlq.removesuffix(SUFFIX)
    plain = inner[1:-1] if inner.startswith("{") and inner.endswith("}") else inner
    try:
        return plain if to_name(beside(plain, "dlq")) == dlq else inner
    except InvalidArgument:
        return inner


def letters_of(shared: Shared, dlq: str) -> DeadLetters:
    return DeadLetters(shared.broker, stream_of(dlq) or dlq, dlq=dlq)


async def load(shared: Shared, query: Query, root: str) -> Values:
    survey = shared.survey
    await survey.wanted()
    now_ms = survey.look.at_ms if survey.look else 0
    rates = {row.stream: row.added_per_s for row in survey.rows}
    found = [one for name, one in survey.streams.items() if name.endswith(SUFFIX) and one.length]
    return {
        "streams": [
            {
                "dlq": one.name,
                "stream": stream_of(one.name),
                "count": one.length,
                "rate": rates.get(one.name),
                "rates": survey.rates.of(one.name),
                "last": age(now_ms, one.last_generated) if one.last_generated else "",
            }
            for one in sorted(found, key=lambda one: (-one.length, one.name))
        ]
    }


async def load_of(shared: Shared, query: Query, root: str) -> Values:
    """The dead letters of one stream."""
    dlq = query.name("dlq")
    await shared.survey.wanted()
    of_one_error = query.text("group") == "1"
    chosen = _alike(query) if of_one_error else Selection()
    letters = letters_of(shared, dlq)
    total = await letters.count()
    errors, looked_at = await _by_error(shared, letters, total)
    listed = await letters.list(chosen, limit=LISTED, most=COUNTED)
    now_ms = await shared.broker.server_time_ms()
    return {
        "dlq": dlq,
        "dlq_word": name_word(dlq),
        "stream": stream_of(dlq),
        "total": total,
        "looked_at": looked_at,
        "chosen": of_one_error,
        "errors": [_shown_error(one, dlq, root) for one in errors],
        "letters": [_shown_letter(letter, now_ms) for letter in listed],
    }


async def _by_error(shared: Shared, letters: DeadLetters, total: int) -> tuple[list[FailureGroup], int]:
    """Counted again only when something was buried or removed."""
    known = shared.survey.streams.get(letters.name)
    mark = (total, shared.survey.at if known is None else known.last_generated)
    kept = shared.remembered.setdefault("errors", {})
    if kept.get(letters.name, (None,))[0] != mark:
        found = list(await letters.by_error(most=COUNTED))
        if len(kept) > 50:
            kept.clear()
        kept[letters.name] = (mark, found)
    return kept[letters.name][1], min(total, COUNTED)


def _shown_error(one: FailureGroup, dlq: str, root: str) -> dict[str, Any]:
    which = [("dlq", name_word(dlq)), ("group", "1"), *_words(one.error_type, one.error)]
    # What no address could carry is not cut: that would mean other letters.
    fits = sum(len(value) for _, value in which) < MOST_WORD
    return {
        "count": one.count,
        "error_type": one.error_type,
        "error": one.error,
        "groups": ", ".join(sorted(one.groups)),
        "first": time_of(one.first) or str(one.first),
        "last": time_of(one.last) or str(one.last),
        "address": root + address("/dead-letters", which) if fits else None,
        "replay": root + address("/dead-letters/confirm", [*which, ("verb", "replay")]),
        "purge": root + address("/dead-letters/confirm", [*which, ("verb", "purge")]),
    }


def _words(error_type: str, signature: str) -> list[tuple[str, str]]:
    return [("type", name_word(error_type)), ("like", name_word(signature))]


def _alike(query: Query) -> Selection:
    """The letters of one error: what is empty must be empty there, too."""
    newest = query.text("newest", most=50)
    last = EntryId.parse(newest, argument="newest") if newest else None
    beyond = None if last is None else EntryId(last.ms, last.seq + 1)
    return Selection(error_type=query.name("type"), signature=query.name("like"), before=beyond)


def _shown_letter(letter: DeadLetter, now_ms: int) -> dict[str, Any]:
    burial = letter.burial
    return {
        "id": letter.id,
        "age": age(now_ms, letter.id),
        "group": letter.group,
        "deliveries": burial.deliveries if burial else None,
        "error_type": letter.error_type,
        "error": letter.error or ("" if burial else "not written by millstream"),
    }


async def load_one(shared: Shared, query: Query, root: str) -> Values:
    """One letter, with its traceback and the entry as it was."""
    dlq = query.name("dlq")
    values: Values = {"dlq": dlq, "stream": stream_of(dlq), "id": query.text("id", most=50), "gone": ""}
    try:
        letter = await letters_of(shared, dlq).show(values["id"])
    except (NoSuchDeadLetter, InvalidArgument) as problem:
        return values | {"gone": str(problem)}
    now_ms = await shared.broker.server_time_ms()
    burial = letter.burial
    confirm = [("dlq", name_word(dlq)), ("id", str(letter.id))]
    return values | {
        "burial": burial,
        "failure": letter.failure,
        "buried": clock(burial.buried_at_ms) if burial else "",
        "entry": view(Entry(letter.id, letter.fields), now_ms),
        "original": await _original(shared, letter, root),
        "replay": root + address("/dead-letters/confirm", [*confirm, ("verb", "replay")]),
        "purge": root + address("/dead-letters/confirm", [*confirm, ("verb", "purge")]),
    }


async def _original(shared: Shared, letter: DeadLetter, root: str) -> str | None:
    """The address of the entry that was buried, while it is still in its stream."""
    burial = letter.burial
    if burial is None or not burial.stream:
        return None
    try:
        id = EntryId.parse(burial.original_id)
        there = await shared.broker.xrange(burial.stream, id, id)
    except InvalidArgument:
        return None
    return root + address("/stream", [("name", name_word(burial.stream)), ("from", str(id))]) if there else None


# --- replay and purge ---


def _selection(query: Query) -> Selection:
    """Those that are marked, or those of one error; never all by accident."""
    ids = frozenset(EntryId.parse(id, argument="id") for id in query.all("id")[:MOST_MARKED])
    if ids:
        return Selection(ids=ids)
    if query.text("group") != "1":
        raise InvalidArgument("letters", "none", "marks on those that are meant")
    return _alike(query)


async def ask(shared: Shared, query: Query, root: str) -> Question:
    dlq, verb = query.name("dlq"), "purge" if query.text("verb") == "purge" else "replay"
    back = root + address("/dead-letters", [("dlq", name_word(dlq))])
    title = "Purge dead letters" if verb == "purge" else "Replay dead letters"
    try:
        chosen = _selection(query)
    except InvalidArgument as problem:
        return Question(title, str(problem), "", back, (), possible=False)
    letters = letters_of(shared, dlq)
    newest = await letters.list(chosen, limit=1)
    ids = [("id", str(id)) for id in sorted(chosen.ids)]
    hidden = [("dlq", name_word(dlq)), ("verb", verb), *ids]
    if not ids:
        hidden += [("group", "1"), *_words(query.name("type"), query.name("like"))]
        hidden += [("newest", str(newest[0].id))] if newest else []
    if verb == "purge":
        count = await letters.purge(chosen, dry_run=True)
        what = count_of(count, "dead letter", "dead letters")
        question = (
            f"Throw {what} of {stream_of(dlq)} away for good?" if count else "There is nothing to purge any more."
        )
        return Question(title, question, f"Purge {count:,}", back, hidden, dangerous=True, possible=bool(count))
    would = await letters.replay(chosen, dry_run=True)
    what = count_of(would.added, "dead letter", "dead letters")
    touches = [(f"to {name}", count_of(number, "letter", "letters")) for name, number in would.streams.items()]
    question = f"Send {what} round again?" if would.added else "Nothing of this can be replayed."
    return Question(
        title,
        question,
        f"Replay {would.added:,}",
        back,
        hidden,
        touches=touches,
        warning=_stays(would),
        possible=bool(would.added),
    )


def _stays(done: Replayed) -> str:
    """Why some stay, and what to do about it."""
    told = [f"{done.left:,} do not say where they came from, and stay."] if done.left else []
    for (name, group), number in done.without_handler.items():
        lacks = f"no group {group!r}" if group else "no group that would read them"
        told.append(f"{number:,} stay: {name} has {lacks}. `millstream dlq replay` can send them to another.")
    return " ".join(told)


async def act(shared: Shared, query: Query) -> Outcome:
    letters, chosen = letters_of(shared, query.name("dlq")), _selection(query)
    if query.text("verb") == "purge":
        gone = await letters.purge(chosen)
        return Outcome(f"{count_of(gone, 'dead letter was', 'dead letters were')} thrown away.", fine=gone > 0)
    done = await letters.replay(chosen)
    sent = count_of(done.added, "letter was", "letters were")
    again = f" {done.already:,} had been sent by a replay that was interrupted." if done.already else ""
    stays = _stays(done)
    return Outcome(
        f"{sent} sent round again.{again}{' ' + stays if stays else ''}", fine=bool(done.added or done.already)
    )


def tell(query: Query) -> str:
    verb = "purge" if query.text("verb") == "purge" else "replay"
    ids = query.all("id")[:MOST_MARKED]
    marked = f"{len(ids):,} marked: {', '.join(ids[:20])}"
    which = marked if ids else f"error {query.name('type')}: {query.name('like')}, up to {query.text('newest')}"
    return f"{verb} dead letters of {query.name('dlq')}: {which}"


PAGES = (
    WebPage("/dead-letters", "dead_letters.html", "/dead-letters", load),
    WebPage("/dead-letter", "dead_letter.html", "/dead-letters", load_one, live=False),
)
OF_ONE_STREAM = WebPage("/dead-letters", "dead_letters_of.html", "/dead-letters", load_of)
"""The same address with ``dlq``."""
ACTIONS = (Action("/dead-letters/confirm", "/dead-letters", ask, act, tell),)
