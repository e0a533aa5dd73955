"""Options are read before anything connects, and every complaint names the option."""

import pickle

import pytest

from millstream.model import EntryId, TrimPolicy
from millstream.spark.connection import Address
from millstream.spark.errors import InvalidOption
from millstream.spark.options import source_options
from millstream.spark.sink_options import sink_options

URL = "redis://localhost:6379"


def source(streaming: bool = True, **options: str):
    return source_options({"url": URL, "subscribe": "orders", **options}, streaming=streaming)


def sink(streaming: bool = True, **options: str):
    return sink_options({"url": URL, "stream": "out", **options}, streaming=streaming)


def test_the_source_reads_kafkas_names_in_any_case():
    options = source_options(
        {
            "url": URL,
            "SUBSCRIBE": "orders, payments",
            "startingoffsets": '{"orders": "5-1", "payments": "earliest"}',
            "maxOffsetsPerTrigger": "1000",
            "minPartitions": "4",
            "failOnDataLoss": "false",
            "group": "spark",
        },
        streaming=True,
    )
    assert options.streams == ("orders", "payments")
    assert options.start_of("orders", "latest") == EntryId(5, 1)
    assert options.start_of("payments", "latest") == "earliest"
    assert source().start_of("orders", "latest") == "latest"
    assert (options.max_rows, options.min_partitions, options.fail_on_data_loss) == (1000, 4, False)
    assert options.group == "spark"


def test_a_timestamp_starts_with_the_first_entry_of_that_millisecond():
    assert source(startingTimestamp="1000").start_of("orders", "latest") == EntryId(1000, 0).previous()


def test_option_names_of_the_scala_connector_are_accepted():
    options = source_options(
        {
            "url": URL,
            "stream.keys": "orders",
            "stream.offsets": '{"offsets": {"orders": {"groupName": "g", "offset": "7-0"}}}',
            "stream.group.name": "g",
            "stream.read.batch.size": "200",
        },
        streaming=True,
    )
    assert options.streams == ("orders",)
    assert options.start_of("orders", "latest") == EntryId(7, 0)
    assert (options.group, options.page_size) == ("g", 200)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "subscribe"),
        ({"subscribe": "a", "subscribePattern": "b.*"}, "subscribe"),
        ({"subscribe": "a,,b"}, "subscribe"),
        ({"subscribePattern": "("}, "subscribePattern"),
        ({"subscribe": "a", "startingOffsets": "yesterday"}, "startingOffsets"),
        ({"subscribe": "a", "startingOffsets": '{"a": "no-id"}'}, "startingOffsets"),
        ({"subscribe": "a", "startingOffsets": "[]"}, "startingOffsets"),
        ({"subscribe": "a", "startingOffsets": '{"b": "latest"}'}, "startingOffsets"),
        ({"subscribe": "a", "startingOffsets": "latest", "startingTimestamp": "5"}, "startingTimestamp"),
        ({"subscribe": "a", "startingTimestamp": "noon"}, "startingTimestamp"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"subscribe": "a", "minPartitions": "-1"}, "minPartitions"),
        ({"subscribe": "a", "failOnDataLoss": "perhaps"}, "failOnDataLoss"),
        ({"subscribe": "a", "mode": "LENIENT"}, "mode"),
        ({"subscribe": "a", "endingOffsets": "latest"}, "endingOffsets"),
        ({"subscribe": "a", "subscribes": "b"}, "subscribes"),
        ({"subscribe": "a", "group": " "}, "group"),
        ({"subscribe": "a", "pushFilters": "true"}, "pushFilters"),
    ],
)
def test_invalid_source_option_is_named(options: dict[str, str], named: str):
    with pytest.raises(InvalidOption) as caught:
        source_options({"url": URL, **options}, streaming=True)
    assert caught.value.option == named
    assert named in str(caught.value)


def test_ending_offset_of_an_unsubscribed_stream_is_an_error():
    """A typo there would read to the end, in silence."""
    options = {"url": URL, "subscribe": "orders", "endingOffsets": '{"order": "5-0"}'}
    with pytest.raises(InvalidOption) as caught:
        source_options(options, streaming=False)
    assert caught.value.option == "endingOffsets"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"txnAppId": "app"}, "txnVersion"),
        ({"txnVersion": "3"}, "txnAppId"),
        ({"delivery": "twice"}, "delivery"),
        ({"delivery": "exactly_once_by_event_id"}, "eventIdColumn"),
        ({"timeColumn": "at"}, "timeColumn"),
        ({"eventIdColumn": "id"}, "eventIdColumn"),
        ({"maxlen": "many"}, "maxlen"),
        ({"minid": "x"}, "minid"),
        ({"maxlen": "5", "minid": "1-1"}, "minid"),
        ({"durability": "forever"}, "durability"),
        ({"eventIdWindow": "long", "delivery": "exactly_once_by_event_id", "eventIdColumn": "id"}, "eventIdWindow"),
        ({"chunkRows": "0"}, "chunkRows"),
        ({"content": "all"}, "content"),
        ({"steam": "out"}, "steam"),
    ],
)
def test_invalid_sink_option_is_named(options: dict[str, str], named: str):
    with pytest.raises(InvalidOption) as caught:
        sink(streaming=False, **options)
    assert caught.value.option == named


def test_streaming_write_rejects_a_transaction_id():
    with pytest.raises(InvalidOption, match="txnAppId"):
        sink(txnAppId="app", txnVersion="1")


def test_sink_parses_caps_and_durations_and_ignores_spark_settings():
    options = sink(maxlen="~1000", forgetAfter="2h", checkpointLocation="/somewhere", queryName="q")
    assert options.trim == TrimPolicy(max_len=1000, approximate=True)
    assert options.forget_after_ms == 7_200_000
    assert sink(minid="5-1").trim == TrimPolicy(min_id=EntryId(5, 1))
    assert sink(forgetAfter="30 min").forget_after_ms == 1_800_000


def test_address_contains_no_secret_until_it_is_resolved(tmp_path):
    secret = tmp_path / "password"
    secret.write_text("p@ss/word\n")
    by_file = source(username="spark", passwordFile=str(secret)).address
    assert b"p@ss" not in pickle.dumps(by_file)
    assert by_file.resolve({}) == "redis://spark:p%40ss%2Fword@localhost:6379"
    by_variable = source_options({"url": "redis://:${SECRET}@h", "subscribe": "a"}, streaming=True).address
    assert by_variable.resolve({"SECRET": "s"}) == "redis://:s@h"
    assert source(passwordEnv="SECRET").address.resolve({"SECRET": "s"}) == "redis://:s@localhost:6379"


def test_a_password_in_an_address_is_not_shown():
    for url in ("redis://user:hush@h:1/0", "redis://user:a/hush@b@h:1", "redis://h:1/0?password=hush"):
        assert "hush" not in repr(Address(url))
        assert "hush" not in repr(source(url=url))
        with pytest.raises(InvalidOption) as caught:
            source(url=f"x{url}")
        assert "hush" not in str(caught.value)


def test_login_options_replace_only_their_part_of_the_url():
    known = {"SECRET": "p@ss"}
    url = "redis+sentinel://us%20er:old@a:1,b:2/main/3"
    assert source(url=url, username="spark").address.resolve(known) == url.replace("us%20er", "spark")
    assert source(url=url, passwordEnv="SECRET").address.resolve(known) == url.replace("old", "p%40ss")
    socket = source(url="unix:///run/redis.sock?db=1", username="spark", passwordEnv="SECRET").address
    assert socket.resolve(known) == "unix://spark:p%40ss@/run/redis.sock?db=1"


@pytest.mark.parametrize("scheme", ["rediss", "rediss+sentinel", "rediss+cluster"])
def test_tls_schemes_are_accepted_for_every_topology(scheme: str):
    assert source(url=f"{scheme}://h:1/main").address.resolve({}) == f"{scheme}://h:1/main"


def test_missing_environment_variable_is_named():
    with pytest.raises(InvalidOption, match="SECRET"):
        source(url="redis://:${SECRET}@h").address.resolve({})
    with pytest.raises(InvalidOption, match="MILLSTREAM_URL"):
        source_options({"subscribe": "a"}, streaming=True).address.resolve({})
    with pytest.raises(InvalidOption, match="passwordFile"):
        source(passwordFile="/no/such/file").address.resolve({})


def test_embedded_broker_is_rejected_with_advice():
    with pytest.raises(InvalidOption, match="millstream serve"):
        source(url="local://")
    with pytest.raises(InvalidOption, match="redis://"):
        source(url="http://h")


def test_timeouts_reach_the_address_of_both_sides():
    options = {"connectTimeoutMs": "70", "answerTimeoutMs": "80"}
    for address in (source(**options).address, sink(**options).address):
        assert (address.connect_ms, address.answer_ms) == (70, 80)
        assert pickle.loads(pickle.dumps(address)) == address
    assert (sink().address.connect_ms, sink().address.answer_ms) == (5000, 5000)
    with pytest.raises(InvalidOption, match="answerTimeoutMs"):
        sink(answerTimeoutMs="soon")
