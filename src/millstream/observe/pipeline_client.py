"""Asks a process that runs pipelines how they stand, and tells it what to do: the other end of ``PipelineRoutes``.

Blocking, with a deadline and a bound on what it reads: what answers there may be anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from millstream.errors import InvalidArgument, MillstreamError
from millstream.pipelines import PipelineStatus

DEADLINE_S = 3.0
PATIENCE_S = 60.0
"""Pausing and stopping wait for the batch at hand."""
MOST_BYTES = 8 << 20
_STATUS = frozenset(PipelineStatus.__slots__)


class PipelinesUnreachable(MillstreamError):
    """The process that runs pipelines does not answer, or answers something else."""


class PipelineRefused(MillstreamError):
    """It answered, and said no; its own words are in the message."""


class _NoRedirects(HTTPRedirectHandler):
    """A token is for the address that it was given for."""

    def redirect_request(self, *_: Any) -> None:
        return None


class PipelineClient:
    def __init__(self, url: str, *, token: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidArgument("pipelines", parts.hostname or "?", "an address such as http://127.0.0.1:9000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._token = token
        # Straight to the address: a proxy of the environment is for the network, and would be shown the token.
        self._opener = build_opener(ProxyHandler({}), _NoRedirects())

    def statuses(self) -> list[dict[str, Any]]:
        """Every pipeline's status, as ``PipelineStatus`` has it."""
        found = self._ask("/pipelines")
        if not isinstance(found, list) or not all(isinstance(one, dict) and one.keys() >= _STATUS for one in found):
            raise self._stranger()
        return found

    def status(self, name: str) -> dict[str, Any]:
        found = self._ask(f"/pipelines/{quote(name, safe='')}")
        if not isinstance(found, dict) or not found.keys() >= _STATUS:
            raise self._stranger()
        return found

    def batches(self, name: str) -> list[dict[str, Any]]:
        """The last batches: id, planned_ms, committed_ms."""
        found = self._ask(f"/pipelines/{quote(name, safe='')}/checkpoints")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self._stranger()
        return found

    def dead_letters(self, name: str) -> dict[str, Any]:
        """The stream that holds them (None: the pipeline has none), how many, and the newest."""
        found = self._ask(f"/pipelines/{quote(name, safe='')}/dlq")
        if not isinstance(found, dict):
            raise self._stranger()
        return found

    def tell(self, name: str, verb: str) -> dict[str, Any]:
        """``pause``, ``resume``, ``stop`` or ``start``; the status after it."""
        found = self._ask(f"/pipelines/{quote(name, safe='')}/{quote(verb)}", method="POST", deadline_s=PATIENCE_S)
        if not isinstance(found, dict):
            raise self._stranger()
        return found

    def _ask(self, path: str, *, method: str = "GET", deadline_s: float = DEADLINE_S) -> Any:
        headers: Mapping[str, str] = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        request = Request(self.url + path, headers=dict(headers), method=method)  # noqa: S310  # http, as checked
        try:
            with self._opener.open(request, timeout=deadline_s) as answer:
                body = answer.read(MOST_BYTES + 1)
                if len(body) > MOST_BYTES:
                    raise self._stranger()
                return json.loads(body)
        except HTTPError as problem:
            raise self._refused(problem) from None
        except (URLError, OSError) as problem:
            why = getattr(problem, "reason", problem)
            raise PipelinesUnreachable(
                f"{self.url} does not answer ({why}). Is `millstream pipeline run` still running there?"
            ) from None
        except (ValueError, RecursionError):
            raise self._stranger() from None

    def _refused(self, problem: HTTPError) -> MillstreamError:
        if problem.code == 401:
            return PipelineRefused(f"{self.url} wants its token: --http-token-file, or MILLSTREAM_HTTP_TOKEN.")
        try:
            said = str(json.loads(problem.read(10_000))["message"])[:500]
        except (ValueError, KeyError, TypeError, OSError):
            return self._stranger()
        return PipelineRefused(f"{self.url} says: {said}")

    def _stranger(self) -> PipelinesUnreachable:
        return PipelinesUnreachable(
            f"{self.url} answers, but not as millstream does. Look which program listens there."
        )
