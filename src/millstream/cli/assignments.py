"""``millstream assignments``: see who owns which stream; announce and release streams."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from millstream.assignment import Announcement, announce_stream, assignments, balancer_stream, force_release
from millstream.broker import BlockingBroker
from millstream.cli import show
from millstream.cli.lookup import opened, typed
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, Url, Yes, flag, ident, name, span, text
from millstream.errors import InvalidArgument, NoSuchStream
from millstream.observe import moment, named, printable

app = typer.Typer()

Service = Annotated[str, typer.Argument(help="The service's name.")]


@app.command("ls")
def list_assignments(service: Service, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """Every announced stream: who owns it, since when, with which token, and whether the owner is alive."""
    with opened(url) as broker:
        _need_service(broker, service)
        now_ms = broker.server_time_ms()
        items = [
            {
                "stream": one.stream,
                "lbs_id": one.lbs_id,
                "owner": one.owner or None,
                "alive": one.alive,
                "token": one.token or None,
                "held_since": moment(one.token) if one.owner else None,
                "held_for_ms": max(0, now_ms - one.token) if one.owner else None,
                "info": dict(one.info),
            }
            for one in assignments(broker, service)
        ]
    columns = [name("stream"), name("owner"), flag("alive"), span("held_for_ms", "held for"), ident("token")]
    columns += [ident("lbs_id", spare=True), text("info", spare=True, shown=_info)]
    show.rows(output, columns, items)


def _info(value: Any) -> str:
    return printable(json.dumps(value)) if value else "-"


@app.command()
def announce(
    service: Service,
    stream: Annotated[str, typer.Argument(help="The data stream that wants an owner.")],
    info: Annotated[str, typer.Option("--info", help="A JSON object for the owner.")] = "{}",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Announce a data stream; a member will own it."""
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
    stream: Annotated[str, typer.Argument(help="The stream to take from its owner.")],
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Take a stream from its owner and let another member have it. The old owner cannot write any more."""
    with opened(url) as broker:
        _need_service(broker, service)
        if all(one.stream != stream for one in assignments(broker, service)):
            listing = typed("assignments", "ls", service)
            raise NoSuchStream(f"stream {named(stream)} is not announced. {listing} lists what is.")
        show.confirm(f"Take {named(stream)} from its owner? Its work there will be refused.", yes=yes)
        owner = force_release(broker, service, stream)
    sentence = f"released; it was owned by {printable(owner)}" if owner else "nobody owned it"
    show.outcome(output, sentence, service=service, stream=stream, owner=owner or None)


def _need_service(broker: BlockingBroker, service: str) -> None:
    if not broker.exists(balancer_stream(service)):
        first = typed("assignments", "announce", service, "STREAM")
        raise NoSuchStream(f"service {named(service)} has announced nothing yet. {first} does.")
