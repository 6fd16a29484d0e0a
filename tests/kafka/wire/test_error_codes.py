"""Our table of error codes is Kafka's: compared with the class in the jars of both brokers, which prints it."""

import re
import subprocess
from typing import NamedTuple

import pytest

from aioshard.kafka.wire.codes import ERROR_CODES
from tests.kafka.wire.jars import KAFKAS, libs_of
from tests.support.kafka_libs import NEWEST

pytestmark = pytest.mark.kafka

ROW = re.compile(r"<tr><td>(\w+)</td><td>(-?\d+)</td><td>(True|False)</td>")


class Known(NamedTuple):
    """The name of an error in Kafka, and whether its clients send the request again."""

    name: str
    retriable: bool


@pytest.mark.parametrize("kafka", KAFKAS)
def test_our_error_codes_are_kafkas(kafka: str) -> None:
    """An older Kafka has fewer of them."""
    command = [
        "java",
        "-XX:TieredStopAtLevel=1",
        "-cp",
        f"{libs_of(kafka)}/*",
        "org.apache.kafka.common.protocol.Errors",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kafkas = {int(code): Known(name, retriable == "True") for name, code, retriable in ROW.findall(printed)}
    assert kafkas.pop(0).name == "NONE"

    ours = {
        code: Known(known.name, known.retriable)
        for code, known in ERROR_CODES.items()
        if kafka == NEWEST or code in kafkas
    }

    assert ours == kafkas
