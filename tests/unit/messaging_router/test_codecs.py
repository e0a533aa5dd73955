"""Codecs: messages survive a round trip, entries of other systems are read, and the only error is Undecodable."""

from __future__ import annotations

import json
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.messaging.codecs import codec, codec_names
from millstream.messaging.errors import Undecodable
from millstream.messaging.message import Message

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEEP_ALL = ["flat", "json", "natricine", "watermill"]


@pytest.mark.parametrize("name", KEEP_ALL)
@given(payload=st.binary(max_size=200), metadata=st.dictionaries(TEXT, TEXT, max_size=5), uuid=TEXT)
def test_message_survives_a_round_trip(name: str, payload: bytes, metadata: dict[str, str], uuid: str) -> None:
    coded = codec(name)
    back = coded.decode(coded.encode(Message(payload, metadata, uuid)))
    assert (back.payload, back.metadata, back.uuid) == (payload, metadata, uuid)


@pytest.mark.parametrize("name", codec_names())
@given(fields=st.dictionaries(st.binary(max_size=30), st.binary(max_size=50), max_size=5))
def test_arbitrary_fields_are_a_message_or_undecodable(name: str, fields: dict[bytes, bytes]) -> None:
    with suppress(Undecodable):
        assert isinstance(codec(name).decode(fields), Message)


@pytest.mark.parametrize("key", ["uuid", "payload", "meta.payload", "dlq.error", "replay.group", "meta.meta."])
def test_flat_keeps_metadata_whose_names_are_its_own_fields_names(key: str) -> None:
    flat = codec("flat")
    fields = flat.encode(Message(b"body", {key: "mine"}, "u1"))
    assert fields[b"payload"] == b"body"
    assert not any(name.startswith((b"dlq.", b"replay.")) for name in fields)  # a details's marks, and a replay's
    assert flat.decode(fields).metadata == {key: "mine"}


def test_flat_is_readable_by_plain_tools_and_carries_trace_context() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    fields = codec("flat").encode(Message(b'{"id": 1}', {"traceparent": trace, "tenant": "a"}, "u1"))
    assert fields == {b"uuid": b"u1", b"payload": b'{"id": 1}', b"traceparent": trace.encode(), b"tenant": b"a"}


def test_flat_reads_a_plain_xadd_as_json_and_as_metadata() -> None:
    message = codec("flat").decode({b"type": b"email", b"to": "ann@exämple.com".encode()})
    assert json.loads(message.payload) == {"type": "email", "to": "ann@exämple.com"}
    assert message.metadata == {"type": "email", "to": "ann@exämple.com"}


def test_flat_reads_a_plain_xadd_whose_bytes_are_not_text() -> None:
    message = codec("flat").decode({b"blob": b"\xff\x00"})
    assert json.loads(message.payload) == {"blob": "\\xff\x00"}
    assert message.metadata["blob"].encode("utf-8", "surrogateescape") == b"\xff\x00"


@pytest.mark.parametrize(
    ("fields", "payload", "metadata"),
    [
        ({b"key": b'{"id":1}', b"value": b'{"op":"c"}'}, b'{"op":"c"}', {"key": '{"id":1}'}),
        ({b'{"id":1}': b'{"op":"c"}'}, b'{"op":"c"}', {"key": '{"id":1}'}),
        ({b"body": b"text", b"source": b"http"}, b"text", {"source": "http"}),
        ({b"payload": b"text", b"source": b"http"}, b"text", {"source": "http"}),
    ],
    ids=["debezium-extended", "debezium-compact", "benthos", "payload-without-uuid"],
)
def test_flat_reads_what_other_systems_write(
    fields: dict[bytes, bytes], payload: bytes, metadata: dict[str, str]
) -> None:
    message = codec("flat").decode(fields)
    assert (message.payload, message.metadata) == (payload, metadata)


def test_flat_reads_an_event_id_as_the_uuid_and_the_change_as_the_payload() -> None:
    fields = {b"df-event": b'{"op":"u"}', b"df-key": b"7", b"event_id": b"e1"}
    message = codec("flat").decode(fields)
    assert (message.payload, message.uuid, message.key) == (b'{"op":"u"}', "e1", "7")


@pytest.mark.parametrize("name", ["watermill", "natricine"])
def test_flat_reads_entries_of_the_go_library_and_its_relative(name: str) -> None:
    fields = codec(name).encode(Message(b"\x00body", {"tenant": "a"}, "u1"))
    message = codec("flat").decode(fields)
    assert (message.payload, message.metadata, message.uuid) == (b"\x00body", {"tenant": "a"}, "u1")


def test_watermill_field_names_are_watermills() -> None:
    fields = codec("watermill").encode(Message(b"p", {"a": "b"}, "u1"))
    assert fields == {b"_watermill_message_uuid": b"u1", b"metadata": msgpack.packb({"a": "b"}), b"payload": b"p"}


@pytest.mark.parametrize("nothing", [b"", msgpack.packb(None), msgpack.packb({})])
def test_no_metadata_in_any_of_its_forms(nothing: bytes) -> None:
    fields = {b"_watermill_message_uuid": b"u", b"metadata": nothing, b"payload": b""}
    assert codec("watermill").decode(fields).metadata == {}


@pytest.mark.parametrize(
    "metadata",
    [
        msgpack.packb({"a": ["deep"]}),
        msgpack.packb({"a": {"b": {}}}),
        msgpack.packb(["a"]),
        msgpack.packb({str(i): "" for i in range(2000)}),
        msgpack.packb({"a": msgpack.ExtType(1, b"x")}),
        b"\xdf\xff\xff\xff\xff",  # a map that claims four thousand million entries
        b"\xdb\xff\xff\xff\xff",  # a text that claims four gigabytes
        b"\x81" * 5000,
        msgpack.packb({"a": "b"}) + b"more",
    ],
)
def test_msgpack_beyond_the_limits_is_undecodable(metadata: bytes) -> None:
    with pytest.raises(Undecodable):
        codec("natricine").decode({b"_natricine_message_uuid": b"u", b"metadata": metadata, b"payload": b""})


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b"[" * 100_000, b'{"payload":1,"metadata":{"a":1}}', b'{"payload_base64":"*"}', b'{"uuid":1}'],
)
def test_json_that_is_no_message_is_undecodable(text: bytes) -> None:
    with pytest.raises(Undecodable):
        codec("json").decode({b"message": text})


def test_json_shows_text_as_text() -> None:
    fields = codec("json").encode(Message(b"plain", {"a": "b"}, "u1"))
    assert json.loads(fields[b"message"]) == {"uuid": "u1", "metadata": {"a": "b"}, "payload": "plain"}


def test_raw_carries_the_payload_and_nothing_else() -> None:
    fields = codec("raw").encode(Message(b"\x00\xff", {"lost": "yes"}))
    assert fields == {b"data": b"\x00\xff"}
    assert codec("raw").decode(fields).payload == b"\x00\xff"
    assert codec("raw").decode({b"anything": b"x"}).payload == b"x"


def test_unknown_codec_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidArgument, match="flat, json, natricine, raw, watermill"):
        codec("protobuf")
    with pytest.raises(InvalidArgument):
        codec(object())  # type: ignore[arg-type]


def test_custom_codec_is_accepted() -> None:
    mine = codec("raw")
    assert codec(mine) is mine


@pytest.mark.parametrize("name", ["flat", "json", "natricine", "raw", "watermill"])
@given(payload=st.binary(max_size=100))
def test_flat_reads_what_every_other_codec_writes(name: str, payload: bytes) -> None:
    written = codec(name).encode(Message(payload, {"tenant": "a"}, "u1"))
    read = codec("flat").decode(written)
    assert read.payload == payload
    if name != "raw":
        assert (read.metadata, read.uuid) == ({"tenant": "a"}, "u1")


@pytest.mark.parametrize("text", [b"hello", b"{}", b'{"text": 1}', b"[1]", b'{"payload": NaN}'])
def test_a_field_called_message_that_is_none_of_ours_is_a_plain_entry(text: bytes) -> None:
    assert json.loads(codec("flat").decode({b"message": text}).payload) == {"message": text.decode()}


@pytest.mark.parametrize(
    "nested",
    [
        b'{"price":1.10}',
        b'{ "a" : [1, 2.50, 1e400, -0.0] }',
        b"123456789012345678901234567890.10",
        b'{"a":"\\u00e4"}',
        b"true",
    ],
)
def test_a_nested_payload_keeps_every_digit(nested: bytes) -> None:
    for text in (
        b'{"payload":' + nested + b"}",
        b' { "uuid" : "u" , "metadata" : {"payload": "x"} , "payload" : ' + nested + b' , "z" : [1, {"payload": 2}] } ',
        b'{"payload": 1, "payload":' + nested + b"}",
    ):
        assert codec("json").decode({b"message": text}).payload == nested


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_invalid_json_is_undecodable_even_if_python_accepts_it(constant: bytes) -> None:
    with pytest.raises(Undecodable):
        codec("json").decode({b"message": b'{"payload": ' + constant + b"}"})


@pytest.mark.parametrize("name", KEEP_ALL)
@pytest.mark.parametrize(
    "message",
    [
        Message(b"x", {"n": 3}),  # type: ignore[dict-item]
        Message(b"x", {3: "n"}),  # type: ignore[dict-item]
        Message(b"x", {}, 7),  # type: ignore[arg-type]
    ],
)
def test_metadata_that_is_not_text_is_refused(name: str, message: Message) -> None:
    with pytest.raises(InvalidArgument):
        codec(name).encode(message)


@pytest.mark.parametrize("name", ["natricine", "watermill"])
@pytest.mark.parametrize(
    "metadata",
    [
        {str(n): "" for n in range(1_025)},
        {"long": "x" * ((1 << 20) + 1)},
        {"long": "\u20ac" * 400_000},
        {"a": "\ud800"},
    ],
    ids=["too many", "too long", "too long in bytes", "half a character"],
)
def test_values_that_cannot_be_read_back_are_refused(name: str, metadata: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="metadata"):
        codec(name).encode(Message(b"x", metadata))


@pytest.mark.parametrize("name", ["natricine", "watermill"])
def test_the_limits_themselves_are_written_and_read(name: str) -> None:
    for metadata in ({str(n): "" for n in range(1_024)}, {"long": "x" * (1 << 20)}):
        assert codec(name).decode(codec(name).encode(Message(b"x", metadata))).metadata == metadata
