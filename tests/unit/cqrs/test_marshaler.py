"""Bodies as messages and back; what is no body of its kind is rejected without showing its content."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from pydantic import BaseModel

from millstream.cqrs.errors import CannotUnmarshal
from millstream.cqrs.marshaler import PydanticMarshaler
from millstream.messaging.errors import Rejected
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
def test_what_is_not_valid_is_rejected_for_good_and_not_shown(payload: bytes) -> None:
    with pytest.raises(CannotUnmarshal, match="not a valid CreateUser") as caught:
        PydanticMarshaler().unmarshal(Message(payload), CreateUser)
    assert isinstance(caught.value, Rejected)
    assert "secret" not in str(caught.value)
