"""Options that need an extra name what is missing and how to install it."""

from __future__ import annotations

import importlib.util

import pytest
import typer

from millstream.cli.main import USAGE
from millstream.cli.run import require_tracing


def test_tracing_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(typer.Exit) as ended:
        require_tracing()
    assert ended.value.exit_code == USAGE
    message = capsys.readouterr().err
    assert "opentelemetry" in message
    assert "pip install 'millstream[otel]'" in message
    assert "is not allowed" not in message
