"""``millstream dlq``: list, inspect, replay and purge dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer

from millstream.broker import companion_key, open_broker
from millstream.cli import show
from millstream.cli.lookup import (
    DEADLINE_MS,
    NoSuchEntry,
    command_text,
    no_entry,
    no_stream,
    refuse_memory_broker,
)
from millstream.cli.main import FAILED
from millstream.cli.show import DEFAULT_URL, Column, Output, OutputKind, Url, Yes, ago, ident, name, number, text
from millstream.messaging import DeadLetter, DeadLetters
from millstream.messaging.dead_letters import Replayed, Selection, dead_letter_streams
from millstream.model import EntryId
from millstream.observe.format import count_of, made_at, named, printable

R = TypeVar("R")

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream to which the dead letters belong.")]
Dlq = Annotated[
    str | None, typer.Option("--dlq", help="The dead-letter stream, if it is not the default one of the stream.")
]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Id of a dead letter; repeatable.")]
ErrorType = Annotated[str | None, typer.Option("--error-type", help="The error's type, in full or its last part.")]
Contains = Annotated[str | None, typer.Option("--contains", help="A text that the error message contains.")]
Group = Annotated[str | None, typer.Option("--group", help="The group that dead-lettered them.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number.")]


@app.command("ls")
def list_letters(
    stream: Annotated[
        str | None, typer.Argument(help="The stream; by default, all dead-letter streams are listed.")
    ] = None,
    error_type: ErrorType = None,
    contains: Contains = None,
    group: Group = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number.")] = 50,
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """List the dead letters of a stream, newest first; without a stream, list the streams with dead letters."""
    if stream is None and dlq is None:
        _list_streams(url, output)
        return
    selection = _selection(None, error_type, contains, group)
    letters = _with_letters(
        url, str(dlq) if stream is None else stream, dlq, lambda letters: letters.list(selection, limit=limit)
    )
    now_ms = _with_broker(url, lambda broker: broker.server_time_ms())
    columns = [ident("id"), ago("dead_lettered_at", now_ms, "dead-lettered", spare=True)]
    if any(letter.failure for letter in letters):  # those of a pipeline have no group and no delivery count
        columns += [name("pipeline"), name("stage")]
    else:
        columns += [name("group"), number("deliveries"), name("error_type")]
    show.rows(output, [*columns, text("error")], [_row(letter) for letter in letters])


def _list_streams(url: str, output: OutputKind) -> None:
    async def work(broker: Any) -> list[dict[str, Any]]:
        items = []
        for stream in await dead_letter_streams(broker):
            letters = DeadLetters(broker, stream, dlq=stream)
            if count := await letters.count():
                largest = (await letters.by_error())[0]
                error = {"error_type": largest.error_type, "error": largest.error, "error_count": largest.count}
                items.append({"dead_letters": stream, "count": count, **error})
        return items

    columns = [name("dead_letters"), number("count"), name("error_type", "most frequent"), text("error")]
    show.rows(output, columns, _with_broker(url, work))


@app.command("show")
def show_letter(
    stream: Stream,
    id: Annotated[str, typer.Argument(help="The dead letter's id.")],
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Show one dead letter with its fields and its error."""
    letter = _with_letters(url, stream, dlq, lambda letters: letters.show(id))
    row = _row(letter)
    if output is OutputKind.json:
        trace = letter.details.traceback if letter.details is not None else None
        show.as_json({**row, "traceback": trace, "fields": letter.fields})
        return
    show.facts([_column(key) for key, value in row.items() if value is not None], row)
    typer.secho("\nOriginal entry", italic=True)
    fields = {printable(field): value for field, value in letter.fields.items()}
    if fields:
        show.facts([Column(field, field) for field in fields], fields)
    if letter.details is not None and letter.details.traceback:
        typer.echo("\n" + "\n".join(printable(line) for line in letter.details.traceback.splitlines()))


@app.command("errors")
def group_by_error(
    stream: Stream, group: Group = None, dlq: Dlq = None, url: Url = DEFAULT_URL, output: Output = OutputKind.table
) -> None:
    """Group dead letters by error, the most frequent first."""
    selection = _selection(None, None, None, group)
    letters = _with_letters(url, stream, dlq, lambda letters: letters.by_error(selection))
    items = [
        {
            "count": error.count,
            "error_type": error.error_type,
            "error": error.error,
            "groups": sorted(error.groups),
            "first_id": error.first,
            "last_id": error.last,
            "example": error.example,
        }
        for error in letters
    ]
    columns = [number("count"), name("error_type"), text("error"), text("groups", render=_joined)]
    show.rows(output, [*columns, ident("first_id", spare=True), ident("last_id", spare=True)], items)


@app.command()
def replay(
    stream: Stream,
    ids: Ids = None,
    error_type: ErrorType = None,
    contains: Contains = None,
    group: Group = None,
    to: Annotated[str | None, typer.Option("--to", help="Replay to this stream instead of the original one.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", min=1e-6, max=1e9, help="Maximum per second.")] = None,
    limit: Limit = None,
    every_group: Annotated[
        bool, typer.Option("--every-group", help="Deliver them to all groups, not only to the one that failed.")
    ] = False,
    for_group: Annotated[
        str | None,
        typer.Option("--for-group", help="Deliver them to this group, such as the new name of the one that failed."),
    ] = None,
    dry_run: DryRun = False,
    dlq: Dlq = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Replay dead letters: all of them, or those that the options select. Safe to repeat.

    In the original stream, only the group that failed receives them; with --to another stream, every group there.

    Dead letters that no group would receive are kept, and the exit code is 1.
    """
    selection = _selection(ids, error_type, contains, group)

    async def work(letters: DeadLetters) -> Replayed:
        target: dict[str, Any] = {"to": to, "every_group": every_group, "for_group": for_group}
        return await letters.replay(selection, rate=rate, limit=limit, dry_run=dry_run, **target)

    done = _with_letters(url, stream, dlq, work)
    if ids and not (done.added or done.already or done.left or done.without_handler):
        raise _no_letters(stream, ids)
    if output is OutputKind.json:
        unhandled = [{"stream": at, "group": group, "count": n} for (at, group), n in done.without_handler.items()]
        counts = {"added": done.added, "already": done.already, "left": done.left, "without_handler": unhandled}
        show.as_json({**counts, "streams": done.streams, "dry_run": dry_run})
    else:
        _print_replayed(done)
    if done.left or done.without_handler:
        raise typer.Exit(FAILED)


def _print_replayed(done: Replayed) -> None:
    targets = ", ".join(f"{count:,} to {printable(name)}" for name, count in done.streams.items()) or "nothing"
    typer.echo(f"{'would replay' if done.dry_run else 'replayed'} {targets}")
    if done.already:
        typer.echo(f"{done.already:,} of them had been replayed by an interrupted replay")
    if done.left:
        typer.echo(f"{done.left:,} were kept, because they do not name their stream: pass --to")
    for (stream, group), count in done.without_handler.items():
        if group:
            reason = f"no group {named(group)}: pass --for-group with its new name, or --every-group"
        else:
            create = command_text("groups", "create", stream, "NAME", "--start", "0")
            reason = f"no group that would read them: create one first: {create}"
        typer.echo(f"{count:,} were kept: {named(stream)} has {reason}")


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
    """Delete dead letters permanently: all of them, or those that the options select."""
    selection = _selection(ids, error_type, contains, group)

    count = _with_letters(url, stream, dlq, lambda letters: letters.purge(selection, limit=limit, dry_run=True))
    if ids and not count:
        raise _no_letters(stream, ids)
    if dry_run or not count:
        message = f"would purge {count:,}" if count else "there is nothing to purge"
        show.outcome(output, message, stream=stream, would_purge=count, dry_run=dry_run)
        return
    letters = count_of(count, "dead letter", "dead letters")
    show.confirm(f"Delete {letters} of {named(stream)} permanently?", yes=yes)
    purged = _with_letters(url, stream, dlq, lambda letters: letters.purge(selection, limit=limit))
    show.outcome(output, f"purged {purged:,}", stream=stream, purged=purged, dry_run=False)


def _selection(ids: list[str] | None, error_type: str | None, contains: str | None, group: str | None) -> Selection:
    selected = frozenset(EntryId.parse(id, argument="--id") for id in ids or ())
    return Selection(ids=selected, error_type=error_type, contains=contains, group=group)


def _row(letter: DeadLetter) -> dict[str, Any]:
    """Return the values of a dead letter; the keys are always the same, and unknown values are None."""
    details, failure = letter.details, letter.failure
    return {
        "id": letter.id,
        "dead_lettered_at": made_at(letter.id),
        "stream": details.stream if details else None,
        "original_id": details.original_id if details else failure.event if failure else None,
        "group": details.group if details else None,
        "consumer": details.consumer if details else None,
        "deliveries": details.deliveries if details else None,
        "pipeline": failure.pipeline if failure else None,
        "stage": failure.stage if failure else None,
        "error_type": letter.error_type if details else None,
        "error": letter.error if details or failure else "not written by millstream",
    }


def _column(key: str) -> Column:
    if key == "dead_lettered_at":
        return text(key, render=show.plain)
    return ident(key) if key.endswith("id") else number(key) if key == "deliveries" else name(key)


def _joined(names: list[str]) -> str:
    return ", ".join(map(printable, names))


def _no_letters(stream: str, ids: list[str]) -> NoSuchEntry:
    return no_entry(stream, ids, f" among its dead letters; {command_text('dlq', 'ls', stream)} lists them")


def _with_letters(url: str, stream: str, dlq: str | None, work: Callable[[DeadLetters], Awaitable[R]]) -> R:
    """Call ``work`` with the stream's dead letters. Raises NoSuchStream if neither stream exists."""

    async def run(broker: Any) -> R:
        letters = DeadLetters(broker, stream, dlq=dlq or await _other_dlq(broker, stream))
        if not await broker.exists(stream) and not await broker.exists(letters.name):
            raise await broker.run(no_stream, stream)
        return await work(letters)

    return _with_broker(url, run)


async def _other_dlq(broker: Any, stream: str) -> str | None:
    """Return the dead-letter stream if it is not the stream's companion: the name itself, or that of a pipeline."""
    if await broker.exists(companion_key(stream, "dlq")):
        return None
    for candidate in (stream if stream.endswith(".dlq") else None, f"{stream}.dlq"):
        if candidate is not None and await broker.exists(candidate):
            return candidate
    return None


def _with_broker(url: str, work: Callable[[Any], Awaitable[R]]) -> R:
    async def run() -> R:
        refuse_memory_broker(url)
        async with open_broker(url, deadline_ms=DEADLINE_MS) as broker:
            return await work(broker)

    return asyncio.run(run())
