"""Access to the JVM of Spark's driver from the other Python processes of the driver host.

Spark plans the batches of a Python data source in processes of its own, which have no connection to the JVM. They open
one to the JVM's py4j server. Its port and token are passed in a file of mode 0600, as passwords are (decision 10).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millstream.storage.errors import StorageUnavailable


def hand_over(gateway: Any) -> str:
    """The text for ``connect``: where the gateway's JVM listens, and its token. Write it only to a private file."""
    parameters = gateway.gateway_parameters
    return json.dumps({"address": parameters.address, "port": parameters.port, "token": parameters.auth_token})


def connect(file: str) -> Callable[[], Any]:
    """For ``open_storage`` in a process without a gateway: opens one on the first call, from a ``hand_over`` file."""
    lock = threading.Lock()
    opened: list[Any] = []

    def gateway() -> Any:
        with lock:
            if not opened:
                opened.append(_open(file))
            return opened[0]

    return gateway


def _open(file: str) -> Any:
    from py4j.java_gateway import GatewayParameters, JavaGateway  # type: ignore[import-untyped]  # py4j has no types

    try:
        connection = json.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StorageUnavailable(
            file, "the pipeline's process has ended, and the store is reached through it"
        ) from error
    parameters = GatewayParameters(
        address=connection["address"], port=connection["port"], auth_token=connection["token"], auto_convert=True
    )
    return JavaGateway(gateway_parameters=parameters)
