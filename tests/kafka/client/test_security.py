"""Refused connections and permissions: errors name the user, the object and the reason, never a secret."""

import asyncio
import importlib.util
import logging
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation

from aioshard.errors import AuthenticationError, AuthorizationError, ConnectError, SettingsError, TopicsRefusedError
from aioshard.kafka.group.transport import MemberTransport
from aioshard.ports import Committed, Fault
from aioshard.records import TopicPartition
from tests.kafka.client.members import Member, settings_for
from tests.support.access import allow, deny
from tests.support.brokers import SharedKafka
from tests.support.certificates import make_certificates
from tests.support.kafka_properties import PLAIN_USER, SCRAM_USER, SUPER_USER, Credentials

Guarded = Callable[..., Member]

WRONG = "a-wrong-secret"
SECRETS = [SCRAM_USER.password, PLAIN_USER.password, SUPER_USER.password, WRONG]


@pytest.fixture
def guarded(kafka: SharedKafka, group: str, members: list[Member]) -> Guarded:
    """Makes members that log in on the guarded listener; arguments are settings."""

    def make(user: Credentials = SUPER_USER, **overrides: Any) -> Member:
        settings: dict[str, Any] = {
            "security_protocol": "SASL_SSL",
            "ssl_cafile": str(kafka.certificates.ca_file),
            "sasl_mechanism": "PLAIN",
            "sasl_username": user.username,
            "sasl_password": user.password,
        }
        made = Member(settings_for(kafka.secure_bootstrap, **(settings | overrides)), group)
        members.append(made)
        return made

    return make


@pytest.fixture(autouse=True)
def no_secret_is_shown(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Everything is logged, also what nobody would switch on."""
    logger = logging.getLogger("aiokafka")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    caplog.set_level(logging.DEBUG)
    yield
    logger.setLevel(before)
    out, err = capfd.readouterr()
    records = [record for phase in ("setup", "call") for record in caplog.get_records(phase)]
    output = "\n".join([*(f"{record.getMessage()} {record.exc_text}" for record in records), out, err])
    assert [secret for secret in SECRETS if secret in output] == []


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_every_mechanism_reads_and_commits(
    kafka: SharedKafka, topic: str, group: str, guarded: Guarded, mechanism: str
) -> None:
    user = PLAIN_USER if mechanism == "PLAIN" else SCRAM_USER
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"v")] * 3)
    await allow(kafka, user, "topic", topic)
    await allow(kafka, user, "group", group)
    member = guarded(user, sasl_mechanism=mechanism)

    (partitions, membership) = await member.join(topic)
    await member.read_to({partitions[0]: 3})
    await member.transport.commit({partitions[0]: Committed(3, "")}, membership)

    assert await kafka.committed(group, topic) == {0: 3}


@pytest.mark.parametrize(("user", "mechanism"), [(PLAIN_USER, "PLAIN"), (SCRAM_USER, "SCRAM-SHA-512")])
async def test_a_wrong_password_names_the_user_and_the_mechanism(
    guarded: Guarded, user: Credentials, mechanism: str
) -> None:
    member = guarded(user, sasl_mechanism=mechanism, sasl_password=WRONG)
    with pytest.raises(
        AuthenticationError, match=f"refused user '{user.username}' with sasl_mechanism={mechanism}"
    ) as raised:
        await member.transport.start(["t"], None, member)
    assert not raised.value.retriable
    assert WRONG not in repr(raised.value) + repr(raised.value.__cause__) + repr(raised.value.__context__)
    assert WRONG not in repr(member.transport) + repr(vars(raised.value))


async def test_a_mechanism_that_is_not_offered_is_named(kafka: SharedKafka, group: str) -> None:
    class Tokens:
        async def token(self) -> str:
            return "t"

    from aiokafka.abc import AbstractTokenProvider  # noqa: PLC0415

    AbstractTokenProvider.register(Tokens)
    settings = settings_for(
        kafka.secure_bootstrap,
        security_protocol="SASL_SSL",
        ssl_cafile=str(kafka.certificates.ca_file),
        sasl_mechanism="OAUTHBEARER",
        client_options={"sasl_oauth_token_provider": Tokens()},
    )
    member = Member(settings, group)
    with pytest.raises(AuthenticationError, match="does not support sasl_mechanism=OAUTHBEARER"):
        await member.transport.start(["t"], None, member)


async def test_an_untrusted_certificate_names_the_ca_file(kafka: SharedKafka, guarded: Guarded) -> None:
    stranger = str(kafka.certificates.stranger_file)
    member = guarded(ssl_cafile=stranger)
    with pytest.raises(AuthenticationError, match="was not accepted") as raised:
        await member.transport.start(["t"], None, member)
    assert f"ssl_cafile={stranger}" in str(raised.value)
    assert kafka.secure_bootstrap in str(raised.value)


async def test_without_a_ca_file_the_system_certificates_are_used(guarded: Guarded) -> None:
    member = guarded(ssl_cafile=None)
    with pytest.raises(AuthenticationError, match="the system's certificates"):
        await member.transport.start(["t"], None, member)


SASL = {"sasl_mechanism": "PLAIN", "sasl_username": SUPER_USER.username, "sasl_password": SUPER_USER.password}


@pytest.mark.parametrize(
    ("protocol", "tls", "sasl"), [("PLAINTEXT", False, {}), ("SASL_PLAINTEXT", False, SASL), ("SSL", True, {})]
)
async def test_a_listener_that_requires_more_security_is_recognized(
    kafka: SharedKafka, group: str, protocol: str, *, tls: bool, sasl: dict[str, str]
) -> None:
    files = {"ssl_cafile": str(kafka.certificates.ca_file)} if tls else {}
    settings = settings_for(kafka.secure_bootstrap, security_protocol=protocol, **files, **sasl)
    member = Member(settings, group)
    with pytest.raises(ConnectError, match=f"security_protocol is {protocol}, the listener may expect another one"):
        await member.transport.start(["t"], None, member)


@pytest.mark.parametrize(("protocol", "sasl"), [("SSL", {}), ("SASL_SSL", SASL), ("SASL_PLAINTEXT", SASL)])
async def test_a_listener_that_requires_less_security_is_recognized(
    kafka: SharedKafka, group: str, protocol: str, sasl: dict[str, str]
) -> None:
    member = Member(settings_for(kafka.bootstrap, security_protocol=protocol, **sasl), group)
    with pytest.raises((ConnectError, AuthenticationError), match=f"security_protocol is {protocol}|does not support"):
        await member.transport.start(["t"], None, member)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_broker_that_requires_a_client_certificate_is_recognized(
    kafka: SharedKafka, group: str, version: ssl.TLSVersion
) -> None:
    demanding = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    demanding.load_cert_chain(kafka.certificates.server_file)
    demanding.load_verify_locations(kafka.certificates.ca_file)
    demanding.verify_mode = ssl.CERT_REQUIRED
    demanding.minimum_version = demanding.maximum_version = version
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=demanding)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = settings_for(address, security_protocol="SSL", ssl_cafile=str(kafka.certificates.ca_file))
        member = Member(settings, group)
        with pytest.raises(ConnectError, match=r"client certificate \(ssl_certfile\)"):
            await member.transport.start(["t"], None, member)


async def test_a_forbidden_topic_is_named(kafka: SharedKafka, topic: str, group: str, guarded: Guarded) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, PLAIN_USER, "group", group)
    member = guarded(PLAIN_USER)
    with pytest.raises(AuthorizationError, match=topic):
        await member.transport.start([topic], None, member)


async def test_a_forbidden_group_is_named(kafka: SharedKafka, topic: str, group: str, guarded: Guarded) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, PLAIN_USER, "topic", topic)
    member = guarded(PLAIN_USER)
    with pytest.raises(AuthorizationError, match=group):
        await member.transport.start([topic], None, member)


async def test_the_first_poll_names_a_group_without_join_permission(
    kafka: SharedKafka, topic: str, group: str, guarded: Guarded
) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, PLAIN_USER, "topic", topic)
    await allow(kafka, PLAIN_USER, "group", group, AclOperation.DESCRIBE)
    member = guarded(PLAIN_USER)
    await member.transport.start([topic], None, member)
    with pytest.raises(AuthorizationError, match=group):
        await member.poll_until(lambda: False)


async def test_permissions_revoked_later_are_reported(
    kafka: SharedKafka, topic: str, group: str, guarded: Guarded
) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, PLAIN_USER, "topic", topic)
    await allow(kafka, PLAIN_USER, "group", group)
    member = guarded(PLAIN_USER, metadata_max_age=30, heartbeat_interval=1.9)
    (partitions, membership) = await member.join(topic)

    await deny(kafka, PLAIN_USER, "topic", topic, AclOperation.READ)

    async with asyncio.timeout(20):
        while not member.faults:
            await member.poll()
    assert isinstance(member.faults[0], Fault)
    assert isinstance(member.faults[0].error, AuthorizationError)
    assert topic in str(member.faults[0].error)
    with pytest.raises(TopicsRefusedError, match=topic) as refused:
        await member.transport.commit({partitions[0]: Committed(0, "")}, membership)
    assert refused.value.is_denied
    await deny(kafka, PLAIN_USER, "topic", topic, AclOperation.DESCRIBE)
    with pytest.raises(AuthorizationError, match="topic"):
        await member.transport.committed([TopicPartition(topic, 0)])


# Refusals before anything is sent -------------------------------------------------------------


def refused(**overrides: Any) -> str:
    with pytest.raises(SettingsError) as raised:
        MemberTransport(settings_for("localhost:1", **overrides), "g")
    return str(raised.value)


def test_files_that_are_not_certificates_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    message = refused(security_protocol="SSL", ssl_cafile=str(empty))
    assert f"ssl_cafile='{empty}'" in message
    message = refused(security_protocol="SSL", ssl_certfile=str(empty))
    assert f"ssl_certfile='{empty}'" in message


def test_an_encrypted_key_needs_the_right_password(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    files = make_certificates(tmp_path)
    pem = files.server_file.read_bytes()
    key = serialization.load_pem_private_key(pem, None)
    encrypted = tmp_path / "key.pem"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(WRONG.encode()),
        )
    )
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(pem[pem.index(b"-----BEGIN CERTIFICATE") :])
    own = {"security_protocol": "SSL", "ssl_certfile": str(certificate), "ssl_keyfile": str(encrypted)}

    assert "ssl_password must open the key" in refused(**own)
    assert "ssl_password must open the key" in refused(**own, ssl_password="another")
    MemberTransport(settings_for("localhost:1", **own, ssl_password=WRONG), "g")


@pytest.mark.skipif(importlib.util.find_spec("gssapi") is not None, reason="it is installed here")
def test_kerberos_needs_its_package() -> None:
    assert "pip install gssapi" in refused(security_protocol="SASL_PLAINTEXT", sasl_mechanism="GSSAPI")


def test_a_custom_ssl_context_is_used_unchanged() -> None:
    context = ssl.create_default_context()
    settings = settings_for("localhost:1", security_protocol="SSL", client_options={"ssl_context": context})
    transport = MemberTransport(settings, "g")
    assert transport._cluster._pool._options.ssl_context is context


def test_host_name_verification_can_be_disabled() -> None:
    settings = settings_for("localhost:1", security_protocol="SSL", ssl_check_hostname=False)
    transport = MemberTransport(settings, "g")
    tls = transport._cluster._pool._options.ssl_context
    assert tls is not None
    assert tls.check_hostname is False


def test_a_client_option_reaches_the_client() -> None:
    options = {"fetch_min_bytes": 78, "client_rack": "here"}
    transport = MemberTransport(settings_for("localhost:1", client_options=options), "g")
    assert (transport._fetcher._min_bytes, transport._fetcher._rack) == (78, "here")
