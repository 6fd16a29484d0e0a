"""The jars of the brokers that our messages are compared with."""

import os
from pathlib import Path

from tests.support.kafka_libs import LIBS_VARIABLE, NEWEST, OLDER, BrokerUnavailableError, kafka_libs
from tests.support.requirements import skip_or_fail

CHOSEN = "the chosen Kafka"
KAFKAS = [CHOSEN] if os.environ.get(LIBS_VARIABLE) else [NEWEST, OLDER]
"""The versions of Kafka to compare with."""


def libs_of(kafka: str) -> Path:
    """The folder of the jars of one of `KAFKAS`; without it, the test is skipped."""
    try:
        return kafka_libs(None if kafka == CHOSEN else kafka)
    except BrokerUnavailableError as missing:
        skip_or_fail("Kafka broker", str(missing))
