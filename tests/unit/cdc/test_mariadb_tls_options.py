"""TLS options in a MariaDB dsn: an unknown value is an error, never a connection without TLS."""

from __future__ import annotations

import pytest

from millstream.cdc.errors import InvalidChangeOption
from millstream.cdc.mariadb.connection import MariadbLogin
from millstream.cdc.options import DatabaseAddress


def _settings(query: str) -> dict[str, object]:
    return MariadbLogin(DatabaseAddress(f"mariadb://u:s3cret@h/db{query}")).settings()


@pytest.mark.parametrize(
    "query",
    [
        "?ssl=True",
        "?ssl=1",
        "?ssl=required",
        "?ssl=",
        "?ssl=false&ssl_ca=/ca.pem",
        "?ssl_key=/key.pem",
        "?tls=true",
        "?ssl=true&ssl=false",
        "#?ssl=true",
        "?ssl_ca=",
        "?ssl=true#",
    ],
)
def test_unknown_or_contradictory_tls_options_are_refused(query: str) -> None:
    with pytest.raises(InvalidChangeOption) as caught:
        _settings(query)
    assert "s3cret" not in str(caught.value)


def test_a_client_certificate_alone_turns_tls_on() -> None:
    with pytest.raises(FileNotFoundError):  # the certificate is loaded
        _settings("?ssl_cert=/nowhere/cert.pem&ssl_key=/nowhere/key.pem")


def test_tls_is_on_or_off_as_the_dsn_says() -> None:
    assert "ssl" in _settings("?ssl=true")
    assert _settings("")["ssl_disabled"] is True
    assert _settings("?ssl=false")["ssl_disabled"] is True
