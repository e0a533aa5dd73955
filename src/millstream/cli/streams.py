"""``millstream streams``: look at streams, add to them, trim and remove them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millstream.broker import entries_at, survey
from millstream.cli import show
from millstream.cli.lookup import need_stream, no_entry, no_stream, opened, streams_found
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, Url, Yes, ago, ident, memory, name, number, span
from millstream.errors import InvalidArgument, NoSuchStream
from millstream.model import Entry, EntryId, TrimPolicy
from millstream.observe import entries as entry_count
from millstream.observe import made_at, named, printable

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Pattern = Annotated[str, typer.Argument(help="A glob, such as 'orders*'.")]


@app.command("ls")
def list_streams(pattern: Pattern = "*", url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """All streams with their length, groups, lag, pending entries and memory."""
    with opened(url) as broker:
        found = broker.run(survey, streams_found(broker, pattern))
        now_ms = broker.server_time_ms()
    items = [
        {
            "stream": one.name,
            "length": one.length,
            "groups": len(one.groups),
            "lag": max((group.lag for group in one.groups if group.lag is not None), default=None),
            "pending": sum(group.pending for group in one.groups),
            "last_entry_at": made_at(one.last_generated) if one.entries_added and one.last_generated else None,
            "memory_bytes": one.memory_bytes,
        }
        for one in found
    ]
    columns = [name("stream"), number("length"), number("groups"), number("lag"), number("pending")]
    columns += [ago("last_entry_at", now_ms, "last entry"), memory("memory_bytes")]
    show.rows(output, columns, items)


@app.command()
def describe(stream: Stream, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """Everything about one stream: ids, counts, groups and their consumers."""
    with opened(url) as broker:
        need_stream(broker, stream)
        info, groups, now_ms = broker.stream_info(stream), broker.group_info(stream), broker.server_time_ms()
    facts = {
        "stream": info.name,
        "length": info.length,
        "entries_added": info.entries_added,
        "deleted_or_trimmed": info.entries_added - info.length,
        "first_id": info.first.id if info.first else None,
        "last_id": info.last_generated,
        "last_entry_at": made_at(info.last_generated) if info.entries_added else None,
    }
    members: list[dict[str, Any]] = [
        {
            "group": group.name,
            "lag": group.lag,
            "pending": group.pending,
            "last_delivered_id": group.last_delivered,
            "consumers": [
                {"consumer": one.name, "pending": one.pending, "idle_ms": one.idle_ms} for one in group.consumers
            ],
        }
        for group in groups
    ]
    if output is OutputKind.json:
        show.as_json({**facts, "groups": members})
        return
    columns = [name("stream"), number("length"), number("entries_added"), number("deleted_or_trimmed")]
    show.facts([*columns, ident("first_id"), ident("last_id"), ago("last_entry_at", now_ms, "last entry")], facts)
    typer.echo()
    show.rows(output, [name("group"), number("lag"), number("pending"), ident("last_delivered_id")], members)
    held = [{"group": group["group"], **one} for group in members for one in group["consumers"]]
    if held:
        typer.echo()
        show.rows(output, [name("group"), name("consumer"), number("pending"), span("idle_ms", "silent for")], held)


@app.command()
def tail(
    stream: Stream,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many of the last entries.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new entries until Ctrl-C.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """The last entries of a stream, oldest first."""
    with opened(url) as broker:
        try:
            need_stream(broker, stream)
        except NoSuchStream as missing:
            if not follow:
                raise
            show.warning(f"waiting for its first entry: {missing}")
        entries = broker.xrevrange(stream, count=count)[::-1]
        for entry in entries:
            _print_entry(entry, output)
        after = entries[-1].id if entries else EntryId(0, 0)
        while follow:
            for entry in broker.xread({stream: after}, count=100, block_ms=1000).get(stream, []):
                _print_entry(entry, output)
                after = entry.id


def _print_entry(entry: Entry, output: OutputKind) -> None:
    fields = {printable(name): printable(value) for name, value in entry.fields.items()}
    if output is OutputKind.json:
        show.json_line({"id": str(entry.id), "fields": fields})
    else:
        told = "  ".join(f"{field}={value}" for field, value in fields.items())
        typer.echo("\n".join(show.hanging(f"{entry.id}  ", told)))


@app.command()
def add(
    stream: Stream,
    fields: Annotated[list[str], typer.Argument(help="Fields as name=value.")],
    id: Annotated[str, typer.Option("--id", help="An explicit id.")] = "*",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Append one entry; prints its id."""
    pairs = [field.partition("=") for field in fields]
    if bad := [name for name, sign, _ in pairs if not sign or not name]:
        raise InvalidArgument("fields", bad[0], "name=value, such as type=email")
    with opened(url) as broker:
        added = broker.xadd(stream, {name: value for name, _, value in pairs}, id=id)
    show.outcome(output, str(added), stream=stream, id=str(added))


@app.command("del")
def delete(
    stream: Stream,
    ids: Annotated[list[str], typer.Argument(help="The ids of the entries.")],
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Delete entries by id, whether or not a group still needs them."""
    with opened(url) as broker:
        need_stream(broker, stream)
        found = [one for one in broker.run(entries_at, stream, ids) if one is not None]
        if not found:
            raise no_entry(stream, ids, "")
        if output is OutputKind.table:
            for entry in found:
                _print_entry(entry, output)
        show.confirm(f"Delete {entry_count(len(found))} of {named(stream)}?", yes=yes)
        gone = broker.xdel(stream, ids)
    show.outcome(output, f"deleted {gone}", stream=stream, deleted=gone)


@app.command()
def trim(
    stream: Stream,
    max_len: Annotated[int | None, typer.Option("--max-len", min=0, help="Keep this many entries.")] = None,
    min_id: Annotated[str | None, typer.Option("--min-id", help="Drop entries with smaller ids.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also drop what a group still needs.")] = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Cut a stream from its old end; never what a group still needs, unless forced."""
    if (max_len is None) == (min_id is None):
        given = "both" if max_len is not None else "neither"
        raise InvalidArgument("--max-len, --min-id", given, "exactly one of them")
    smallest = EntryId.parse(min_id, argument="--min-id") if min_id is not None else None
    with opened(url) as broker:
        need_stream(broker, stream)
        length = broker.xlen(stream)
        what = f"to {entry_count(max_len)}" if max_len is not None else f"before {smallest}"
        kept = "what groups still need goes too" if force else "what a group still needs is kept"
        show.confirm(f"{named(stream)} has {entry_count(length)}. Trim it {what}? ({kept})", yes=yes)
        if force:
            gone = broker.xtrim(stream, TrimPolicy(max_len=max_len, min_id=smallest))
        else:
            gone = broker.trim_safely(stream, max_len=max_len, min_id=smallest)
        left = broker.xlen(stream)
    show.outcome(output, f"trimmed {entry_count(gone)}; {left:,} left", stream=stream, trimmed=gone, left=left)


@app.command()
def rm(stream: Stream, yes: Yes = False, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """Remove a stream with its groups, pending lists and companion keys."""
    with opened(url) as broker:
        need_stream(broker, stream)
        found = broker.run(survey, [stream])
        if not found:
            raise broker.run(no_stream, stream)
        groups = ", ".join(printable(group.name) for group in found[0].groups) or "none"
        pending = sum(group.pending for group in found[0].groups)
        show.confirm(
            f"Remove {named(stream)}: {entry_count(found[0].length)}, groups: {groups}, {pending:,} pending?",
            yes=yes,
        )
        broker.delete_stream(stream, companions=True)
    show.outcome(output, "removed", stream=stream, removed=True)
