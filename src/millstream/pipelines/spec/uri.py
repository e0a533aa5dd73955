"""Addresses in a spec: checked early, and never shown with their password."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from millstream.broker.links.addresses import redacted, target_of
from millstream.errors import InvalidArgument

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
