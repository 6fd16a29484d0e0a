"""Records that a proxy brings late, when the engine has moved its position.

The tests know a client only as `aioshard.ports.Transport`.
"""

from tests.kafka.conformance.conftest import CLASSIC, Join, on
from tests.support.brokers import SharedKafka
from tests.support.proxies import FETCH, Proxies


@on(CLASSIC)
async def test_a_seek_back_during_a_fetch_returns_nothing_of_what_it_brings(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """It begins at the position before the seek, so the records between would be lost (I3)."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 2)
    one = join("one")
    [partition], _ = await one.join(topic)
    await one.read_to({partition: 2})
    fetching = proxies.hold(api_key=FETCH, client_id="one")
    await fetching.met.wait()
    await kafka.produce(topic, [(None, b"")] * 2)

    one.transport.seek(partition, 0)
    one.next_offsets[partition] = 0
    fetching.lift()
    await one.read_to({partition: 4})

    assert one.offsets(partition) == [0, 1, 0, 1, 2, 3]


@on(CLASSIC)
async def test_nothing_of_a_partition_is_fetched_before_its_first_seek(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """While the engine does not know where to begin, records would fill the memory (I6)."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")])
    fetches = proxies.answer(lambda _, answer: answer, api_key=FETCH, client_id="one")
    one = join("one")
    one.at_assign = lambda *_: None
    await one.join(topic)

    await one.poll(timeout=0.3)

    assert fetches.requests == []
