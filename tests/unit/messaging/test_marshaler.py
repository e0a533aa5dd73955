"""Bodies as messages and back; an invalid body is rejected without its content in the error."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

from millstream.messaging import CannotUnmarshal
from millstream.messaging.errors import Rejected
from millstream.messaging.marshaler import PydanticMarshaler
from millstream.messaging.message import Message


class CreateUser(BaseModel):
    name: str
    age: int


@dataclass
class UserCreated:
    name: str


@pytest.mark.parametrize("body", [CreateUser(name="Ann", age=3), UserCreated("Ann")])
def test_models_and_dataclasses_come_back(body: object) -> None:
    marshaler = PydanticMarshaler()
    message = marshaler.marshal(body)
    assert json.loads(message.payload)["name"] == "Ann"
    assert message.metadata == {"name": type(body).__name__, "content_type": "application/json"}
    assert marshaler.unmarshal(message, type(body)) == body


@pytest.mark.parametrize("payload", [b"", b"{", b"{}", b'{"name": "secret", "age": "old"}', b"\xff"])
def test_invalid_body_is_rejected_without_its_content_in_the_error(payload: bytes) -> None:
    with pytest.raises(CannotUnmarshal, match="not a valid CreateUser") as caught:
        PydanticMarshaler().unmarshal(Message(payload), CreateUser)
    assert isinstance(caught.value, Rejected)
    assert "secret" not in str(caught.value)


class Inner(BaseModel):
    value: float = Field(alias="X-Value")


class Awkward(BaseModel):
    """Fields that JSON and pydantic do not restore by default."""

    model_config = ConfigDict(extra="forbid")

    ratio: float
    parts: list[Inner]
    count: int = Field(validation_alias="countIn", serialization_alias="countOut")
    price: Decimal = Decimal("1.10")
    nothing: float | None = None

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def twice(self) -> float:
        return self.ratio * 2


@pytest.mark.parametrize("ratio", [1.5, math.inf, -math.inf, math.nan, 1e308, -0.0])
def test_aliases_computed_fields_and_special_floats_make_the_round_trip(ratio: float) -> None:
    body = Awkward(ratio=ratio, parts=[Inner(**{"X-Value": ratio}), Inner(**{"X-Value": 0.1})], countIn=3)
    message = PydanticMarshaler().marshal(body)

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert "twice" not in json.loads(message.payload, parse_constant=refused)
    back = PydanticMarshaler().unmarshal(message, Awkward)
    assert repr(back) == repr(body)  # NaN is not equal to itself


def test_fields_with_aliases_are_read() -> None:
    payload = b'{"ratio": 1, "parts": [{"X-Value": 2}], "countIn": 3}'
    assert PydanticMarshaler().unmarshal(Message(payload), Awkward).count == 3


def test_invalid_payload_error_does_not_advise_to_replay_the_unchanged_message() -> None:
    text = str(CannotUnmarshal("Order", "total is missing"))
    assert "Fix the producer, then replay" not in text
    assert "publish a corrected message" in text
