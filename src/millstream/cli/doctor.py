"""``millstream doctor``: examine a server, a stream or a pipeline's database, and print findings with remedies.

``millstream verify``: run the conformance kit against a server, and print the tests that fail.
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
from millstream.observe import Finding, Severity
from millstream.observe.format import printable

if TYPE_CHECKING:
    from millstream.testing import PromiseResult

_STYLE = {Severity.ok: "green", Severity.note: "cyan", Severity.warning: "yellow", Severity.problem: "red"}


def command(
    stream: Annotated[
        str | None,
        typer.Argument(help="A stream, or a pipeline's file (for its database); by default the server."),
    ] = None,
    watch_s: Annotated[
        float, typer.Option("--watch", min=0, max=3600, help="Seconds between the two readings of a stream.")
    ] = 1.0,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    from millstream.observe import examine_server, examine_stream
    from millstream.observe.diagnose import examine_machine
    from millstream.observe.streams import examine_sizes

    if stream and stream.endswith((".yaml", ".yml")):
        findings = _examine_pipeline(Path(stream))
    else:
        with opened(url) as broker:
            if stream:
                need_stream(broker, stream)
                findings = examine_stream(broker, stream, watch_s=watch_s)
            else:
                findings = [*examine_server(broker), *examine_sizes(broker), *examine_machine()]
    if output is OutputKind.json:
        show.as_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            _print(finding)
    if any(finding.level in (Severity.warning, Severity.problem) for finding in findings):
        raise typer.Exit(FINDINGS)


def _examine_pipeline(file: Path) -> list[Finding]:
    from millstream.observe.diagnose import examine_binlog, examine_slot
    from millstream.pipelines import Checkpoint, load_pipeline

    pipeline = load_pipeline(file)
    source = pipeline.spec.source
    if source.has_log:
        checkpoint = Checkpoint.of(pipeline)
        last = checkpoint.last_committed()
        ends = None if last is None else checkpoint.ends(last)
        binlog = source.log_status(ends[0] if ends else None)
        return [] if binlog is None else examine_binlog(binlog)
    if not source.has_slot:
        return [Finding(Severity.ok, pipeline.name, f"a source of type {source.type} retains nothing in a database")]
    return examine_slot(source.slot_status(pipeline.name))


def _print(finding: Finding) -> None:
    level = f"{finding.level.value:>8}  "
    lines = "\n".join(show.hanging(" " * len(level), f"{printable(finding.what)}: {printable(finding.found)}"))
    typer.secho(level, fg=_STYLE[finding.level], nl=False)
    typer.echo(lines[len(level) :])
    if finding.remedy:
        typer.secho("\n".join(show.hanging(" " * len(level) + "-> ", printable(finding.remedy))), dim=True)


class KitMissing(MillstreamError):
    """The conformance kit needs pytest, which is not installed."""


def verify(
    url: Url = DEFAULT_URL,
    prefix: Annotated[
        str, typer.Option(help="Prefix of the keys of the run; they are deleted at the end.")
    ] = "millstream:verify",
    output: Output = OutputKind.table,
) -> None:
    try:
        import pytest  # noqa: F401  # the kit's tests use it
    except ImportError as error:
        raise KitMissing("the conformance kit needs pytest. Install it: pip install 'millstream[verify]'") from error
    with open_blocking_broker(url, deadline_ms=DEADLINE_MS) as broker:
        broker.server_time_ms()  # reports an unreachable server soon; the kit has longer deadlines
    results = asyncio.run(_verify(url, prefix, output))
    failed = [result for result in results if result.failure is not None]
    skipped = Counter(result.skipped for result in results if result.skipped is not None)
    if output is OutputKind.json:
        show.as_json([result._asdict() for result in results])
    else:
        for result in failed:
            typer.secho("\n".join(show.hanging("  ", f"{result.chapter}: {printable(result.test)}")), fg="red")
            typer.echo("\n".join(show.hanging("    ", printable(result.failure or ""))))
        for reason, count in skipped.items():
            typer.secho(f"  skipped, {count}: {reason}", dim=True)
        passed = len(results) - len(failed) - skipped.total()
        typer.echo(f"{passed} of {passed + len(failed)} tests passed; the keys of the run are deleted.")
    if failed:
        raise typer.Exit(FINDINGS)


async def _verify(url: str, prefix: str, output: OutputKind) -> list[PromiseResult]:
    from millstream.testing import verify_server

    results = []
    chapter = ""
    async for result in verify_server(url, prefix=prefix):
        if result.chapter != chapter and output is OutputKind.table:
            chapter = result.chapter
            typer.secho(f"running: {chapter} ...", dim=True, err=True)
        results.append(result)
    return results
