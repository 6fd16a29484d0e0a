"""A user of the guarded listener without any permissions until a test grants some."""

from typing import Any

from confluent_kafka.admin import AclOperation

from tests.guarantees.scenario import Scenario
from tests.support.access import allow, create_scram_user
from tests.support.brokers import SharedKafka
from tests.support.kafka_properties import Credentials


async def consuming_user(kafka: SharedKafka, scenario: Scenario) -> tuple[Credentials, dict[str, Any]]:
    """A user that may consume the scenario's topic in its group and nothing else, and the settings to log in as it."""
    user = Credentials(f"user-{scenario.group[-8:]}", "a-secret")
    await create_scram_user(kafka, user)
    await allow(kafka, user, "group", scenario.group)
    await allow(kafka, user, "topic", scenario.topic, AclOperation.READ, AclOperation.DESCRIBE)
    login = {
        "bootstrap_servers": kafka.secure_bootstrap,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(kafka.certificates.ca_file),
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": user.username,
        "sasl_password": user.password,
    }
    return user, login
