"""The confluent client: its options, its thread and commit metadata."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.errors import SettingsError
from aioshard.kafka.clients import kafka_clients
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka


async def test_an_unknown_client_option_is_refused_with_the_clients_message(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    chosen = Settings(bootstrap_servers=kafka.bootstrap, client="confluent", client_options={"no.such.option": 1})
    transport = kafka_clients(chosen, group).transport()

    with pytest.raises(SettingsError, match=r'No such configuration property: "no\.such\.option"'):
        await transport.start([topic], None, _Nobody())


class _Nobody:
    async def revoked(self, partitions: Any) -> None:
        """Nothing is held."""

    def lost(self, partitions: Any) -> None:
        """Nothing is held."""

    def assigned(self, partitions: Any, membership: Any) -> None:
        """Nothing is opened."""


HANGS = """
import asyncio, threading
from aioshard.kafka.confluent.consumer import Callbacks, ConsumerThread

async def main():
    options = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "log_level": 0}
    thread = ConsumerThread(options, "g", 45.0, Callbacks(*[print] * 4))
    print(await thread.call(sum, [1, 2]))
    thread.call(threading.Event().wait)

asyncio.run(main())
"""


def test_a_hanging_call_does_not_keep_the_process_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=True)

    assert ended.stdout == "3\n"


@pytest.mark.parametrize(("writes", "reads"), [("confluent", "aiokafka"), ("aiokafka", "confluent")])
async def test_commit_metadata_written_by_one_client_is_read_by_the_other(
    kafka: SharedKafka, topic: str, group: str, writes: str, reads: str
) -> None:
    await kafka.create_topic(topic, 1)
    at = TopicPartition(topic, 0)
    metadata = CommitMetadata(first=FirstCommit(3, 2))
    writer = Member(settings_for(kafka.bootstrap, client=writes), group)
    reader = Member(settings_for(kafka.bootstrap, client=reads), group)
    try:
        (_, membership) = await writer.join(topic)
        committing = asyncio.create_task(writer.transport.commit({at: Committed(5, metadata.text(5))}, membership))
        while not committing.done():
            await writer.poll()
        await committing
        await writer.transport.close()

        await reader.join(topic)
        found = (await reader.transport.committed([at]))[at]
        assert found is not None
        assert found.offset == 5
        assert CommitMetadata.read(found.metadata, 5) == metadata
    finally:
        await writer.transport.close()
        await reader.transport.close()
