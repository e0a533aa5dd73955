"""Commands that start a dashboard: they print its address, show their broker, and end on a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from millstream import open_blocking_broker

TOKEN = "s3cret-token"


@contextmanager
def started(*words: str, lines: int = 1, stderr: Path | None = None) -> Iterator[list[str]]:
    """The first lines of the command while it runs; then it receives a signal and ends."""
    environment = {name: value for name, value in os.environ.items() if name != "MILLSTREAM_HTTP_TOKEN"}
    command = [sys.executable, "-m", "millstream", *words]
    with (
        open(stderr or os.devnull, "w") as noise,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            yield [process.stdout.readline() for _ in range(lines)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def address_in(text: str) -> str:
    match = re.search(r"http://\S+", text)
    assert match is not None, text
    return match[0]


def test_serve_can_serve_its_dashboard(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("p@ss/word")
    words = ("serve", "--port", "0", "--password-file", str(secret), "--dashboard", "--dashboard-port", "0")
    with started(*words, lines=2) as (greeting, line):
        match = re.search(r"127\.0\.0\.1:(\d+)", greeting)
        assert match is not None
        with open_blocking_broker(f"redis://:p%40ss%2Fword@127.0.0.1:{match[1]}") as broker:
            broker.xadd("orders", {"n": "1"})
        assert httpx.get(address_in(line)).status_code == 401, "the broker's password protects its data here as well"
        token = line.rpartition(" token ")[2].strip().removesuffix(")")
        page = httpx.get(address_in(line), headers={"authorization": f"Bearer {token}"})
        assert ">orders</a>" in page.text
        assert "word" not in page.text.replace("password", "")


def test_dashboard_of_serve_without_a_password_needs_no_token() -> None:
    with started("serve", "--port", "0", "--dashboard", "--dashboard-port", "0", lines=2) as (_, line):
        assert httpx.get(address_in(line)).status_code == 200


def test_dashboard_command_prints_its_address_and_ends_while_pages_are_open(redis_url: str, tmp_path: Path) -> None:
    noise = tmp_path / "stderr"
    with started("dashboard", "--url", redis_url, "--port", "0", stderr=noise) as (line,):
        at = address_in(line)
        assert httpx.get(at).status_code == 200
        listening = httpx.Client(timeout=60)
        page = listening.send(listening.build_request("GET", f"{at}/live?page=/"), stream=True)
        assert next(page.iter_lines()) == "event: connection"
    page.close()
    listening.close()
    assert noise.read_text() == ""


def test_dashboard_off_loopback_requires_a_token(redis_url: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "millstream", "dashboard", "--url", redis_url, "--host", "0.0.0.0", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "MILLSTREAM_HTTP_TOKEN"}
    refused = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert refused.returncode == 1
    assert "refusing to listen on 0.0.0.0 without an access token" in refused.stderr
    assert "--token-file" in refused.stderr

    file = tmp_path / "token"
    file.write_text(TOKEN)
    with started(*words[3:], "--token-file", str(file)) as (line,):
        url = address_in(line)
        assert httpx.get(url).status_code == 401
        page = httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"})
        assert "read only" in page.text
        assert TOKEN not in page.text
