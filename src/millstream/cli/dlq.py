"""``millstream dlq``: dead letters as a workbench."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer

from millstream.broker import beside, open_broker
from millstream.cli import show
from millstream.cli.lookup import (
    DEADLINE_MS,
    NoSuchEntry,
    no_entry,
    no_stream,
    old_spelling,
    something_to_look_at,
    typed,
)
from millstream.cli.main import FAILED
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, ShownColumn, Url, Yes, ago, ident, name, number, text
from millstream.messaging import (
    DeadLetter,
    DeadLetters,
    Replayed,
    Selection,
    dead_letter_streams,
)
from millstream.model import EntryId
from millstream.observe import count_of, made_at, named, printable

R = TypeVar("R")

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream whose dead letters they are.")]
Dlq = Annotated[str | None, typer.Option("--dlq", help="The dead-letter stream, where it is not the one beside.")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="One dead letter; may be given several times.")]
ErrorType = Annotated[str | None, typer.Option("--error-type", help="The error's type, in full or its last part.")]
Contains = Annotated[str | None, typer.Option("--contains", help="A text in the error's message.")]
Group = Annotated[str | None, typer.Option("--group", help="The group that buried them.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many.")]


@app.command("ls")
def list_letters(
    stream: Annotated[
        str | None, typer.Argument(help="The stream whose dead letters they are; by default all that have some.")
    ] = None,
    error_type: ErrorType = None,
    contains: Contains = None,
    group: Group = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 50,
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """The dead letters of a stream, the newest first; without a stream, where there are dead letters at all."""
    if stream is None and dlq is None:
        _list_streams(url, output)
        return
    chosen = _selection(None, error_type, contains, group)
    found = _with_letters(url, stream or str(dlq), dlq, lambda letters: letters.list(chosen, limit=limit))
    now_ms = _with_broker(url, lambda broker: broker.server_time_ms())
    columns = [ident("id"), ago("buried_at", now_ms, "buried", spare=True)]
    if any(letter.failure for letter in found):  # a pipeline's: nobody tried them in a group
        columns += [name("pipeline"), name("stage")]
    else:
        columns += [name("group"), number("deliveries", "tries"), name("error_type")]
    show.rows(output, [*columns, text("error")], [_row(letter) for letter in found])


def _list_streams(url: str, output: OutputKind) -> None:
    async def work(broker: Any) -> list[dict[str, Any]]:
        items = []
        for found in await dead_letter_streams(broker):
            letters = DeadLetters(broker, found, dlq=found)
            if count := await letters.count():
                first = (await letters.by_error())[0]
                most = {"error_type": first.error_type, "error": first.error, "error_count": first.count}
                items.append({"dead_letters": found, "count": count, **most})
        return items

    columns = [name("dead_letters"), number("count"), name("error_type", "most frequent"), text("error")]
    show.rows(output, columns, _with_broker(url, work))


@app.command("list", hidden=True)
def list_as_before(
    stream: Stream,
    error_type: ErrorType = None,
    contains: Contains = None,
    group: Group = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 50,
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """The spelling of 0.1; it goes with the next release."""
    old_spelling("dlq list STREAM", "dlq ls STREAM")
    list_letters(stream, error_type, contains, group, limit, dlq, url, output)


@app.command("streams", hidden=True)
def list_streams_as_before(url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """The spelling of 0.1; it goes with the next release."""
    old_spelling("dlq streams", "dlq ls")
    _list_streams(url, output)


@app.command("show")
def show_letter(
    stream: Stream,
    id: Annotated[str, typer.Argument(help="The dead letter's id.")],
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """One dead letter in full: its fields, and what happened."""
    letter = _with_letters(url, stream, dlq, lambda letters: letters.show(id))
    row = _row(letter)
    if output is OutputKind.json:
        trace = letter.burial.traceback if letter.burial is not None else None
        show.as_json({**row, "traceback": trace, "fields": letter.fields})
        return
    show.facts([_fact(key) for key, value in row.items() if value is not None], row)
    typer.secho("\nThe entry as it was", italic=True)
    fields = {printable(field): value for field, value in letter.fields.items()}
    if fields:
        show.facts([ShownColumn(field, field) for field in fields], fields)
    if letter.burial is not None and letter.burial.traceback:
        typer.echo("\n" + "\n".join(printable(line) for line in letter.burial.traceback.splitlines()))


@app.command("errors")
def group_by_error(
    stream: Stream, group: Group = None, dlq: Dlq = None, url: Url = DEFAULT_URL, output: Output = OutputKind.table
) -> None:
    """Dead letters that failed alike, counted: the most frequent first."""
    chosen = _selection(None, None, None, group)
    found = _with_letters(url, stream, dlq, lambda letters: letters.by_error(chosen))
    items = [
        {
            "count": each.count,
            "error_type": each.error_type,
            "error": each.error,
            "groups": sorted(each.groups),
            "first_id": each.first,
            "last_id": each.last,
            "example": each.example,
        }
        for each in found
    ]
    columns = [number("count"), name("error_type"), text("error"), text("groups", shown=_joined)]
    show.rows(output, [*columns, ident("first_id", spare=True), ident("last_id", spare=True)], items)


@app.command()
def replay(
    stream: Stream,
    ids: Ids = None,
    error_type: ErrorType = None,
    contains: Contains = None,
    group: Group = None,
    to: Annotated[str | None, typer.Option("--to", help="Another stream than the one they came from.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", min=1e-6, max=1e9, help="At most so many a second.")] = None,
    limit: Limit = None,
    every_group: Annotated[
        bool, typer.Option("--every-group", help="Let all groups handle them again, not only the one that failed.")
    ] = False,
    for_group: Annotated[
        str | None, typer.Option("--for-group", help="The group to handle them, such as the failed one's new name.")
    ] = None,
    dry_run: DryRun = False,
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Send dead letters round again: all of them, or those that the options select. Safe to run again.

    Where they came from the group that failed handles them; with --to another stream, every group there.

    What nobody would handle stays, and the exit code is 1.
    """
    chosen = _selection(ids, error_type, contains, group)

    async def work(letters: DeadLetters) -> Replayed:
        who: dict[str, Any] = {"to": to, "every_group": every_group, "for_group": for_group}
        return await letters.replay(chosen, rate=rate, limit=limit, dry_run=dry_run, **who)

    done = _with_letters(url, stream, dlq, work)
    if ids and not (done.added or done.already or done.left or done.without_handler):
        raise _no_letters(stream, ids)
    if output is OutputKind.json:
        stay = [{"stream": at, "group": who, "count": n} for (at, who), n in done.without_handler.items()]
        facts = {"added": done.added, "already": done.already, "left": done.left, "without_handler": stay}
        show.as_json({**facts, "streams": done.streams, "dry_run": dry_run})
    else:
        _tell_replayed(done)
    if done.left or done.without_handler:
        raise typer.Exit(FAILED)


def _tell_replayed(done: Replayed) -> None:
    targets = ", ".join(f"{count:,} to {printable(name)}" for name, count in done.streams.items()) or "nothing"
    typer.echo(f"{'would replay' if done.dry_run else 'replayed'} {targets}")
    if done.already:
        typer.echo(f"{done.already:,} of them had been sent by a replay that was interrupted")
    if done.left:
        typer.echo(f"{done.left:,} do not say where they came from, and stay: pass --to")
    for (stream, group), count in done.without_handler.items():
        if group:
            why = f"no group {named(group)}: pass --for-group with its new name, or --every-group"
        else:
            create = typed("groups", "create", stream, "NAME", "--start", "0")
            why = f"no group that would read them: make one first, {create}"
        typer.echo(f"{count:,} stay: {named(stream)} has {why}")


@app.command()
def purge(
    stream: Stream,
    ids: Ids = None,
    error_type: ErrorType = None,
    contains: Contains = None,
    group: Group = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Throw dead letters away: all of them, or those that the options select."""
    chosen = _selection(ids, error_type, contains, group)

    count = _with_letters(url, stream, dlq, lambda letters: letters.purge(chosen, limit=limit, dry_run=True))
    if ids and not count:
        raise _no_letters(stream, ids)
    if dry_run or not count:
        sentence = f"would purge {count:,}" if count else "there is nothing to purge"
        show.outcome(output, sentence, stream=stream, would_purge=count, dry_run=dry_run)
        return
    letters = count_of(count, "dead letter", "dead letters")
    show.confirm(f"Throw {letters} of {named(stream)} away for good?", yes=yes)
    gone = _with_letters(url, stream, dlq, lambda letters: letters.purge(chosen, limit=limit))
    show.outcome(output, f"purged {gone:,}", stream=stream, purged=gone, dry_run=False)


def _selection(ids: list[str] | None, error_type: str | None, contains: str | None, group: str | None) -> Selection:
    wanted = frozenset(EntryId.parse(id, argument="--id") for id in ids or ())
    return Selection(ids=wanted, error_type=error_type, contains=contains, group=group)


def _row(letter: DeadLetter) -> dict[str, Any]:
    """The same keys whoever wrote it; what a letter does not tell is None."""
    burial, failure = letter.burial, letter.failure
    return {
        "id": letter.id,
        "buried_at": made_at(letter.id),
        "stream": burial.stream if burial else None,
        "original_id": burial.original_id if burial else failure.event if failure else None,
        "group": burial.group if burial else None,
        "consumer": burial.consumer if burial else None,
        "deliveries": burial.deliveries if burial else None,
        "pipeline": failure.pipeline if failure else None,
        "stage": failure.stage if failure else None,
        "error_type": letter.error_type if burial else None,
        "error": letter.error if burial or failure else "not written by millstream",
    }


def _fact(key: str) -> ShownColumn:
    if key == "buried_at":
        return text(key, shown=show.plain)
    return ident(key) if key.endswith("id") else number(key) if key == "deliveries" else name(key)


def _joined(names: list[str]) -> str:
    return ", ".join(map(printable, names))


def _no_letters(stream: str, ids: list[str]) -> NoSuchEntry:
    return no_entry(stream, ids, f" among its dead letters; {typed('dlq', 'ls', stream)} lists them")


def _with_letters(url: str, stream: str, dlq: str | None, work: Callable[[DeadLetters], Awaitable[R]]) -> R:
    """The stream's dead letters. That there are none is an answer; that the stream was never there is not."""

    async def run(broker: Any) -> R:
        letters = DeadLetters(broker, stream, dlq=dlq or await _other_place(broker, stream))
        if not await broker.exists(stream) and not await broker.exists(letters.name):
            raise await broker.run(no_stream, stream)
        return await work(letters)

    return _with_broker(url, run)


async def _other_place(broker: Any, stream: str) -> str | None:
    """A dead-letter stream may be named itself, and a pipeline's is called after the pipeline, not beside a stream."""
    if await broker.exists(beside(stream, "dlq")):
        return None
    for place in (stream if stream.endswith(".dlq") else None, f"{stream}.dlq"):
        if place is not None and await broker.exists(place):
            return place
    return None


def _with_broker(url: str, work: Callable[[Any], Awaitable[R]]) -> R:
    async def run() -> R:
        something_to_look_at(url)
        async with open_broker(url, deadline_ms=DEADLINE_MS) as broker:
            return await work(broker)

    return asyncio.run(run())
