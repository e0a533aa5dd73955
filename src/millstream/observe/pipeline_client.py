"""HTTP client of a process that runs pipelines: reads their state and controls them; see ``PipelineRoutes``.

Blocking, with a deadline and a limit on the response, because any program may listen at the address.
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
CONTROL_DEADLINE_S = 60.0
"""Pausing and stopping wait for the current batch."""
MAX_RESPONSE_BYTES = 8 << 20
_STATUS = frozenset(PipelineStatus.__slots__)


class PipelinesUnreachable(MillstreamError):
    """No process that runs pipelines answers at the address."""


class PipelineRefused(MillstreamError):
    """The process refused the request; the message contains its reason."""


class _NoRedirects(HTTPRedirectHandler):
    """Does not follow redirects, so that the access token is sent only to the configured address."""

    def redirect_request(self, *_: Any) -> None:
        return None


class PipelineClient:
    """Reads and controls the pipelines of one process."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidArgument("pipelines", parts.hostname or "?", "an address such as http://127.0.0.1:9000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._token = token
        # Without the proxies of the environment, which would receive the access token.
        self._opener = build_opener(ProxyHandler({}), _NoRedirects())

    def statuses(self) -> list[dict[str, Any]]:
        """Return the status of each pipeline, with the fields of ``PipelineStatus``."""
        reply = self._request("/pipelines")
        if not isinstance(reply, list) or not all(isinstance(item, dict) and item.keys() >= _STATUS for item in reply):
            raise self._unexpected_response()
        return reply

    def status(self, name: str) -> dict[str, Any]:
        reply = self._request(f"/pipelines/{quote(name, safe='')}")
        if not isinstance(reply, dict) or not reply.keys() >= _STATUS:
            raise self._unexpected_response()
        return reply

    def batches(self, name: str) -> list[dict[str, Any]]:
        """Return the last batches: id, planned_ms, committed_ms."""
        reply = self._request(f"/pipelines/{quote(name, safe='')}/checkpoints")
        if not isinstance(reply, list) or not all(isinstance(item, dict) for item in reply):
            raise self._unexpected_response()
        return reply

    def dead_letters(self, name: str) -> dict[str, Any]:
        """Return the dead-letter stream (None if the pipeline has none), its length and its newest entries."""
        reply = self._request(f"/pipelines/{quote(name, safe='')}/dlq")
        if not isinstance(reply, dict):
            raise self._unexpected_response()
        return reply

    def control(self, name: str, verb: str) -> dict[str, Any]:
        """Pause, resume, stop or start a pipeline, and return its status after that."""
        path = f"/pipelines/{quote(name, safe='')}/{quote(verb)}"
        reply = self._request(path, method="POST", deadline_s=CONTROL_DEADLINE_S)
        if not isinstance(reply, dict):
            raise self._unexpected_response()
        return reply

    def _request(self, path: str, *, method: str = "GET", deadline_s: float = DEADLINE_S) -> Any:
        headers: Mapping[str, str] = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        request = Request(self.url + path, headers=dict(headers), method=method)  # noqa: S310  # http, as checked
        try:
            with self._opener.open(request, timeout=deadline_s) as response:
                body = response.read(MAX_RESPONSE_BYTES + 1)
                if len(body) > MAX_RESPONSE_BYTES:
                    raise self._unexpected_response()
                return json.loads(body)
        except HTTPError as error:
            raise self._refusal(error) from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise PipelinesUnreachable(
                f"{self.url} does not answer ({reason}). Is `millstream pipeline run` still running there?"
            ) from None
        except (ValueError, RecursionError):
            raise self._unexpected_response() from None

    def _refusal(self, error: HTTPError) -> MillstreamError:
        if error.code == 401:
            return PipelineRefused(
                f"{self.url} requires its access token: --http-token-file, or MILLSTREAM_HTTP_TOKEN."
            )
        try:
            reason = str(json.loads(error.read(10_000))["message"])[:500]
        except (ValueError, KeyError, TypeError, OSError):
            return self._unexpected_response()
        return PipelineRefused(f"{self.url} refused the request: {reason}")

    def _unexpected_response(self) -> PipelinesUnreachable:
        return PipelinesUnreachable(
            f"{self.url} does not answer like `millstream pipeline run`. Check which program listens there."
        )
