"""The configuration of the test broker: one node, short timeouts, a plain and a guarded listener."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.certificates import Certificates


@dataclass(frozen=True)
class Credentials:
    """A user of the guarded listener."""

    username: str
    password: str


SCRAM_USER = Credentials("alice", "alice-secret")
"""Exists from the start under SCRAM-SHA-512 and SCRAM-SHA-256; may do nothing until an ACL allows it."""
PLAIN_USER = Credentials("bob", "bob-secret")
"""Exists under PLAIN; may do nothing until an ACL allows it."""
SUPER_USER = Credentials("root", "root-secret")
"""Exists under PLAIN and may do everything."""


@dataclass(frozen=True)
class Ports:
    """The loopback ports of one broker; clients that come through *proxied* are sent to *proxy*."""

    plain: int
    secure: int
    controller: int
    proxied: int
    proxy: int


QUICK: dict[str, str] = {
    # One node holds everything.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "auto.create.topics.enable": "false",
    # Groups settle immediately, and a test may use short sessions.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "100",
    # Under that protocol a member cannot choose them.
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.coordinator.rebalance.protocols": "classic,consumer",
    # Retention and compaction come within a second instead of minutes.
    "log.initial.task.delay.ms": "200",
    "log.retention.check.interval.ms": "500",
    "log.segment.delete.delay.ms": "500",
    "log.cleaner.backoff.ms": "100",
    "log.cleaner.dedupe.buffer.size": "8388608",
    # An abandoned transaction is aborted about a second after its own timeout.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # After a kill the controller refuses the same broker until its old session has ended.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Small machine.
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
}


def broker_properties(directory: Path, ports: Ports, certificates: Certificates, extra: Mapping[str, str]) -> str:
    """The text of `server.properties`; *extra* wins over our own settings."""
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{ports.controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": _listeners(ports, PROXIED=ports.proxied, CONTROLLER=ports.controller),
        "advertised.listeners": _listeners(ports, PROXIED=ports.proxy),
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT,SECURE:SASL_SSL"
        ),
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(directory / "data"),
        **QUICK,
        **_security(certificates),
        **extra,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _listeners(ports: Ports, **others: int) -> str:
    named = {"PLAINTEXT": ports.plain, "SECURE": ports.secure, **others}
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in named.items())


def _security(certificates: Certificates) -> dict[str, str]:
    """The guarded listener; clients of the plain one are ANONYMOUS and may do everything."""
    login = "org.apache.kafka.common.security"
    users = " ".join(f'user_{user.username}="{user.password}"' for user in (PLAIN_USER, SUPER_USER))
    return {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{SUPER_USER.username}",
        "allow.everyone.if.no.acl.found": "false",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.secure.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required {users};",
        "listener.name.secure.scram-sha-256.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
        "listener.name.secure.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
        "listener.name.secure.ssl.keystore.type": "PEM",
        "listener.name.secure.ssl.keystore.location": str(certificates.server_file),
        # A refused login is answered immediately instead of after the connection was held back.
        "connection.failed.authentication.delay.ms": "0",
    }
