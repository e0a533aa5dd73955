"""``millstream verify``: ask a server everything that the contract promises, and print what does not behave."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli import show
from millstream.cli.exit_codes import FINDINGS
from millstream.cli.options import DEFAULT_URL, Output, OutputKind, Url
from millstream.errors import MillstreamError
from millstream.observe import printable

if TYPE_CHECKING:
    from millstream.testing.verify import PromiseResult


class KitMissing(MillstreamError):
    """The kit is made of tests, and pytest is not installed."""


def command(
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
    verdicts = asyncio.run(_asked(url, prefix, output))
    failed = [one for one in verdicts if one.failure is not None]
    skipped = Counter(one.skipped for one in verdicts if one.skipped is not None)
    if output is OutputKind.json:
        show.as_json([one._asdict() for one in verdicts])
    else:
        for one in failed:
            typer.secho(f"  {one.chapter}: {printable(one.test)}", fg="red")
            typer.echo(f"    {printable(one.failure or '')}")
        for why, count in skipped.items():
            typer.secho(f"  not asked, {count}: {why}", dim=True)
        behaves = len(verdicts) - len(failed) - skipped.total()
        typer.echo(f"{behaves} of {behaves + len(failed)} promises hold; the run's keys are deleted.")
    if failed:
        raise typer.Exit(FINDINGS)


async def _asked(url: str, prefix: str, output: OutputKind) -> list[PromiseResult]:
    from millstream.testing.verify import verify

    verdicts = []
    chapter = ""
    async for one in verify(url, prefix=prefix):
        if one.chapter != chapter and output is OutputKind.table:
            chapter = one.chapter
            typer.secho(f"asking: {chapter} ...", dim=True, err=True)
        verdicts.append(one)
    return verdicts
