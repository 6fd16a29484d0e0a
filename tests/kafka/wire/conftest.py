"""A broker with one listener for each way to connect."""

import asyncio
import json
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from time import time

import pytest

from tests.support.certificates import Certificates
from tests.support.kafka import KafkaBroker
from tests.support.kafka_libs import BrokerUnavailableError
from tests.support.kafka_properties import PLAIN_USER, SUPER_USER
from tests.support.ports import free_ports
from tests.support.requirements import skip_or_fail

LIFETIME = 4.0
"""Seconds after which the broker wants another login on the listener `SHORT`."""
PROTOCOLS = {
    "PLAINTEXT": "PLAINTEXT",
    "SECURE": "SASL_SSL",
    "TLS": "SSL",
    "LOGIN": "SASL_PLAINTEXT",
    "SHORT": "SASL_PLAINTEXT",
}
"""The security protocol of each listener."""
_LOGIN = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class Listeners:
    """Where the broker listens, by the names in `PROTOCOLS`."""

    ports: dict[str, int]
    certificates: Certificates
    broker: KafkaBroker

    def __getitem__(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", self.ports[name]


@pytest.fixture(scope="session")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listeners]:
    """A broker of these tests with all listeners; leave it running."""
    broker = KafkaBroker(tmp_path_factory.mktemp("listeners"))
    names = [name for name in PROTOCOLS if name not in ("PLAINTEXT", "SECURE")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    ports |= {"PLAINTEXT": broker.ports.plain, "SECURE": broker.ports.secure}
    addresses = ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())
    protocols = ",".join(f"{name}:{protocol}" for name, protocol in PROTOCOLS.items())
    users = " ".join(f'user_{user.username}="{user.password}"' for user in (PLAIN_USER, SUPER_USER))
    broker.properties = {
        "listeners": f"{addresses},CONTROLLER://127.0.0.1:{broker.ports.controller}",
        "advertised.listeners": addresses,
        "listener.security.protocol.map": f"{protocols},CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.tls.ssl.keystore.type": "PEM",
        "listener.name.tls.ssl.keystore.location": str(broker.certificates.server_file),
        "listener.name.short.connections.max.reauth.ms": str(int(LIFETIME * 1000)),
    }
    for name in ("secure", "login", "short"):
        broker.properties |= {
            f"listener.name.{name}.plain.sasl.jaas.config": f"{_LOGIN}.plain.PlainLoginModule required {users};",
            f"listener.name.{name}.scram-sha-256.sasl.jaas.config": f"{_LOGIN}.scram.ScramLoginModule required;",
            f"listener.name.{name}.scram-sha-512.sasl.jaas.config": f"{_LOGIN}.scram.ScramLoginModule required;",
            f"listener.name.{name}.oauthbearer.sasl.jaas.config": (
                f'{_LOGIN}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
            ),
        }
    try:
        asyncio.run(broker.start())
    except BrokerUnavailableError as missing:
        skip_or_fail("Kafka broker", str(missing))
    yield Listeners(ports, broker.certificates, broker)
    asyncio.run(broker.kill())


def unsigned_token(lifetime: float) -> str:
    """Returns a token for OAUTHBEARER, as the broker of the tests accepts it: without a signature."""
    now = int(time())
    claims = {"sub": SUPER_USER.username, "iat": now - 5, "exp": now + int(lifetime)}
    parts = [urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "none"}, claims)]
    return f"{'.'.join(parts)}."
