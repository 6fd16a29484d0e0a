"""The pool: who waits for whom, limits, idle connections, new logins, moved brokers, the end. With virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from aioshard.kafka.wire.addresses import STAGGER
from aioshard.kafka.wire.connection import CLOSE_GRACE
from aioshard.kafka.wire.errors import (
    AuthenticationFailedError,
    ConnectionLostError,
    RequestTimedOutError,
    UnsupportedVersionError,
    WireError,
)
from aioshard.kafka.wire.options import ConnectionOptions
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT, IDLE_TIMEOUT, ConnectionPool, Purpose, limit_of
from aioshard.kafka.wire.requests import (
    API_VERSIONS,
    FETCH,
    FIND_COORDINATOR,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    SASL_AUTHENTICATE,
)
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import ModelBroker, Received, hold

FIND = FIND_COORDINATOR(key="billing", kind=0)
JOIN = JOIN_GROUP(
    group="billing",
    session_timeout_ms=6_000,
    rebalance_timeout_ms=60_000,
    member="",
    instance=None,
    kind="consumer",
    protocols=[],
    reason="",
)
LOGIN = ConnectionOptions(
    security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password="secret"
)
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])


class Cluster:
    """Three model brokers on a network, and a pool that knows them as nodes 1 to 3."""

    def __init__(self, network: MemoryNetwork, options: ConnectionOptions) -> None:
        self.network = network
        self.brokers = {node: ModelBroker() for node in (1, 2, 3)}
        self.addresses = {
            node: network.add(f"kafka-{node}", broker.protocol)[0] for node, broker in self.brokers.items()
        }
        self.pool = ConnectionPool(options)
        self.pool.know({node: (f"kafka-{node}", 9092) for node in self.brokers})

    def silence(self, node: int) -> None:
        """Nothing is left behind the address of a broker."""
        self.network.silent.add(self.addresses[node])

    def stop(self, node: int) -> None:
        """Refuse connections."""
        del self.network.listeners[self.addresses[node]]

    def start(self, node: int) -> None:
        """Accept connections again."""
        self.network.listeners[self.addresses[node]] = self.brokers[node].protocol

    def opened(self, node: int) -> int:
        """How many connections to a broker there were."""
        return len(self.brokers[node].sessions)


Scenario = Callable[[Cluster], Awaitable[None]]


def scenario(test: Scenario, options: ConnectionOptions | None = None, *, seed: int | None = None) -> None:
    """Runs a test; after `close`, neither a task nor a connection may be left."""

    async def live(network: MemoryNetwork) -> None:
        cluster = Cluster(network, options or ConnectionOptions())
        try:
            await test(cluster)
        finally:
            await cluster.pool.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        await asyncio.sleep(1)
        assert [broker.open_sessions for broker in cluster.brokers.values()] == [[], [], []]

    run_on_network(live, seed=seed)


def now() -> float:
    return asyncio.get_running_loop().time()


async def settle() -> None:
    """Let everything happen that does not wait for a clock of seconds."""
    await asyncio.sleep(0.1)


# One connection for each broker and purpose ---------------------------------------------


@SEEDS
def test_whoever_comes_first_opens_the_connection_for_all(seed: int | None) -> None:
    async def test(cluster: Cluster) -> None:
        await asyncio.gather(*(cluster.pool.ask(1, FIND) for _ in range(20)))
        await cluster.pool.ask(1, FIND)
        assert cluster.opened(1) == 1
        assert cluster.pool.is_connected(1)
        assert not cluster.pool.is_connected(2)

    scenario(test, seed=seed)


@SEEDS
def test_a_cancelled_waiter_leaves_the_attempt_to_the_others(seed: int | None) -> None:
    async def test(cluster: Cluster) -> None:
        held: list[Received] = []
        cluster.brokers[1].on(API_VERSIONS, hold(held))
        first, second = (asyncio.create_task(cluster.pool.ask(1, FIND)) for _ in range(2))
        request = await cluster.brokers[1].arrival(API_VERSIONS)
        first.cancel()
        await asyncio.wait([first])
        assert held == [request]
        ModelBroker().receive(request)
        assert (await second).error == 0
        assert cluster.opened(1) == 1

    scenario(test, seed=seed)


def test_an_attempt_that_nobody_waits_for_serves_the_next_request() -> None:
    async def test(cluster: Cluster) -> None:
        only = asyncio.create_task(cluster.pool.ask(1, FIND))
        await asyncio.sleep(0)
        only.cancel()
        await settle()
        await cluster.pool.ask(1, FIND)
        assert cluster.opened(1) == 1

    scenario(test)


@pytest.mark.parametrize("held", [purpose for purpose in Purpose if purpose is not Purpose.GENERAL])
def test_a_held_request_delays_only_its_own_purpose(held: Purpose) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.brokers[1].on(JOIN_GROUP, hold([]))
        asking = asyncio.create_task(cluster.pool.ask(1, JOIN, purpose=held, timeout=300))
        await cluster.brokers[1].arrival(JOIN_GROUP)
        began = now()
        for purpose in set(Purpose) - {held}:
            await cluster.pool.ask(1, FIND, purpose=purpose)
        assert now() - began < 1
        asking.cancel()
        await asyncio.wait([asking])

    scenario(test)


# Brokers that hang or refuse ------------------------------------------------------------


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "refuses"])
@SEEDS
def test_a_broker_that_hangs_or_refuses_delays_no_request_to_another(hangs: bool, seed: int | None) -> None:
    async def test(cluster: Cluster) -> None:
        if hangs:
            cluster.silence(1)
        else:
            cluster.stop(1)
        waiting = [asyncio.create_task(cluster.pool.ask(1, FIND, purpose=purpose)) for purpose in Purpose]
        await asyncio.sleep(0)
        began = now()
        await asyncio.gather(*(cluster.pool.ask(node, FIND) for node in (2, 3)))
        assert now() - began < 0.1
        for task in waiting:
            with pytest.raises(ConnectionLostError, match=r"kafka-1:9092: (no answer within 3 s|Connection refused)"):
                await task
        assert now() - began < CONNECT_TIMEOUT + 0.1

    scenario(test, seed=seed)


def test_a_broker_that_accepts_and_is_silent_delays_nobody_either() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.brokers[1].silent = True
        waiting = asyncio.create_task(cluster.pool.ask(1, FIND))
        await cluster.pool.ask(2, FIND)
        assert now() < 0.1
        with pytest.raises(ConnectionLostError, match="no answer"):
            await waiting

    scenario(test)


def test_a_failed_attempt_is_followed_by_a_growing_pause() -> None:
    """However many requests there are, and however eagerly they are repeated."""

    async def test(cluster: Cluster) -> None:
        cluster.stop(1)
        times: list[float] = []

        async def insist(purpose: Purpose) -> None:
            while now() < 10:
                with suppress(ConnectionLostError):
                    await cluster.pool.ask(1, FIND, purpose=purpose)
                times.append(now())

        await asyncio.gather(insist(Purpose.GENERAL), insist(Purpose.FETCH))
        attempts = cluster.network.attempts.count(cluster.addresses[1])
        assert 20 <= attempts <= 50
        assert cluster.pool.is_resting(1)
        assert not cluster.pool.is_resting(2)

        cluster.start(1)
        began = now()
        await cluster.pool.ask(1, FIND)
        assert now() - began <= 1.3
        assert not cluster.pool.is_resting(1)

    scenario(test)


def test_pauses_of_two_clients_differ() -> None:
    ends = []

    async def test(cluster: Cluster) -> None:
        cluster.stop(1)
        for _ in range(10):
            with suppress(ConnectionLostError):
                await cluster.pool.ask(1, FIND)
        ends.append(now())

    scenario(test, seed=1)
    scenario(test, seed=2)
    assert ends[0] != ends[1]


def test_after_a_success_the_pause_is_short_again() -> None:
    async def test(cluster: Cluster) -> None:
        for _ in range(2):
            cluster.stop(1)
            for _ in range(8):
                with suppress(ConnectionLostError):
                    await cluster.pool.ask(1, FIND)
            cluster.start(1)
            await cluster.pool.ask(1, FIND)
            cluster.brokers[1].open_sessions[0].close()
            await settle()
        cluster.stop(1)
        began = now()
        for _ in range(2):
            with suppress(ConnectionLostError):
                await cluster.pool.ask(1, FIND)
        assert now() - began < 0.2

    scenario(test)


def test_an_unknown_node_is_named() -> None:
    async def test(cluster: Cluster) -> None:
        with pytest.raises(ConnectionLostError, match="the address of broker 9 is unknown"):
            await cluster.pool.ask(9, FIND)
        assert not cluster.pool.is_resting(9)

    scenario(test)


def test_a_broker_is_asked_by_its_name_before_nodes_are_known() -> None:
    async def test(cluster: Cluster) -> None:
        assert (await cluster.pool.ask(("kafka-2", 9092), FIND)).error == 0
        assert cluster.pool.is_connected(("kafka-2", 9092))
        assert not cluster.pool.is_connected(2)

    scenario(test)


def test_the_connection_to_a_bootstrap_server_is_that_of_the_broker_that_it_is() -> None:
    async def live(network: MemoryNetwork) -> None:
        broker = ModelBroker()
        network.add("kafka-1", broker.protocol)
        pool = ConnectionPool(ConnectionOptions())
        await pool.ask(("kafka-1", 9092), FIND)
        pool.know({1: ("kafka-1", 9092)})
        await pool.ask(1, FIND)
        assert len(broker.sessions) == 1
        assert pool.is_connected(1)
        await pool.close()

    run_on_network(live)


def test_a_refused_login_or_an_old_broker_is_not_a_lost_connection() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.brokers[1].on(SASL_AUTHENTICATE, lambda request: request.reply(error=58, message="no"))
        cluster.brokers[2].versions[METADATA] = (0, 7)
        for _ in range(2):
            with pytest.raises(AuthenticationFailedError, match="refused the login: no"):
                await cluster.pool.ask(1, FIND)
            with pytest.raises(UnsupportedVersionError, match="supports Kafka"):
                await cluster.pool.ask(2, FIND)

    scenario(test, LOGIN)


# Versions -------------------------------------------------------------------------------


def test_two_brokers_of_a_rolling_upgrade_are_asked_in_different_versions() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.brokers[1].versions[FIND_COORDINATOR] = (0, 2)
        await asyncio.gather(cluster.pool.ask(1, FIND), cluster.pool.ask(2, FIND))
        sent = [cluster.brokers[node].received(FIND_COORDINATOR)[0].version for node in (1, 2)]
        assert sent == [2, 3]

        # The same broker, upgraded meanwhile.
        cluster.brokers[1].versions[FIND_COORDINATOR] = (0, 6)
        cluster.brokers[1].open_sessions[0].close()
        await settle()
        await cluster.pool.ask(1, FIND)
        assert cluster.brokers[1].received(FIND_COORDINATOR)[-1].version == 3

    scenario(test)


# Limits ---------------------------------------------------------------------------------


def test_each_kind_of_request_has_its_limit() -> None:
    limits = {
        request.api.name: limit_of(request)
        for request in (
            METADATA(),
            FIND,
            OFFSET_FETCH(),
            LEAVE_GROUP(),
            OFFSET_COMMIT(),
            LIST_OFFSETS(),
            FETCH(max_wait_ms=500),
        )
    }
    assert limits == {
        "Metadata": 10,
        "FindCoordinator": 10,
        "OffsetFetch": 10,
        "LeaveGroup": 10,
        "OffsetCommit": 30,
        "ListOffsets": 30,
        "Fetch": 20.5,
    }


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 10), (65, 65)], ids=["by its kind", "by its caller"])
def test_an_overdue_response_ends_the_connection_and_the_next_request_gets_another(
    timeout: float | None, seconds: float
) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.pool.ask(1, FIND)
        cluster.brokers[1].on(FIND_COORDINATOR, hold([]))
        began = now()
        with pytest.raises(RequestTimedOutError):
            await cluster.pool.ask(1, FIND, timeout=timeout)
        assert now() - began == pytest.approx(seconds, abs=0.1)
        cluster.brokers[1].on(FIND_COORDINATOR, lambda request: request.reply(node=4))
        assert (await cluster.pool.ask(1, FIND)).node == 4
        assert cluster.opened(1) == 2

    scenario(test)


@pytest.mark.parametrize(
    ("purpose", "opened"), [(Purpose.GENERAL, 1), (Purpose.COMMIT, 1), (Purpose.FETCH, 1), (Purpose.JOIN, 2)]
)
def test_only_a_cancelled_join_costs_the_connection(purpose: Purpose, opened: int) -> None:
    async def test(cluster: Cluster) -> None:
        held: list[Received] = []
        cluster.brokers[1].on(JOIN_GROUP, hold(held))
        asking = asyncio.create_task(cluster.pool.ask(1, JOIN, purpose=purpose, timeout=300))
        await cluster.brokers[1].arrival(JOIN_GROUP)
        asking.cancel()
        await asyncio.wait([asking])
        held[0].reply()
        assert (await cluster.pool.ask(1, FIND, purpose=purpose)).error == 0
        assert cluster.opened(1) == opened

    scenario(test)


# Idle connections -----------------------------------------------------------------------


def test_an_idle_connection_is_closed_before_the_broker_does_it() -> None:
    async def test(cluster: Cluster) -> None:
        (session,) = [await cluster.pool.ask(1, FIND)] and cluster.brokers[1].sessions
        await asyncio.sleep(IDLE_TIMEOUT - 10)
        assert session.is_open
        await cluster.pool.ask(1, FIND)
        await asyncio.sleep(IDLE_TIMEOUT - 10)
        assert session.is_open, "the second request counts"
        await asyncio.sleep(20)
        assert not session.is_open
        assert not cluster.pool.is_connected(1)
        await cluster.pool.ask(1, FIND)
        assert cluster.opened(1) == 2

    scenario(test)


def test_a_connection_with_a_request_in_flight_is_never_idle() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.brokers[1].on(JOIN_GROUP, lambda request: request.reply_later(3 * IDLE_TIMEOUT))
        await cluster.pool.ask(1, JOIN, purpose=Purpose.JOIN, timeout=4 * IDLE_TIMEOUT)
        assert cluster.opened(1) == 1
        await asyncio.sleep(IDLE_TIMEOUT + 1)
        await asyncio.sleep(IDLE_TIMEOUT)
        assert cluster.brokers[1].open_sessions == []

    scenario(test)


# New logins -----------------------------------------------------------------------------

LIFETIME = 60.0


def living_shortly(cluster: Cluster) -> ModelBroker:
    """Broker 1 cuts connections that are used for longer than a minute."""
    broker = cluster.brokers[1]
    broker.lifetime = LIFETIME
    return broker


@pytest.mark.parametrize("interval", [0.5, 4, 17])
def test_no_request_fails_when_logins_expire(interval: float) -> None:
    async def test(cluster: Cluster) -> None:
        living_shortly(cluster)
        while now() < 20 * LIFETIME:
            await cluster.pool.ask(1, FIND)
            await asyncio.sleep(interval)
        assert 17 <= cluster.opened(1) <= 25
        assert len(cluster.brokers[1].open_sessions) <= 2

    scenario(test, LOGIN)


def test_connections_are_replaced_at_different_times() -> None:
    async def test(cluster: Cluster) -> None:
        broker = living_shortly(cluster)
        while now() < 0.97 * LIFETIME:
            await asyncio.gather(*(cluster.pool.ask(1, FIND, purpose=purpose) for purpose in Purpose))
            await asyncio.sleep(0.1)
        times = sorted(session.opened_at / LIFETIME for session in broker.sessions)[len(Purpose) :]
        assert len(times) == len(Purpose)
        assert times[0] >= 0.85
        assert times[-1] <= 0.96
        assert times[-1] - times[0] > 0.01

    scenario(test, LOGIN)


def test_requests_in_flight_finish_on_the_old_connection() -> None:
    async def test(cluster: Cluster) -> None:
        broker = living_shortly(cluster)
        await cluster.pool.ask(1, FIND)
        held: list[Received] = []
        broker.on(OFFSET_COMMIT, hold(held))
        await asyncio.sleep(0.84 * LIFETIME)
        commit = OFFSET_COMMIT(group="g", generation=1, member="m", instance=None, topics=[])
        committing = asyncio.create_task(cluster.pool.ask(1, commit, timeout=60))
        await broker.arrival(OFFSET_COMMIT)
        while cluster.opened(1) == 1:
            await cluster.pool.ask(1, FIND, timeout=60)
            await asyncio.sleep(0.5)
        await settle()
        await cluster.pool.ask(1, FIND)
        old, new = broker.sessions
        assert broker.requests[-1].session is new
        assert old.is_open
        await asyncio.sleep(20)
        held[0].reply()
        await committing
        await settle()
        assert not old.is_open
        assert new.is_open

    scenario(test, LOGIN)


def test_a_failing_renewal_neither_spins_nor_fails_requests_before_the_end() -> None:
    async def test(cluster: Cluster) -> None:
        broker = cluster.brokers[1]
        broker.lifetime = 600
        await cluster.pool.ask(1, FIND)
        broker.on(SASL_AUTHENTICATE, lambda request: request.reply(error=58, message="expired"))
        while now() < 0.97 * broker.lifetime:
            await cluster.pool.ask(1, FIND)
            await asyncio.sleep(0.5)
        assert 2 <= cluster.opened(1) <= 1 + 5
        await asyncio.sleep(0.02 * broker.lifetime)
        with pytest.raises(AuthenticationFailedError, match="expired"):
            await cluster.pool.ask(1, FIND)
        broker.on(SASL_AUTHENTICATE, lambda request: request.reply(content=b"", lifetime_ms=60_000))
        await cluster.pool.ask(1, FIND)

    scenario(test, LOGIN)


def test_a_connection_that_nobody_uses_is_not_renewed() -> None:
    async def test(cluster: Cluster) -> None:
        living_shortly(cluster)
        await cluster.pool.ask(1, FIND)
        await asyncio.sleep(5 * LIFETIME)
        assert cluster.opened(1) == 1
        await cluster.pool.ask(1, FIND)
        assert cluster.opened(1) == 2

    scenario(test, LOGIN)


# Brokers that move ----------------------------------------------------------------------


def test_a_changed_address_replaces_the_connections() -> None:
    async def test(cluster: Cluster) -> None:
        held: list[Received] = []
        cluster.brokers[1].on(OFFSET_COMMIT, hold(held))
        await cluster.pool.ask(1, FIND)
        commit = OFFSET_COMMIT(group="g", generation=1, member="m", instance=None, topics=[])
        committing = asyncio.create_task(cluster.pool.ask(1, commit))
        await cluster.brokers[1].arrival(OFFSET_COMMIT)

        cluster.pool.know({1: ("kafka-2", 9092)})
        await cluster.pool.ask(1, FIND)
        assert cluster.opened(2) == 1
        held[0].reply()
        await committing
        await settle()
        assert cluster.brokers[1].open_sessions == []

        cluster.pool.know({1: ("kafka-2", 9092)})
        await cluster.pool.ask(1, FIND)
        assert cluster.opened(2) == 1, "the same address again changes nothing"

    scenario(test)


@SEEDS
def test_waiters_follow_a_broker_that_moves_while_its_old_address_is_silent(seed: int | None) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.silence(1)
        waiting = [asyncio.create_task(cluster.pool.ask(1, FIND)) for _ in range(3)]
        await asyncio.sleep(1)
        cluster.pool.know({1: ("kafka-2", 9092)})
        await asyncio.gather(*waiting)
        assert now() < 1.1
        assert cluster.opened(2) == 1

    scenario(test, seed=seed)


# Every address of a name (on real sockets: test_sockets.py) -------------------


def test_a_silent_address_never_uses_up_the_time_for_a_connection() -> None:
    async def test(cluster: Cluster) -> None:
        broker = ModelBroker()
        cluster.network.add("many", *[None] * 5, broker.protocol)
        for purpose in Purpose:
            began = now()
            await cluster.pool.ask(("many", 9092), FIND, purpose=purpose)
            assert now() - began < CONNECT_TIMEOUT / 2
            if purpose is not Purpose.GENERAL:
                assert now() - began < 0.1, "from the second connection on, it begins with the one that answered"

    scenario(test)


def test_a_refused_address_is_followed_by_the_next_at_once() -> None:
    async def test(cluster: Cluster) -> None:
        broker = ModelBroker()
        addresses = cluster.network.add("many", *[broker.protocol] * 4)
        for address in addresses[:3]:
            del cluster.network.listeners[address]
        await cluster.pool.ask(("many", 9092), FIND)
        assert now() < 0.1

    scenario(test)


def test_the_attempt_after_a_failed_one_begins_with_another_address() -> None:
    """An address that accepts and then fails at the login would be tried for ever."""

    async def test(cluster: Cluster) -> None:
        bad, good = ModelBroker(), ModelBroker()
        bad.on(SASL_AUTHENTICATE, hold([]))
        cluster.network.add("many", bad.protocol, good.protocol)
        with pytest.raises(ConnectionLostError, match="did not finish the login"):
            await cluster.pool.ask(("many", 9092), FIND)
        await cluster.pool.ask(("many", 9092), FIND)
        assert len(good.open_sessions) == 1
        await asyncio.sleep(1)
        assert bad.open_sessions == []

    scenario(test, LOGIN)


def test_the_loser_of_a_race_is_closed() -> None:
    async def test(cluster: Cluster) -> None:
        slow, quick = ModelBroker(), ModelBroker()
        slow.silent = True
        cluster.network.add("many", slow.protocol, quick.protocol)
        await cluster.pool.ask(("many", 9092), FIND)
        await asyncio.sleep(1)
        assert len(slow.sessions) == 1
        assert slow.open_sessions == []

    scenario(test)


def test_an_address_that_answers_at_the_same_moment_is_closed_too() -> None:
    async def test(cluster: Cluster) -> None:
        slow, quick = ModelBroker(), ModelBroker()
        versions = {api: span for api, span in slow.versions.items() if api is not API_VERSIONS}
        apis = [{"key": api.key, "lowest": span[0], "highest": span[1]} for api, span in versions.items()]
        slow.on(API_VERSIONS, lambda request: request.reply_later(STAGGER, apis=apis))
        cluster.network.add("many", slow.protocol, quick.protocol)
        await cluster.pool.ask(("many", 9092), FIND)
        await asyncio.sleep(1)
        assert len(slow.sessions + quick.sessions) == 2
        assert len(slow.open_sessions + quick.open_sessions) == 1

    scenario(test)


def test_the_error_names_every_address() -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.network.add("many", None, ModelBroker().protocol)
        del cluster.network.listeners[second]
        with pytest.raises(ConnectionLostError) as raised:
            await cluster.pool.ask(("many", 9092), FIND)
        assert str(raised.value) == f"many:9092: {second}: Connection refused; {first}: no answer within 3 s"
        assert isinstance(raised.value.__cause__, ConnectionRefusedError)

    scenario(test)


# The end --------------------------------------------------------------------------------


@SEEDS
def test_closing_ends_requests_attempts_and_connections(seed: int | None) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.silence(2)
        cluster.brokers[1].on(FIND_COORDINATOR, hold([]))
        cluster.brokers[3].on(API_VERSIONS, hold([]))
        asked = [asyncio.create_task(cluster.pool.ask(node, FIND)) for node in (1, 2, 3) for _ in range(2)]
        await cluster.brokers[1].arrival(FIND_COORDINATOR, 2)
        began = now()
        await cluster.pool.close()
        assert now() - began <= CLOSE_GRACE
        for task in asked:
            with pytest.raises(ConnectionLostError, match="closed"):
                await task
        for target in (1, 2, ("kafka-3", 9092)):
            with pytest.raises(ConnectionLostError, match="the connections are closed"):
                await cluster.pool.ask(target, FIND)
        await cluster.pool.close()

    scenario(test, seed=seed)


def test_closing_waits_for_cancelled_attempts() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.silence(1)
        asked = asyncio.create_task(cluster.pool.ask(1, FIND), name="asked")
        await settle()
        await cluster.pool.close()
        assert {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}} <= {"asked"}
        with pytest.raises(ConnectionLostError, match="the connections are closed"):
            await asked

    scenario(test)


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_cancelled_close_leaves_nothing_open(steps: int) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.silence(2)
        await cluster.pool.ask(1, FIND)
        attempt = asyncio.create_task(cluster.pool.ask(2, FIND))
        await settle()
        closing = asyncio.create_task(cluster.pool.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing, attempt])
        assert closing.cancelled() or steps > 2
        await settle()
        assert cluster.brokers[1].open_sessions == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    scenario(test)


@pytest.mark.parametrize("seed", range(12))
def test_under_random_faults_every_request_ends_and_nothing_is_left(seed: int) -> None:
    """Requests, cancellations, cuts, silence and moves at random; each request ends in the time that it may take."""

    async def test(cluster: Cluster) -> None:
        import random  # noqa: PLC0415 - seeded by the network

        for broker in cluster.brokers.values():
            broker.lifetime = 20
            broker.on(FIND_COORDINATOR, lambda request: _at_random(request, random.random()))

        async def ask() -> None:
            purpose = random.choice(list(Purpose))
            with suppress(WireError, TimeoutError):
                async with asyncio.timeout(random.choice([0.05, 3, 100])):
                    await cluster.pool.ask(random.choice([1, 2, 3]), FIND, purpose=purpose, timeout=5)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(random.uniform(0, 3))
                node = random.choice([1, 2, 3])
                await random.choice([_cut, _pause, _move])(cluster, node)

        disturbing = asyncio.create_task(disturb())
        for _ in range(60):
            asked = [asyncio.create_task(ask()) for _ in range(random.randint(1, 20))]
            began = now()
            await asyncio.wait(asked)
            assert now() - began < 100
            for task in asked:
                task.result()
        disturbing.cancel()
        await asyncio.wait([disturbing])

    scenario(test, LOGIN, seed=seed)


def _at_random(request: Received, draw: float) -> None:
    if draw < 0.7:
        request.reply_later(draw / 10)
    elif draw < 0.8:
        request.reply(throttle_ms=1_000)
    elif draw < 0.9:
        request.cut()


async def _cut(cluster: Cluster, node: int) -> None:
    for session in cluster.brokers[node].open_sessions:
        session.close()


async def _pause(cluster: Cluster, node: int) -> None:
    cluster.brokers[node].silent = True
    await asyncio.sleep(2)
    cluster.brokers[node].silent = False


async def _move(cluster: Cluster, node: int) -> None:
    cluster.pool.know({node: (f"kafka-{node % 3 + 1}", 9092)})
    await asyncio.sleep(1)
    cluster.pool.know({node: (f"kafka-{node}", 9092)})
