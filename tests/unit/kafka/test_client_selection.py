"""The client that an app uses, and the error if it is not installed."""

import importlib.util
import logging
from typing import Any

import pytest

from aioshard.errors import MissingExtraError
from aioshard.kafka.clients import kafka_clients
from aioshard.kafka.confluent.options import consumer_options, share_of_buffer
from aioshard.kafka.confluent.transport import ConfluentTransport
from aioshard.kafka.group.transport import MemberTransport
from aioshard.settings import Settings

SERVERS = "localhost:9092"


def settings(**overrides: Any) -> Settings:
    return Settings(bootstrap_servers=SERVERS, **overrides)


def test_the_setting_chooses_the_client() -> None:
    assert isinstance(kafka_clients(settings(), "g").transport(), MemberTransport)
    assert isinstance(kafka_clients(settings(client="confluent"), "g").transport(), ConfluentTransport)


def test_a_missing_client_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "confluent_kafka" else found(name))

    with pytest.raises(MissingExtraError, match=r"pip install 'aioshard\[confluent\]'"):
        kafka_clients(settings(client="confluent"), "g")


def test_auto_commit_and_auto_offset_reset_are_off_in_the_client() -> None:
    options = consumer_options(settings(client="confluent"), "billing")

    assert options["enable.auto.commit"] is options["enable.auto.offset.store"] is False
    assert options["auto.offset.reset"] == "error"
    assert options["partition.assignment.strategy"] == "cooperative-sticky"
    assert (options["session.timeout.ms"], options["heartbeat.interval.ms"]) == (45_000, 3_000)
    assert options["max.poll.interval.ms"] == 60_000
    assert "debug" not in options


def test_a_client_without_brokers_retries_the_bootstrap_servers_with_pauses() -> None:
    options = consumer_options(settings(client="confluent"), "g")
    overridden = consumer_options(settings(client="confluent", client_options={"reconnect.backoff.ms": 50}), "g")

    assert options.get("metadata.recovery.strategy", "rebootstrap") == "rebootstrap"
    assert (options["reconnect.backoff.ms"], overridden["reconnect.backoff.ms"]) == (1000, 50)


def test_under_kip_848_the_broker_sets_the_session() -> None:
    options = consumer_options(
        settings(
            client="confluent",
            group_protocol="consumer",
            group_instance_id="one",
            client_options={"group.remote.assignor": "range"},
        ),
        "g",
    )

    assert (options["group.protocol"], options["group.remote.assignor"]) == ("consumer", "range")
    assert options["group.instance.id"] == "one"
    assert not {"session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"} & options.keys()


def test_the_client_queue_and_our_buffers_share_half_of_the_bound() -> None:
    bound = 64 << 20
    options = consumer_options(settings(client="confluent", max_buffered_bytes=bound), "g")

    queued = options["queued.max.messages.kbytes"] * 1024 + options["fetch.max.bytes"]
    for partitions in (1, 16, 512):
        assert queued + partitions * share_of_buffer(partitions, bound // 2) <= bound // 2


def test_tls_and_sasl_are_passed_under_the_clients_names(tmp_path: Any) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_text("")
    options = consumer_options(
        settings(
            client="confluent",
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_username="ada",
            sasl_password="secret",
            ssl_cafile=str(authority),
            ssl_check_hostname=False,
        ),
        "g",
    )

    assert options["ssl.ca.location"] == str(authority)
    assert (options["sasl.mechanisms"], options["sasl.username"]) == ("SCRAM-SHA-512", "ada")
    assert options["sasl.password"] == "secret"
    assert options["ssl.endpoint.identification.algorithm"] == "none"


def test_the_client_log_goes_to_one_logger() -> None:
    options = consumer_options(settings(client="confluent"), "g")

    assert options["logger"] is logging.getLogger("aioshard.kafka.confluent.librdkafka")


async def test_queries_of_the_second_client_use_the_timeouts_of_its_membership() -> None:
    """A session that librdkafka limits is shorter than the default, which the queries would compute by themselves."""
    chosen = settings(client="confluent", rebalance_timeout=30)
    transport = ConfluentTransport(chosen, "g")
    assert chosen.session_timeout == 30
    assert transport._settings.session_timeout == 30
    assert transport._consumer_options["session.timeout.ms"] == 30_000
