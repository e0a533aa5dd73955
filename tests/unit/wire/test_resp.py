"""Encoding and decoding of replies, in both protocols."""

import math

import pytest

from millstream.wire.commands import (
    NIL_ARRAY,
    OK,
    Double,
    ErrorReply,
    Map,
    Members,
    Pairs,
    Push,
    Several,
    Status,
    Verbatim,
)
from millstream.wire.resp import encode, pack
from support.resp_decoder import Decoder, MalformedReply, decode

ENTRY = [b"1-1", [b"f", b"v"]]


@pytest.mark.parametrize(
    ("reply", "resp2", "resp3"),
    [
        (b"a\r\n\0b", b"$5\r\na\r\n\0b\r\n", None),
        (b"", b"$0\r\n\r\n", None),
        (-7, b":-7\r\n", None),
        (True, b":1\r\n", None),
        (OK, b"+OK\r\n", None),
        (Status(b"Background"), b"+Background\r\n", None),
        (None, b"$-1\r\n", b"_\r\n"),
        (NIL_ARRAY, b"*-1\r\n", b"_\r\n"),
        (ErrorReply("ERR no"), b"-ERR no\r\n", None),
        (ErrorReply("ERR a\r\n+OK"), b"-ERR a  +OK\r\n", None),
        ([], b"*0\r\n", None),
        ([1, b"x", None], b"*3\r\n:1\r\n$1\r\nx\r\n$-1\r\n", b"*3\r\n:1\r\n$1\r\nx\r\n_\r\n"),
        ([ENTRY], b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nf\r\n$1\r\nv\r\n", None),
        ([[b"1-1", None]], b"*1\r\n*2\r\n$3\r\n1-1\r\n$-1\r\n", b"*1\r\n*2\r\n$3\r\n1-1\r\n_\r\n"),
        ([[b"1-1", [b"f", OK]]], b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nf\r\n+OK\r\n", None),
        (Map([b"k", 1]), b"*2\r\n$1\r\nk\r\n:1\r\n", b"%1\r\n$1\r\nk\r\n:1\r\n"),
        (Pairs([[b"s", [ENTRY]]]),
         b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nf\r\n$1\r\nv\r\n",
         b"%1\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nf\r\n$1\r\nv\r\n"),
        (Members([b"a"]), b"*1\r\n$1\r\na\r\n", b"~1\r\n$1\r\na\r\n"),
        (Push([b"message", b"c", b"x"]), b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n",
         b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n"),
        (Several([Push([b"subscribe", b"c", 1]), OK]), b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n+OK\r\n",
         b">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n+OK\r\n"),
        (Several(), b"", b""),
        (Double(0.1), b"$19\r\n0.10000000000000001\r\n", b",0.10000000000000001\r\n"),
        (Double(3), b"$1\r\n3\r\n", b",3\r\n"),
        (Double(-math.inf), b"$4\r\n-inf\r\n", b",-inf\r\n"),
        (Verbatim(b"hi"), b"$2\r\nhi\r\n", b"=6\r\ntxt:hi\r\n"),
    ],
)  # fmt: skip
def test_every_kind_of_reply_in_both_protocols(reply, resp2, resp3):
    assert encode(reply, 2) == resp2
    assert encode(reply, 3) == (resp2 if resp3 is None else resp3)


@pytest.mark.parametrize(
    "reply",
    [b"x", 5, OK, None, ErrorReply("ERR x"), Map([b"k", [1, None]]), Members([b"a"]), Push([b"p", 1]),
     Double(0.1), Verbatim(b"text"), [[b"1-1", [b"f", b"v"]], [b"1-2", None]]],
)  # fmt: skip
def test_resp3_round_trip_keeps_the_type(reply):
    (back,) = decode(encode(reply, 3))
    assert back == reply
    assert type(back) is type(reply)


def test_subclass_is_encoded_as_its_base():
    class Rows(list):
        pass

    class Text(bytes):
        pass

    assert encode([Rows([Text(b"x")])]) == b"*1\r\n*1\r\n$1\r\nx\r\n"


def test_unknown_reply_type_is_rejected():
    with pytest.raises(TypeError, match="not a reply type"):
        encode(object())


def test_command_packs_as_an_array_of_bulk_strings():
    assert pack([b"SET", b"k", b"\r\n"]) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\n"


def test_decoder_waits_for_the_last_byte():
    whole = encode([[b"1-1", [b"f", b"v"]], None, 3])
    decoder = Decoder()
    for byte in whole[:-1]:
        decoder.feed(bytes([byte]))
        assert decoder.take() is None
    decoder.feed(whole[-1:])
    assert decoder.take() == ([[b"1-1", [b"f", b"v"]], None, 3],)
    assert decoder.take() is None


@pytest.mark.parametrize(
    "junk", [b"?x\r\n", b":x\r\n", b"$3\r\nabcde\r\n", b"$-2\r\n", b"*-5\r\n", b"*1\r\n" * 100 + b":1\r\n"]
)
def test_decoder_rejects_invalid_resp(junk):
    with pytest.raises(MalformedReply):
        decode(junk)
