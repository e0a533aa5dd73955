"""``millstream streams``: list, read, write, trim and remove streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from millstream.broker.operations.info import read_stream_stats
from millstream.broker.operations.plain_keys import companion_counts
from millstream.broker.operations.streams import entries_at
from millstream.cli import show
from millstream.cli.lookup import need_stream, no_entry, no_stream, opened, streams_found
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, Url, Yes, ago, ident, memory, name, number, span
from millstream.errors import InvalidArgument, NoSuchStream
from millstream.model import Entry, EntryId, TrimPolicy
from millstream.observe.format import count_of, made_at, named, printable
from millstream.observe.format import entries as entry_count

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Pattern = Annotated[str, typer.Argument(help="A glob, such as 'orders*'.")]


@app.command("ls")
def list_streams(pattern: Pattern = "*", url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """List streams with their length, groups, lag, pending entries and memory."""
    with opened(url) as broker:
        streams = broker.run(read_stream_stats, streams_found(broker, pattern))
        now_ms = broker.server_time_ms()
    items = [
        {
            "stream": stats.name,
            "length": stats.length,
            "groups": len(stats.groups),
            "lag": max((group.lag for group in stats.groups if group.lag is not None), default=None),
            "pending": sum(group.pending for group in stats.groups),
            "last_entry_at": made_at(stats.last_generated) if stats.entries_added and stats.last_generated else None,
            "memory_bytes": stats.memory_bytes,
        }
        for stats in streams
    ]
    columns = [name("stream"), number("length"), number("groups"), number("lag"), number("pending")]
    columns += [ago("last_entry_at", now_ms, "last entry"), memory("memory_bytes")]
    show.rows(output, columns, items)


@app.command()
def describe(stream: Stream, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """Show one stream: its ids, counts, groups and consumers."""
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
                {"consumer": info.name, "pending": info.pending, "idle_ms": info.idle_ms} for info in group.consumers
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
    consumers = [{"group": group["group"], **consumer} for group in members for consumer in group["consumers"]]
    if consumers:
        typer.echo()
        show.rows(
            output, [name("group"), name("consumer"), number("pending"), span("idle_ms", "silent for")], consumers
        )


@app.command()
def tail(
    stream: Stream,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many of the last entries.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new entries until Ctrl-C.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Print the last entries of a stream, oldest first."""
    with opened(url) as broker:
        try:
            need_stream(broker, stream)
        except NoSuchStream as missing:
            if not follow:
                raise
            show.warning(f"waiting for the first entry: {missing}")
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
        line = "  ".join(f"{field}={value}" for field, value in fields.items())
        typer.echo("\n".join(show.hanging(f"{entry.id}  ", line)))


@app.command()
def add(
    stream: Stream,
    fields: Annotated[list[str], typer.Argument(help="Fields as name=value.")],
    id: Annotated[str, typer.Option("--id", help="An explicit id.")] = "*",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Add one entry, and print its id."""
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
        existing = [entry for entry in broker.run(entries_at, stream, ids) if entry is not None]
        if not existing:
            raise no_entry(stream, ids, "")
        if output is OutputKind.table:
            for entry in existing:
                _print_entry(entry, output)
        show.confirm(f"Delete {entry_count(len(existing))} of {named(stream)}?", yes=yes)
        deleted = broker.xdel(stream, ids)
    show.outcome(output, f"deleted {deleted}", stream=stream, deleted=deleted)


@app.command()
def trim(
    stream: Stream,
    max_len: Annotated[int | None, typer.Option("--max-len", min=0, help="Keep this many entries.")] = None,
    min_id: Annotated[str | None, typer.Option("--min-id", help="Drop entries with smaller ids.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also drop entries that a group still needs.")] = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Remove the oldest entries of a stream. Entries that a group still needs are kept, unless --force is given."""
    if (max_len is None) == (min_id is None):
        presence = "both" if max_len is not None else "neither"
        raise InvalidArgument("--max-len, --min-id", presence, "exactly one of them")
    smallest = EntryId.parse(min_id, argument="--min-id") if min_id is not None else None
    with opened(url) as broker:
        need_stream(broker, stream)
        length = broker.xlen(stream)
        target = f"to {entry_count(max_len)}" if max_len is not None else f"before {smallest}"
        scope = "including entries that groups still need" if force else "entries that a group still needs are kept"
        show.confirm(f"{named(stream)} has {entry_count(length)}. Trim it {target}? ({scope})", yes=yes)
        if force:
            trimmed = broker.xtrim(stream, TrimPolicy(max_len=max_len, min_id=smallest))
        else:
            trimmed = broker.trim_safely(stream, max_len=max_len, min_id=smallest)
        remaining = broker.xlen(stream)
        if max_len is not None:
            is_held_back = remaining > max_len
        else:
            assert smallest is not None
            is_held_back = bool(broker.xrange(stream, "-", f"({smallest}", count=1))
    reason = ", because a group still needs them (`millstream groups ls`; --force drops them)" if is_held_back else ""
    text = f"trimmed {entry_count(trimmed)}; {remaining:,} remain{reason}"
    show.outcome(output, text, stream=stream, trimmed=trimmed, left=remaining)


@app.command()
def rm(stream: Stream, yes: Yes = False, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """Remove a stream with its groups, pending lists and companion keys."""
    with opened(url) as broker:
        need_stream(broker, stream)
        streams = broker.run(read_stream_stats, [stream])
        if not streams:
            raise broker.run(no_stream, stream)
        stats = streams[0]
        groups = ", ".join(printable(group.name) for group in stats.groups) or "none"
        pending = sum(group.pending for group in stats.groups)
        companions = broker.run(companion_counts, stream)
        lost = "".join(
            f", {companion}" for companion in _describe_companions(companions.dead_letters, companions.delayed)
        )
        show.confirm(
            f"Remove {named(stream)}: {entry_count(stats.length)}, groups: {groups}, {pending:,} pending{lost}?",
            yes=yes,
        )
        broker.delete_stream(stream, companions=True)
    show.outcome(output, "removed", stream=stream, removed=True)


def _describe_companions(dead_letters: int, delayed: int) -> Iterator[str]:
    """Describe the data in companion keys that is removed together with a stream."""
    if dead_letters:
        yield count_of(dead_letters, "dead letter", "dead letters")
    if delayed:
        yield count_of(delayed, "message", "messages") + " that are delayed"
