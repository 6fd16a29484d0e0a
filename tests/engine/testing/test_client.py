"""TestClient: the app's real engine on the in-memory broker."""

import asyncio
import time

import pytest

from aioshard import App, Record, Retry
from aioshard.errors import ClientLostError, CommitError, CommitRefusedError, StartError, StateError
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, TestClient, run


def make_app(seen: list[bytes | None], **options: object) -> App:
    app = App("billing")

    @app.consume("orders", **options)  # type: ignore[arg-type]
    async def on_order(record: Record) -> None:
        await asyncio.sleep(0.01)
        seen.append(record.value)

    return app


def test_pytest_does_not_collect_it() -> None:
    assert TestClient.__test__ is False


def test_a_published_record_is_handled_and_committed() -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        async with TestClient(make_app(seen)) as client:
            record = await client.publish("orders", "paid", key="k", headers=[("trace", "1")])
            await client.settle()

            assert client.committed("orders", record.partition) == 1
            assert client.records("orders") == [record]
            assert (record.key, record.headers) == (b"k", (("trace", b"1"),))

    run(scenario())
    assert seen == [b"paid"]


@pytest.mark.parametrize(
    ("value", "stored"),
    [(b"\x00", b"\x00"), ("ü", "ü".encode()), (None, None), ({"a": [1]}, b'{"a":[1]}'), (3, b"3")],
)
def test_values_are_bytes_text_none_or_json(value: object, stored: bytes | None) -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        async with TestClient(make_app(seen)) as client:
            await client.publish("orders", value)
            await client.settle()

    run(scenario())
    assert seen == [stored]


async def test_the_client_works_in_another_loop_in_real_time() -> None:
    seen: list[bytes | None] = []

    async with TestClient(make_app(seen)) as client:
        for number in range(20):
            await client.publish("orders", str(number), partition=0)
        await client.settle(timeout=30.0)

        assert client.committed("orders", 0) == 20
    assert sorted(seen, key=str) == sorted((str(number).encode() for number in range(20)), key=str)


async def test_speed_shortens_the_delays_of_retries() -> None:
    app = App("billing")
    attempts: list[float] = []

    @app.consume("orders", retry=Retry(attempts=3, initial=20.0, factor=1.0, jitter=0.0))
    async def on_order(record: Record) -> None:
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise ConnectionError(record.offset)

    async with TestClient(app, speed=1000) as client:
        await client.publish("orders", b"x")
        await client.settle(timeout=30.0)

    assert len(attempts) == 3
    assert 0.03 < attempts[-1] - attempts[0] < 20.0
    assert next(iter(app.handlers)).retry.initial == 20.0, "the app is as it was"


def test_retries_wait_in_virtual_time() -> None:
    app = App("billing")
    attempts: list[float] = []

    @app.consume("orders", retry=Retry(attempts=3, initial=20.0, factor=2.0, jitter=0.0, maximum=100.0))
    async def on_order(record: Record) -> None:
        attempts.append(asyncio.get_running_loop().time())
        if len(attempts) < 3:
            raise ConnectionError(record.offset)

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"x")
            await client.settle(timeout=100.0)

    run(scenario())
    assert [round(later - attempts[0], 3) for later in attempts] == [0.0, 20.0, 60.0]


def test_settle_names_incomplete_records() -> None:
    app = App("billing")

    @app.consume("orders", retry=Retry(attempts=1))
    async def on_order(record: Record) -> None:
        raise ConnectionError(record.offset)

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"x", partition=2)
            with pytest.raises(TimeoutError) as caught:
                await client.settle(timeout=3.0)

            assert asyncio.get_running_loop().time() == pytest.approx(3.0, abs=0.1)
            message = str(caught.value)
            assert message.startswith("the app did not settle within 3 s:")
            assert "orders/2 is committed up to 0 and ends at 1" in message
            assert "incomplete records of orders/2: 1" in message

    run(scenario())


def test_settle_waits_for_a_hole_at_the_end() -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        async with TestClient(make_app(seen)) as client:
            await client.publish("orders", b"a", partition=0)
            client.broker.log("orders", 0).skip(3)
            await client.settle()

            assert client.committed("orders", 0) == 4

    run(scenario())


def test_a_reassigned_partition_is_read_from_its_commit() -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        async with TestClient(make_app(seen)) as client:
            await client.publish("orders", b"ours", partition=1)
            await client.settle()
            await client.revoke("orders", 1)
            await client.publish("orders", b"somebody else's", partition=1)
            await client.publish("orders", b"ours too", partition=0)
            await client.settle()
            client.group.commit_from_outside({TopicPartition("orders", 1): 2})

            await client.assign("orders", 1)
            await client.publish("orders", b"ours again", partition=1)
            await client.settle()

            assert client.committed("orders", 1) == 3
            with pytest.raises(LookupError, match="unknown topic 'order'"):
                await client.revoke("order", 1)

    run(scenario())
    assert seen == [b"ours", b"ours too", b"ours again"]


@pytest.mark.parametrize(
    ("error", "applied"),
    [
        (CommitError("no answer"), False),
        (CommitError("no answer"), True),
        (CommitRefusedError("the group has moved on"), False),
    ],
    ids=["not applied", "applied", "refused"],
)
def test_settle_waits_for_the_commit_after_a_scripted_failure(error: CommitError, *, applied: bool) -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        async with TestClient(make_app(seen)) as client:
            await client.settle()
            client.fail_next_commit(error, applied=applied)
            await client.publish("orders", b"a", partition=0)
            if isinstance(error, CommitRefusedError):
                await client.broker.until(lambda: not client.broker.commits[-1].applied)
                client.group.rebalance()
            await client.settle()

            assert client.committed("orders", 0) == 1
            statistics = client.app.statistics()
            assert statistics.commit_failures == 1
            assert all(partition.committed == partition.committable for partition in statistics.partitions)

    run(scenario())
    assert seen == [b"a"]


def test_a_lost_client_is_replaced_and_nothing_is_lost() -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        async with TestClient(make_app(seen)) as client:
            await client.publish("orders", b"a", partition=0)
            await client.settle()
            client.broker.fail_next_poll(ClientLostError("the fetcher ended"))
            await client.publish("orders", b"b", partition=0)
            await client.settle()

            assert len(client.transports) == 2

    run(scenario())
    assert seen == [b"a", b"b"]


def test_settle_names_an_outage_that_then_passes() -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        async with TestClient(make_app(seen)) as client:
            client.broker.available = False
            await client.publish("orders", b"a", partition=0)
            with pytest.raises(TimeoutError, match="orders/0 is committed up to 0 and ends at 1"):
                await client.settle()
            client.broker.available = True
            await client.settle()

    run(scenario())
    assert seen == [b"a"]


def test_a_refused_start_leaves_the_app_unchanged() -> None:
    app = make_app([])

    async def scenario() -> None:
        client = TestClient(app)
        app.configure(assign={"orders": [9]})
        client.broker.create_topic("orders", 2)
        with pytest.raises(StartError, match="partitions 0 to 1 and not 9"):
            async with client:
                pass

    run(scenario())
    assert app.settings.auto_offset_reset is None


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="a positive number"):
        TestClient(make_app([]), speed=0)

    async def twice() -> None:
        async with TestClient(make_app([])) as client:
            with pytest.raises(StateError, match="is already running"):
                await client.__aenter__()

    run(twice())


def test_two_apps_share_a_broker_and_a_group() -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        broker = InMemoryBroker()
        async with TestClient(make_app(seen), broker=broker) as one, TestClient(make_app(seen), broker=broker) as two:
            for partition in range(4):
                await one.publish("orders", str(partition), partition=partition)
            await two.settle()

            shares = [{(p.topic, p.partition) for p in c.app.statistics().partitions} for c in (one, two)]
            assert len(shares[0]) == len(shares[1]) == 2
            assert not shares[0] & shares[1]

    run(scenario())
    assert sorted(seen, key=str) == [b"0", b"1", b"2", b"3"]


def test_the_app_gets_its_own_settings_back() -> None:
    app = make_app([])
    before = app.settings

    async def scenario() -> None:
        async with TestClient(app):
            assert app.settings.auto_offset_reset == "earliest"

    run(scenario())
    assert app.settings.auto_offset_reset == before.auto_offset_reset
    assert app.settings.commit_interval == before.commit_interval


def test_an_app_with_latest_starts_at_the_end() -> None:
    seen: list[bytes | None] = []
    app = make_app(seen)
    app.configure(auto_offset_reset="latest")

    async def scenario() -> None:
        broker = InMemoryBroker()
        broker.publish("orders", b"old", partition=0)
        async with TestClient(app, broker=broker) as client:
            await client.publish("orders", b"new", partition=0)
            await client.settle()

    run(scenario())
    assert seen == [b"new"]


def test_a_client_can_be_entered_again_and_resumes_at_the_commit() -> None:
    seen: list[bytes | None] = []

    async def scenario() -> None:
        client = TestClient(make_app(seen))
        async with client:
            await client.publish("orders", b"a", partition=0)
            await client.settle()
        await client.publish("orders", b"b", partition=0)
        async with client:
            await client.settle()

    run(scenario())
    assert seen == [b"a", b"b"]


def test_a_plain_function_runs_in_a_thread_in_virtual_time_too() -> None:
    app = App("billing")
    seen: list[int] = []

    @app.consume("orders")
    def on_order(record: Record) -> None:
        time.sleep(0.01)
        seen.append(record.offset)

    async def scenario() -> None:
        async with TestClient(app) as client:
            for _ in range(3):
                await client.publish("orders", b"x", key="k")
            await client.settle()

    run(scenario())
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_rebalances_under_load_lose_nothing_and_keep_the_order_of_a_key(seed: int) -> None:
    seen: dict[tuple[bytes | None, int], list[int]] = {}
    app = App("billing")

    @app.consume("orders", concurrency=3)
    async def on_order(record: Record) -> None:
        await asyncio.sleep(0.005 * (record.offset % 4))
        seen.setdefault((record.key, record.partition), []).append(record.offset)

    async def scenario() -> list[Record]:
        async with TestClient(app, latency=lambda operation: 0.01 if operation != "start" else 0.0) as client:
            for number in range(60):
                await client.publish("orders", str(number), key=f"k{number % 5}")
                if number % 20 == 10:
                    client.group.rebalance()
                await asyncio.sleep(0.003)
            await client.settle(timeout=60.0)
            return list(client.records("orders"))

    records = run(scenario(), seed=seed)
    for key, partition in {(record.key, record.partition) for record in records}:
        expected = [record.offset for record in records if (record.key, record.partition) == (key, partition)]
        assert seen[key, partition] == expected
