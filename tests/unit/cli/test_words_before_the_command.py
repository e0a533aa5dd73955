"""Shared options before the command are moved after it, if the command takes them; otherwise the error says so."""

from __future__ import annotations

import pytest

from millstream.cli.main import shared_options_last


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--url X streams ls", "streams ls --url X"),
        ("--url=X streams ls", "streams ls --url=X"),
        ("streams --url X ls orders.*", "streams ls --url X orders.*"),
        ("-o json --url X dlq replay s", "dlq replay -o json --url X s"),
        ("--url X streams ls --url Y", "streams ls --url X --url Y"),
        ("--url X top --once", "top --url X --once"),
        ("--url X run shop.app:router -p 4", "run --url X shop.app:router -p 4"),
        ("--url X --help", "--help"),
        ("--url X streams --help", "streams --help"),
        ("--url", "--url"),
        ("--version", "--version"),
        ("--url X strems ls", "strems --url X ls"),
        ("streams add s url=X -- --url y", "streams add s url=X -- --url y"),
        ("", ""),
    ],
)
def test_shared_option_is_moved_after_the_command(typed: str, meant: str) -> None:
    assert shared_options_last(typed.split()) == meant.split()
