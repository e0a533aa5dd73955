"""Connections through Spark: TLS, an ACL user, Sentinel, `millstream serve`. For Cluster see test_places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream import BlockingBroker, open_blocking_broker
from millstream.testing import RedisProcess, SentinelSetup, free_port, wait_until
from millstream.testing.servers import ServeProcess
from millstream.testing.topologies import ask, send_command

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

FIELDS = [{"event": str(n)} for n in range(100)]


def values(broker: BlockingBroker, stream: str) -> list[int]:
    return sorted(int(entry.text("event")) for entry in broker.xrange(stream))


def read(spark: SparkSession, address: dict[str, str]) -> list[int]:
    rows = spark.read.format("redis_streams").options(subscribe="in", minPartitions="2", **address).load()
    return sorted(int(bytes(row["value"])) for row in rows.collect())


def write_twice(spark: SparkSession, address: dict[str, str]) -> None:
    rows = spark.range(0, 100, 1, 2).selectExpr("cast(id AS STRING) AS value")
    for _ in range(2):
        writer = rows.write.format("redis_streams").mode("append")
        writer.options(stream="out", txnAppId="job", txnVersion="1", **address).save()


def copying(spark: SparkSession, address: dict[str, str], where: Path) -> Any:
    """A restartable query from ``in`` to ``copy``."""
    rows = spark.readStream.format("redis_streams")
    rows = rows.options(subscribe="in", startingOffsets="earliest", group="spark", **address)
    writer = rows.load().writeStream.format("redis_streams").options(stream="copy", **address)
    return writer.option("checkpointLocation", str(where))


def copy(spark: SparkSession, address: dict[str, str], where: Path) -> None:
    query = copying(spark, address, where).trigger(availableNow=True).start()
    assert query.awaitTermination(90)
    assert query.exception() is None


def check(spark: SparkSession, broker: BlockingBroker, address: dict[str, str], where: Path) -> None:
    broker.xadd_many("in", FIELDS)
    assert read(spark, address) == list(range(100))
    write_twice(spark, address)
    assert values(broker, "out") == list(range(100))
    copy(spark, address, where)
    assert values(broker, "copy") == list(range(100))
    assert [(group.name, group.lag) for group in broker.group_info("in")] == [("spark", 0)]


@pytest.fixture
def tls(tmp_path: Path, shared_redis: RedisProcess) -> Iterator[str]:
    """A server that only accepts TLS; ``tmp_path`` has the CA that signed its certificate, and another CA."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    (tmp_path / "server.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    port = free_port()
    options = ["--tls-port", str(port), "--port", "0", "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(tmp_path / "server.pem"), "--tls-key-file", str(tmp_path / "server.key")]
    options += ["--tls-ca-cert-file", str(tmp_path / "ca.pem")]
    with RedisProcess(options):
        yield f"rediss://127.0.0.1:{port}/2?ssl_ca_certs={tmp_path}"


def test_tls(spark, tls, tmp_path):
    address = {"url": f"{tls}/ca.pem"}
    with open_blocking_broker(address["url"]) as broker:
        check(spark, broker, address, tmp_path / "checkpoint")
    with pytest.raises(PySparkException, match=r"option url.*ssl_ca_certs"):
        read(spark, {"url": f"{tls}/other.pem"})


def test_millstream_serve(spark, tmp_path):
    with ServeProcess() as server, open_blocking_broker(server.url) as broker:
        check(spark, broker, {"url": server.url}, tmp_path / "checkpoint")


def test_acl_user_with_the_documented_permissions(spark, redis_server, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "spark.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("ACL SETUSER spark"))
    ask(redis_server, "ACL", "SETUSER", "spark", "reset", "on", ">pass word", *line.split()[5:])
    secret = tmp_path / "password"
    secret.write_text("pass word\n")
    address = {"url": redis_server.url, "username": "spark", "passwordFile": str(secret)}
    try:
        with open_blocking_broker(redis_server.url) as broker:
            check(spark, broker, address, tmp_path / "checkpoint")
        with pytest.raises(PySparkException, match="PermissionDenied"):
            spark.read.format("redis_streams").options(subscribe="secrets", **address).load().collect()
    finally:
        ask(redis_server, "ACL", "DELUSER", "spark")


def test_sentinel_and_a_failover_while_a_query_runs(spark, tmp_path):
    secret = tmp_path / "password"
    secret.write_text("hush/hush")
    with SentinelSetup(password="hush/hush") as setup:
        host = setup.url.rpartition("@")[2]
        address = {"url": f"redis+sentinel://{host}", "passwordFile": str(secret)}
        with open_blocking_broker(f"redis+sentinel://:hush%2Fhush@{host}") as broker:
            check(spark, broker, address, tmp_path / "checkpoint")
            query = copying(spark, address, tmp_path / "checkpoint").start()
            try:
                broker.xadd("in", {"event": "100"})
                wait_until(lambda: broker.xlen("copy") == 101, what="the query to run", timeout_s=90)
                # A failover loses entries that the replica does not have, so wait until it has all.
                wait_until(lambda: send_command(broker, "WAIT", "1", "1000") == 1, what="the replica", timeout_s=90)
                setup.failover()
                broker.xadd_many("in", [{"event": str(n)} for n in range(101, 200)])
                wait_until(lambda: broker.xlen("copy") >= 200, what="the query to find the new primary", timeout_s=90)
            finally:
                query.stop()
            assert query.exception() is None
            assert values(broker, "copy") == list(range(200))
