"""``millstream init NAME``: a new service, with a handler, a test, a Dockerfile and a Makefile."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from millstream.errors import InvalidArgument

NAME: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?")
RESERVED: Final = frozenset({"millstream", "tests", "test"})


def command(
    name: Annotated[str, typer.Argument(help="The name of the service and its directory, such as shop.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="The directory; by default NAME below this one.", show_default=False)
    ] = None,
) -> None:
    """Create a service whose tests pass as they are."""
    package = package_name(name)
    directory = to or Path(name)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidArgument("NAME" if to is None else "--to", str(directory), "a directory that does not exist yet")
    for path, text in files(name, package).items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        typer.echo(str(file))
    typer.echo(f"\nNext: cd {shlex.quote(str(directory))} && make test && make run")


def package_name(name: str) -> str:
    """The Python package of a service. Raises InvalidArgument where the name cannot be one."""
    package = name.lower().replace("-", "_")
    is_taken = package in RESERVED or package in sys.stdlib_module_names or keyword.iskeyword(package)
    if not NAME.fullmatch(name) or is_taken or is_installed(package):
        raise InvalidArgument("NAME", name, "letters, digits, - and _, and no name of a Python module, such as shop")
    return package


def is_installed(package: str) -> bool:
    """Whether an installed package has this name. The service would hide it, even from millstream (redis, pydantic)."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin) not in (Path.cwd() / package / "__init__.py", Path.cwd() / f"{package}.py")


def files(name: str, package: str) -> dict[str, str]:
    """Every file of the service, by its path."""
    texts = {
        "pyproject.toml": PYPROJECT,
        f"{package}/__init__.py": "",
        f"{package}/app.py": APP,
        "tests/test_app.py": TEST,
        "Dockerfile": DOCKERFILE,
        ".dockerignore": DOCKERIGNORE,
        "Makefile": MAKEFILE,
        "README.md": README,
        ".gitignore": GITIGNORE,
    }
    image = re.sub(r"[_-]+", "-", name.lower())  # Docker allows no capital letters, and one dash between words
    return {
        path: text.replace("@NAME@", name).replace("@PACKAGE@", package).replace("@IMAGE@", image).lstrip("\n")
        for path, text in texts.items()
    }


PYPROJECT: Final = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "@NAME@"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["millstream>=0.2"]

[dependency-groups]
dev = ["pytest>=8"]

[tool.hatch.build.targets.wheel]
packages = ["@PACKAGE@"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
"""

APP: Final = '''
"""The handlers of @NAME@. `make run` runs them in worker processes."""

from __future__ import annotations

import logging

from millstream import Message, Router
from pydantic import BaseModel

log = logging.getLogger(__name__)
router = Router()


class Order(BaseModel):
    number: int


@router.on("@NAME@.orders", group="@NAME@", group_start="0", publish_to="@NAME@.bills", max_deliveries=5)
async def bill(order: Order) -> Message:
    """The returned message is stored together with the acknowledgement of the order."""
    if order.number < 0:
        raise ValueError(f"there is no order {order.number}")
    log.info("billed order %d", order.number)
    return Message(b"bill of order %d" % order.number)
'''

TEST: Final = '''
"""Each test has an embedded broker of its own: no server is needed."""

import asyncio

from millstream import Message, Publisher

from @PACKAGE@.app import router


def test_order_is_billed(millstream_broker, run_router):
    async def run():
        async with run_router(router) as running, Publisher(millstream_broker) as publisher:
            await publisher.publish("@NAME@.orders", Message(b'{"number": 7}'))
            await running.drained()
        [entry] = await millstream_broker.xrange("@NAME@.bills")
        assert entry.fields[b"payload"] == b"bill of order 7"

    asyncio.run(run())


def test_message_that_is_no_order_becomes_a_dead_letter(millstream_broker, run_router):
    async def run():
        async with run_router(router, strict=False) as running, Publisher(millstream_broker) as publisher:
            await publisher.publish("@NAME@.orders", Message(b"no order"))
            await running.drained()
        assert await millstream_broker.xlen("{@NAME@.orders}.dlq") == 1

    asyncio.run(run())
'''

DOCKERFILE: Final = """
# The image millstream is built from millstream's own repository:
#   docker build -f deploy/Dockerfile --target worker -t millstream .
# It runs as an unprivileged user, serves metrics and health on port 9100, and has a health check.
FROM millstream
COPY @PACKAGE@ /app/@PACKAGE@
CMD ["run", "@PACKAGE@.app:router"]
"""

DOCKERIGNORE: Final = """
*
!@PACKAGE@
**/__pycache__
"""

MAKEFILE: Final = """
PYTHON ?= python3
URL ?= redis://127.0.0.1:6379

.PHONY: help setup test check run image
help:  ## show this list
\t@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## install the service and what its tests need into the current environment
\t$(PYTHON) -m pip install -e . "pytest>=8"

test:  ## run the tests; no server is needed
\t$(PYTHON) -m pytest -q

check:  ## import everything, list the handlers and ask the broker
\t$(PYTHON) -m millstream run @PACKAGE@.app:router --check --url $(URL)

run:  ## run a worker, and restart it when a file changes
\t$(PYTHON) -m millstream run @PACKAGE@.app:router --url $(URL) --reload

image:  ## build the image
\tdocker build -t @IMAGE@ .
"""

README: Final = """
# @NAME@

A service on millstream. `make help` lists what can be done; `make test` needs no server.

| file | content |
|---|---|
| `@PACKAGE@/app.py` | the handlers |
| `tests/test_app.py` | their tests |
| `Dockerfile` | an image that runs a worker; set `MILLSTREAM_URL` to the address of Redis |

To let Prometheus and probes reach the worker from outside of its container, run it with `--http-host 0.0.0.0` and set
`MILLSTREAM_HTTP_TOKEN` to a secret of your own.
"""

GITIGNORE: Final = """
__pycache__/
*.egg-info/
.venv/
.pytest_cache/
dist/
"""
