"""An unclean election loses records that were read: the app names them, and runs each of the others once (I1)."""

from collections import Counter

import pytest

from aioshard import App, Record
from tests.kafka.faults.support import quick_app, until
from tests.support.three_brokers import ThreeBrokers

READ, LOST = 100, 50
"""Records that are replicated, and records that only the old leader has."""


class Election:
    """A partition whose second replica becomes its leader without having everything."""

    def __init__(self, brokers: ThreeBrokers, topic: str, group: str) -> None:
        self.brokers = brokers
        self.topic = topic
        self.group = group
        self.ran: Counter[bytes | None] = Counter()

    async def create_topic(self) -> None:
        quick = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
        await self.brokers.create_topic(self.topic, assignment={0: [1, 2]}, config=quick)

    def app(self) -> App:
        app = quick_app(self.brokers, self.group, metadata_max_age=5)

        @app.consume(self.topic)
        async def handle(record: Record) -> None:
            self.ran[record.value] += 1

        return app

    async def publish(self, name: str, count: int) -> set[bytes]:
        """Publish records with a value of their own each."""
        values = [f"{name}-{number}".encode() for number in range(count)]
        await self.brokers.produce(self.topic, [(value, value) for value in values])
        return set(values)

    async def until_committed(self, app: App, offset: int) -> None:
        """Return when everything before an offset is done and committed."""
        await until(lambda: [one.committed for one in app.statistics().partitions] == [offset], app.explain, timeout=60)

    async def read_all(self, app: App) -> set[bytes]:
        """Let an app read the records that both replicas have, and those that only the leader gets; return them."""
        kept = await self.publish("kept", READ)
        await self.until_committed(app, READ)
        await self.brokers.stop(2)
        lost = await self.publish("lost", LOST)
        await self.until_committed(app, READ + LOST)
        return kept | lost

    async def elect(self) -> None:
        """Let the replica that is behind lead; the other one is gone."""
        await self.brokers.kill(1)
        await self.brokers.start(2)
        await self.brokers.until_led(self.topic, 0, by=2)


@pytest.fixture
async def election(brokers: ThreeBrokers, topic: str, group: str) -> Election:
    made = Election(brokers, topic, group)
    await made.create_topic()
    return made


@pytest.mark.timeout(240)
@pytest.mark.parametrize("written", [20, pytest.param(200, marks=pytest.mark.chaos)], ids=["shorter", "longer"])
async def test_a_running_app_goes_on_where_the_log_parts(election: Election, written: int) -> None:
    app = election.app()
    async with app:
        before = await election.read_all(app)

        await election.elect()
        new = await election.publish("new", written)

        await election.until_committed(app, READ + written)
        assert app.statistics().lost_offsets == LOST
    assert set(election.ran.values()) == {1}
    assert election.ran.keys() == before | new


@pytest.mark.timeout(240)
@pytest.mark.parametrize("written", [pytest.param(20, marks=pytest.mark.chaos), 200], ids=["shorter", "longer"])
async def test_an_app_that_starts_goes_on_where_the_log_parts(election: Election, written: int) -> None:
    """Nobody reads meanwhile: the leader epoch beside the committed offset tells."""
    app = election.app()
    async with app:
        before = await election.read_all(app)

    await election.elect()
    new = await election.publish("new", written)

    app = election.app()
    async with app:
        await election.until_committed(app, READ + written)
        assert app.statistics().lost_offsets == LOST
    assert set(election.ran.values()) == {1}
    assert election.ran.keys() == before | new
