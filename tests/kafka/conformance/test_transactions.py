"""Messages and offsets of one transaction, which a proxy delays until the group, or the next client, has moved on.

The tests know a client only as `aioshard.ports.Transport`.
"""

import asyncio
from collections.abc import Collection

import pytest

from aioshard.errors import ClientLostError, TransportError
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE
from tests.kafka.conformance.conftest import CONSUMER_TRANSACTIONS, TRANSACTIONS, Join, on
from tests.support.brokers import SharedKafka
from tests.support.proxies import END_TXN, TXN_OFFSET_COMMIT, Proxies


@on(TRANSACTIONS, in_chaos=[CONSUMER_TRANSACTIONS])
async def test_a_transaction_while_partitions_drain_is_committed(kafka: SharedKafka, topic: str, join: Join) -> None:
    """A rebalance repeats nothing that was finished (I12)."""
    await kafka.create_topic(topic, 2)
    await kafka.create_topic(out := f"{topic}-out")
    one, two = join("one"), join("two")
    await one.join(topic)

    async def drain(partitions: Collection[TopicPartition], _: bool) -> None:
        offsets = dict.fromkeys(partitions, Committed(5, ""))
        await one.transport.commit(offsets, one.transport.membership(), [Message(out, b"drained")])

    one.at_revoke = drain
    await two.transport.start([topic], None, two)
    await two.poll_until(lambda: len(two.holds) == 1)

    assert await two.stored(two.holds) == dict.fromkeys(two.holds, Committed(5, ""))
    assert [record.value for record in await kafka.read(out)] == [b"drained"]


@on(TRANSACTIONS)
async def test_offsets_of_an_open_transaction_are_an_error_until_it_ends(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """A member that began at the offset before them would repeat records that are about to become visible (I13)."""
    await kafka.create_topic(topic)
    one, two = join("one"), join("two")
    partitions, membership = await one.join(topic)
    offsets = dict.fromkeys(partitions, Committed(5, ""))
    ending = proxies.hold(api_key=END_TXN, client_id="one")
    committing = asyncio.create_task(one.transport.commit(offsets, membership, ()), name="commit")
    await ending.met.wait()
    await two.transport.start([topic], None, two)

    with pytest.raises(TransportError) as open_transaction:
        await two.transport.committed(partitions)
    ending.lift()
    await committing

    assert open_transaction.value.retriable
    assert await two.stored(partitions) == offsets


@on(TRANSACTIONS)
async def test_offsets_are_read_when_an_abandoned_transaction_has_ended(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """The brokers do not know of its offsets yet, so nothing but the client can wait for it (I13)."""
    await kafka.create_topic(topic)
    one, two = join("one"), join("two")
    partitions, membership = await one.join(topic)
    offsets = dict.fromkeys(partitions, Committed(5, ""))
    under_way = proxies.hold(api_key=TXN_OFFSET_COMMIT, client_id="one")
    committing = asyncio.create_task(one.transport.commit(offsets, membership, ()), name="commit")
    await under_way.met.wait()
    committing.cancel()
    await asyncio.wait([committing])

    reading = asyncio.create_task(one.stored(partitions), name="read")
    await two.transport.start([topic], None, two)
    assert await two.stored(partitions) == dict.fromkeys(partitions)
    assert not reading.done()
    under_way.lift()

    assert await reading == await two.stored(partitions)


@on(TRANSACTIONS)
async def test_a_closed_client_does_not_disturb_the_transactions_of_the_next(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """Both have the same transactional id, and the last one that begins ends the transactions of the other (I13)."""
    await kafka.create_topic(topic)
    await kafka.create_topic(out := f"{topic}-out")
    one, two = (join(name, group_instance_id="same") for name in ("one", "two"))
    partitions, membership = await one.join(topic)
    offsets = dict.fromkeys(partitions, Committed(5, ""))
    await one.transport.committed(partitions)  # it has begun
    hanging = proxies.hold(api_key=TXN_OFFSET_COMMIT, client_id="one")
    committing = asyncio.create_task(one.transport.commit(offsets, membership, [Message(out, b"1")]), name="commit")
    await hanging.met.wait()
    waiting = asyncio.create_task(one.transport.committed(partitions), name="look")
    await asyncio.sleep(0)
    await one.transport.close()

    _, membership = await two.join(topic)
    await two.transport.committed(partitions)
    hanging.lift()
    await asyncio.wait([committing, waiting], timeout=PATIENCE)
    await two.transport.commit(offsets, membership, [Message(out, b"2")])

    assert isinstance(committing.exception(), TransportError)
    assert isinstance(waiting.exception(), ClientLostError)
    assert await two.stored(partitions) == offsets
    assert [record.value for record in await kafka.read(out)] == [b"2"]
