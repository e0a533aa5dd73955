"""How an event looks outside: ``column()`` writes it as JSON, ``read_documents`` understands it."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from millstream.pipelines.envelopes.cloudevents import CloudEvents
from millstream.pipelines.envelopes.debezium import Debezium
from millstream.pipelines.envelopes.envelope import Envelope
from millstream.pipelines.envelopes.native import Native, Raw
from millstream.pipelines.envelopes.reading import Format, SourcePosition, read_documents


def _by_name(value: Any) -> Any:
    """``envelope: debezium`` is short for ``envelope: {type: debezium}``."""
    return {"type": value} if isinstance(value, str) else value


AnyEnvelope = Annotated[
    Annotated[Native | Debezium | CloudEvents | Raw, Field(discriminator="type")], BeforeValidator(_by_name)
]

__all__ = [
    "AnyEnvelope",
    "CloudEvents",
    "Debezium",
    "Envelope",
    "Format",
    "Native",
    "Raw",
    "SourcePosition",
    "read_documents",
]
