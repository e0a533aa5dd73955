"""Addresses in a spec: checked early, never shown with their password, and handed to Spark without it."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from millstream.broker import redacted, target_of
from millstream.errors import AuthenticationFailed, InvalidArgument, MillstreamError, PermissionDenied

if TYPE_CHECKING:
    from millstream import BlockingBroker

log = logging.getLogger("millstream.pipelines")
_PING_MS = 2_000
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
# Greedy: a password may hold an @ that nobody quoted.
_USERINFO = re.compile(r"(?<=://)[^/?#]*@")
_PASSWORDS = re.compile(r"(?<=[?&])[a-z_]*password=[^&]*")


def _checked(text: str) -> str:
    scheme = text.partition("://")[0]
    if scheme == "local":
        why = (
            "local:// lives in one process, and Spark's workers are others; start `millstream serve`, name its redis://"
        )
        raise PydanticCustomError("uri", "{why}", {"why": why})
    if "://" not in text or scheme not in SCHEMES:
        raise PydanticCustomError("uri", "write a URI of {schemes}", {"schemes": ", ".join(f"{s}://" for s in SCHEMES)})
    try:
        target_of(text)
    except InvalidArgument as error:
        raise PydanticCustomError("uri", "write {allowed}", {"allowed": error.allowed}) from error
    return text


RedisUri = Annotated[str, AfterValidator(_checked), WithJsonSchema({"type": "string", "format": "uri"})]


class NotAnswering(MillstreamError):
    """The server at an address of a spec does not answer now."""

    retryable = True


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis that a spec names. ``password_file`` holds its password, and is read by every process that connects."""

    uri: str
    password_file: str | None = None

    def open(self, **settings: Any) -> BlockingBroker:
        """A broker for this process. Close it."""
        from millstream import open_blocking_broker

        return open_blocking_broker(self.url(), **settings)

    def url(self) -> str:
        """Where to connect to, secrets included. Never log it."""
        from millstream.spark import Address

        return Address(self.uri, password_file=self.password_file).resolve()

    def refusal(self) -> str | None:
        """Why this address will never work; None where it does. Raises NotAnswering where it may yet."""
        try:
            with self.open(deadline_ms=_PING_MS) as broker:
                broker.ping()
        except (AuthenticationFailed, PermissionDenied, InvalidArgument) as error:
            return f"{self}: {type(error).__name__}: {error}"
        except MillstreamError as error:
            raise NotAnswering(str(error)) from error
        return None

    def __str__(self) -> str:
        return shown(self.uri)

    def __repr__(self) -> str:
        return f"RedisAddress({shown(self.uri)!r})"


def no_second_password(uri: str | None, password_file: str | None) -> None:
    if uri is not None and password_file is not None and urlsplit(uri).password is not None:
        raise PydanticCustomError("uri", "give the password in the uri or in password_file, not in both")


def without_secrets(uri: str) -> str:
    """The URI with whoever connects, and with what password, left out."""
    return _PASSWORDS.sub("", _USERINFO.sub("", uri))


def has_secret(uri: str) -> bool:
    parts = urlsplit(uri)
    return parts.password is not None or "password=" in parts.query


def shown(uri: str) -> str:
    """The URI for people: the user stays, the password does not."""
    user, colon, _ = urlsplit(uri).netloc.rpartition("@")[0].partition(":")
    login = f"{user}:***" if colon else user
    return redacted(uri).replace("://***@", f"://{login}@", 1) if login else redacted(uri)
