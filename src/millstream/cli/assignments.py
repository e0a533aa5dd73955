"""``millstream assignments``: list the owners of streams; announce and release streams."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from millstream.assignment import Announcement, announce_stream, assignments, balancer_stream, force_release
from millstream.broker import BlockingBroker
from millstream.cli import show
from millstream.cli.lookup import command_text, opened
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, Url, Yes, flag, ident, name, span, text
from millstream.errors import InvalidArgument, NoSuchStream
from millstream.observe.format import moment, named, printable

app = typer.Typer()

Service = Annotated[str, typer.Argument(help="The service's name.")]


@app.command("ls")
def list_assignments(service: Service, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """List announced streams with owner, start of the lease, fencing token, and whether the owner is alive."""
    with opened(url) as broker:
        _need_service(broker, service)
        now_ms = broker.server_time_ms()
        items = [
            {
                "stream": row.stream,
                "lbs_id": row.lbs_id,
                "owner": row.owner or None,
                "alive": row.alive,
                "token": row.token or None,
                "held_since": moment(row.token) if row.owner else None,
                "held_for_ms": max(0, now_ms - row.token) if row.owner else None,
                "info": dict(row.info),
            }
            for row in assignments(broker, service)
        ]
    columns = [name("stream"), name("owner"), flag("alive"), span("held_for_ms", "held for"), ident("token")]
    columns += [ident("lbs_id", spare=True), text("info", spare=True, render=_info)]
    show.rows(output, columns, items)


def _info(value: Any) -> str:
    return printable(json.dumps(value)) if value else "-"


@app.command()
def announce(
    service: Service,
    stream: Annotated[str, typer.Argument(help="The data stream.")],
    info: Annotated[str, typer.Option("--info", help="A JSON object that the owner receives.")] = "{}",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Announce a data stream, so that a member of the service claims it."""
    try:
        details = json.loads(info)
    except ValueError:
        raise InvalidArgument("--info", info, 'a JSON object, such as {"tenant": "a"}') from None
    if not isinstance(details, dict):
        raise InvalidArgument("--info", info, 'a JSON object, such as {"tenant": "a"}')
    with opened(url) as broker:
        announced = announce_stream(broker, service, Announcement(stream, details))
    show.outcome(output, str(announced), service=service, stream=stream, lbs_id=announced)


@app.command()
def release(
    service: Service,
    stream: Annotated[str, typer.Argument(help="The stream to release from its owner.")],
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Release a stream from its owner, so that another member claims it. Writes of the previous owner are refused."""
    with opened(url) as broker:
        _need_service(broker, service)
        if all(row.stream != stream for row in assignments(broker, service)):
            listing = command_text("assignments", "ls", service)
            raise NoSuchStream(f"stream {named(stream)} is not announced. {listing} lists the announced streams.")
        show.confirm(f"Release {named(stream)} from its owner? Writes of the owner will be refused.", yes=yes)
        owner = force_release(broker, service, stream)
    message = f"released from {printable(owner)}" if owner else "it had no owner"
    show.outcome(output, message, service=service, stream=stream, owner=owner or None)


def _need_service(broker: BlockingBroker, service: str) -> None:
    if not broker.exists(balancer_stream(service)):
        first = command_text("assignments", "announce", service, "STREAM")
        raise NoSuchStream(f"service {named(service)} has no announced streams. {first} announces the first.")
