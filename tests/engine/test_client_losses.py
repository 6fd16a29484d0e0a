"""The client is lost and replaced."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

import pytest

from aioshard import App, Record
from aioshard.errors import ClientLostError, NotDrainedError
from aioshard.ports import Committed, Membership, Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run


class Hanging(InMemoryTransport):
    """A client that does not come to an end when it is closed the first time."""

    closing = 0

    async def close(self) -> None:
        Hanging.closing += 1
        if Hanging.closing == 1:
            self.crash()
            await asyncio.sleep(1_000_000.0)
        await super().close()


def test_a_client_that_does_not_close_does_not_delay_its_replacement() -> None:
    app = App("losses", auto_offset_reset="earliest", commit_timeout=3.0)
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with app.started(lambda: Hanging(broker, "losses", session_timeout=1.0)):
            broker.fail_next_poll(ClientLostError("it died"))
            await asyncio.sleep(5.0)
            assert app.statistics().client_losses == 1
            broker.publish("orders", b"")
            async with asyncio.timeout(5.0):
                await broker.until(lambda: broker.committed("losses", "orders", 0) == 1)

    run(test())


def test_a_client_lost_after_working_is_replaced_at_once() -> None:
    """Only attempts that fail one after the other are further and further apart."""
    app = App("losses")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(10):
                client.broker.fail_next_poll(ClientLostError("it died"))
                await client.publish("orders", b"", partition=0)
                async with asyncio.timeout(2.0):
                    await client.broker.until(
                        lambda number=number: client.committed("orders", 0) == number + 1  # type: ignore[misc]
                    )
                await asyncio.sleep(0.5)
            assert app.statistics().client_losses == 10

    run(test())


def test_nothing_is_requested_from_a_client_that_was_closed() -> None:
    """Its brokers would not answer, or it would raise whatever a closed client raises."""
    app = App("losses")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await client.settle()
            client.broker.fail_next_poll(ClientLostError("it died"))
            await client.broker.until(lambda: app.statistics().client_losses == 1)
            with pytest.raises(ClientLostError, match="a new one is being created"):
                await app.committed("orders", 0)
            await asyncio.sleep(2.0)
            assert await app.committed("orders", 0) == 1

    run(test())


class Stuck(InMemoryTransport):
    """A client whose transaction waits, as long as `hang` says so; the brokers answer everything else."""

    hang: str | None = None

    async def _until_it_returns(self) -> None:
        while self.hang is not None:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.1)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None = None,
    ) -> None:
        await self._until_it_returns()
        await super().commit(offsets, membership, messages)

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        await self._until_it_returns()
        return await super().committed(partitions)


def test_a_transaction_that_waits_is_explained() -> None:
    call = "transactional id 'losses:1' is open and waits for TxnOffsetCommit"
    app = App("losses", processing_guarantee="exactly_once", auto_offset_reset="earliest")
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    transport = Stuck(broker, "losses")
    explained: list[str] = []

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with app.started(lambda: transport):
            transport.hang = call
            for _ in range(3):
                broker.publish("orders", b"")
            await asyncio.sleep(30.0)
            explained.append(app.explain())

    with pytest.raises(NotDrainedError) as error:
        run(test())
    assert call in explained[0]
    assert error.value.uncommitted == {"orders/0": 3}
    assert call in str(error.value)


def test_a_client_that_never_started_was_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    app = App("losses", start_timeout=None)
    broker = InMemoryBroker(partitions=1)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    def events() -> list[str]:
        kinds = {"client_not_started", "client_lost"}
        return [event for line in caplog.records if (event := getattr(line, "event", "")) in kinds]

    async def test() -> None:
        broker.available = False
        async with TestClient(app, broker=broker):
            await asyncio.sleep(5.0)
            assert events() == ["client_not_started"]
            broker.available = True
            while app.statistics().state != "running":  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            broker.fail_next_poll(ClientLostError("it died"))
            await asyncio.sleep(5.0)
            assert events() == ["client_not_started", "client_lost"]
            broker.available = False
            broker.fail_next_poll(ClientLostError("it died again"))
            await asyncio.sleep(5.0)
            assert events() == ["client_not_started", "client_lost", "client_lost", "client_not_started"]
            broker.available = True

    run(test())
