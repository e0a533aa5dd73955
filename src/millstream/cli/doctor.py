"""``millstream doctor``: check a server, or one stream, and say what to do about each finding. ``millstream verify``:
ask a server everything that the contract promises, and print what does not behave.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.broker import open_blocking_broker
from millstream.cli import show
from millstream.cli.lookup import DEADLINE_MS, need_stream, opened
from millstream.cli.main import FINDINGS
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, Url
from millstream.errors import MillstreamError
from millstream.observe import Finding, Severity, printable

if TYPE_CHECKING:
    from millstream.testing import PromiseResult

_STYLE = {Severity.ok: "green", Severity.note: "cyan", Severity.warning: "yellow", Severity.problem: "red"}


def command(
    stream: Annotated[
        str | None,
        typer.Argument(
            help="Look at this stream, or at the database of this pipeline's file; by default at the server."
        ),
    ] = None,
    watch_s: Annotated[
        float, typer.Option("--watch", min=0, max=3600, help="Seconds between the two looks at a stream.")
    ] = 1.0,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    from millstream.observe import examine_machine, examine_server, examine_stream

    if stream and stream.endswith((".yaml", ".yml")):
        findings = _examine_pipeline(Path(stream))
    else:
        with opened(url) as broker:
            if stream:
                need_stream(broker, stream)
                findings = examine_stream(broker, stream, watch_s=watch_s)
            else:
                findings = [*examine_server(broker), *examine_machine()]
    if output is OutputKind.json:
        show.as_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            _print(finding)
    if any(finding.level in (Severity.warning, Severity.problem) for finding in findings):
        raise typer.Exit(FINDINGS)


def _examine_pipeline(file: Path) -> list[Finding]:
    from millstream.observe import examine_binlog, examine_slot
    from millstream.pipelines import Checkpoint, load_pipeline

    pipeline = load_pipeline(file)
    source = pipeline.spec.source
    if source.has_log:
        checkpoint = Checkpoint(pipeline.checkpoint_path)
        last = checkpoint.last_committed()
        ends = None if last is None else checkpoint.ends(last)
        found = source.log_status(ends[0] if ends else None)
        return [] if found is None else examine_binlog(found)
    if not source.has_slot:
        return [Finding(Severity.ok, pipeline.name, f"a source of type {source.type} holds nothing in a database")]
    return examine_slot(source.slot_status(pipeline.name))


def _print(finding: Finding) -> None:
    level = f"{finding.level.value:>8}  "
    told = "\n".join(show.hanging(" " * len(level), f"{printable(finding.what)}: {printable(finding.found)}"))
    typer.secho(level, fg=_STYLE[finding.level], nl=False)
    typer.echo(told[len(level) :])
    if finding.remedy:
        typer.secho("\n".join(show.hanging(" " * len(level) + "-> ", printable(finding.remedy))), dim=True)


class KitMissing(MillstreamError):
    """The kit is made of tests, and pytest is not installed."""


def verify(
    url: Url = DEFAULT_URL,
    prefix: Annotated[
        str, typer.Option(help="Where the run's own keys lie; they are deleted at the end.")
    ] = "millstream:verify",
    output: Output = OutputKind.table,
) -> None:
    try:
        import pytest  # noqa: F401  # the kit's tests use it
    except ImportError as error:
        raise KitMissing("the conformance kit needs pytest. Install it: pip install 'millstream[verify]'") from error
    with open_blocking_broker(url, deadline_ms=DEADLINE_MS) as broker:
        broker.server_time_ms()  # one that is away is said to be away soon; the kit itself is more patient
    verdicts = asyncio.run(_asked(url, prefix, output))
    failed = [one for one in verdicts if one.failure is not None]
    skipped = Counter(one.skipped for one in verdicts if one.skipped is not None)
    if output is OutputKind.json:
        show.as_json([one._asdict() for one in verdicts])
    else:
        for one in failed:
            typer.secho("\n".join(show.hanging("  ", f"{one.chapter}: {printable(one.test)}")), fg="red")
            typer.echo("\n".join(show.hanging("    ", printable(one.failure or ""))))
        for why, count in skipped.items():
            typer.secho(f"  not asked, {count}: {why}", dim=True)
        behaves = len(verdicts) - len(failed) - skipped.total()
        typer.echo(f"{behaves} of {behaves + len(failed)} promises hold; the run's keys are deleted.")
    if failed:
        raise typer.Exit(FINDINGS)


async def _asked(url: str, prefix: str, output: OutputKind) -> list[PromiseResult]:
    from millstream.testing import verify_server

    verdicts = []
    chapter = ""
    async for one in verify_server(url, prefix=prefix):
        if one.chapter != chapter and output is OutputKind.table:
            chapter = one.chapter
            typer.secho(f"asking: {chapter} ...", dim=True, err=True)
        verdicts.append(one)
    return verdicts
