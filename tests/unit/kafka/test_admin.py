"""The admin client: its requests, what it retries, and the errors that users see.

The brokers are models on a network in memory, with virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from aioshard.errors import (
    AuthorizationError,
    CommitError,
    CommitRefusedError,
    SettingsError,
    SideTopicError,
    TransportError,
)
from aioshard.kafka.admin import KafkaAdmin, LogBounds
from aioshard.kafka.groups import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, Coordinator, GroupTime, GroupTimes, TimeLimits
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import (
    ALL,
    CONSUMER_GROUP_DESCRIBE,
    CREATE_TOPICS,
    DESCRIBE_CONFIGS,
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    INCREMENTAL_ALTER_CONFIGS,
    LEAVE_GROUP,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
)
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received, Rule
from tests.support.model_cluster import ModelCluster
from tests.support.model_group import ModelGroup
from tests.unit.kafka.committing import ONE, TWO
from tests.unit.kafka.wire.services import KAFKA_2_8

PATIENCE = 1.0
BOTH = {ONE: Committed(5, "text"), TWO: Committed(7, "")}
OTHER = TopicPartition("sales", 0)
POLICY = "cleanup.policy"


class Brokers:
    """Three brokers, the first two of which lead one partition of `orders` each.

    Attributes:
        model: The brokers.
        group: What they keep of the group "billing".
        admin: The client.
    """

    def __init__(self, model: ModelCluster, group: ModelGroup, admin: KafkaAdmin) -> None:
        self.model = model
        self.group = group
        self.admin = admin

    def on(self, api: Api, rule: Rule) -> None:
        """Handles requests of a kind with *rule* at all brokers."""
        for broker in self.model.brokers.values():
            broker.on(api, rule)

    def answer(self, api: Api, *answers: dict[str, Any]) -> None:
        """Answers requests of a kind in turn; the last answer is repeated."""
        left = list(answers)
        self.on(api, lambda request: request.reply(**(left.pop(0) if len(left) > 1 else left[0])))

    def received(self, api: Api) -> list[Received]:
        """The requests of a kind that have arrived at any broker."""
        return self.group.received(api)


def scenario(
    test: Callable[[Brokers], Awaitable[None]],
    *,
    without: tuple[Api, ...] = (),
    versions: Mapping[Api, tuple[int, int]] | None = None,
) -> None:
    """Run a test; the brokers do not know some requests, or only some versions of them."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, 3)
        model.create("orders", 2)
        group = ModelGroup(model, versions)
        for broker in model.brokers.values():
            for api in without:
                del broker.versions[api]
        try:
            async with asyncio.timeout(1_000), KafkaAdmin(model.settings, patience=PATIENCE) as admin:
                await test(Brokers(model, group, admin))
        finally:
            await model.close()

    run_on_network(live)


# Errors of every request ------------------------------------------------------------------


class Case(NamedTuple):
    """A request, the response with an error code, and the call that sends it."""

    api: Api
    response: Callable[[int], dict[str, Any]]
    call: Callable[[KafkaAdmin], Awaitable[Any]]
    facts: frozenset[int] = frozenset()
    """Codes that are no error."""
    others: Mapping[Api, dict[str, Any]] = MappingProxyType({})
    """The answers to other requests of the call."""

    def prepare(self, brokers: Brokers) -> None:
        for api, answer in self.others.items():
            brokers.answer(api, answer)


def described(code: int) -> dict[str, Any]:
    return {"groups": [{"error": code, "group": "billing", "state": "Stable", "kind": "consumer"}]}


def settings(code: int, values: Mapping[str, str], kind: int = 2, name: str = "orders") -> dict[str, Any]:
    configs = [{"name": setting, "value": value} for setting, value in values.items()]
    return {"resources": [{"error": code, "kind": kind, "name": name, "configs": configs}]}


def times(session: int, heartbeat: int, *own: str, code: int = 0) -> dict[str, Any]:
    """The times of the group "billing"; those in *own* are its own."""
    configs = [
        {"name": name, "value": str(value), "source": 8 if name in own else 5}
        for name, value in ((SESSION_TIMEOUT, session), (HEARTBEAT_INTERVAL, heartbeat))
    ]
    return {"resources": [{"error": code, "kind": 32, "name": "billing", "configs": configs}]}


def altered(code: int, message: str | None = None) -> dict[str, Any]:
    return {"resources": [{"error": code, "message": message, "kind": 32, "name": "billing"}]}


def topic(code: int) -> dict[str, Any]:
    brokers = [{"node": node, "host": f"kafka-{node}", "port": 9092} for node in (1, 2, 3)]
    partitions = [{"partition": 0, "leader": 1}]
    return {"brokers": brokers, "topics": [{"error": code, "name": "orders", "partitions": partitions}]}


def offset(code: int) -> dict[str, Any]:
    part = {"partition": 0, "offset": 5, "error": code}
    return {"groups": [{"group": "billing", "topics": [{"topic": "orders", "partitions": [part]}]}]}


CASES = {
    "partitions": Case(METADATA, topic, lambda admin: admin.partitions("orders"), frozenset({3, 17})),
    "settings": Case(
        DESCRIBE_CONFIGS,
        lambda code: settings(code, {POLICY: "compact"}),
        lambda admin: admin.topic_settings("orders", [POLICY]),
    ),
    "create": Case(
        CREATE_TOPICS,
        lambda code: {"topics": [{"name": "orders", "error": code}]},
        lambda admin: admin.create_topic("orders", 1, {}),
        frozenset({36}),
    ),
    "coordinator": Case(
        FIND_COORDINATOR,
        lambda code: {"error": code, "node": 1, "host": "kafka-1", "port": 9092},
        lambda admin: admin.coordinator("billing"),
    ),
    "times": Case(
        DESCRIBE_CONFIGS, lambda code: times(45_000, 5_000, code=code), lambda admin: admin.group_times("billing")
    ),
    "alter": Case(
        INCREMENTAL_ALTER_CONFIGS,
        altered,
        lambda admin: admin.reset_group_times("billing"),
        frozenset({40}),
        {DESCRIBE_CONFIGS: times(45_000, 5_000)},
    ),
    "protocol": Case(
        CONSUMER_GROUP_DESCRIBE, described, lambda admin: admin.has_consumer_protocol("billing"), frozenset({35, 69})
    ),
    "group": Case(CONSUMER_GROUP_DESCRIBE, described, lambda admin: admin.group("billing"), frozenset({35, 69})),
    "remove": Case(
        LEAVE_GROUP,
        lambda code: {"error": code, "members": [{"member": "gone"}]},
        lambda admin: admin.remove_member("billing", "gone"),
    ),
    "commits": Case(OFFSET_FETCH, offset, lambda admin: admin.group_commits("billing", [ONE])),
    "all commits": Case(OFFSET_FETCH, offset, lambda admin: admin.all_commits("billing")),
    "commit": Case(
        OFFSET_COMMIT,
        lambda code: {"topics": [{"topic": "orders", "partitions": [{"partition": 0, "error": code}]}]},
        lambda admin: admin.commit_without_member("billing", {ONE: Committed(5, "")}),
    ),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@EACH
def test_an_error_of_a_broker_is_raised(case: Case) -> None:
    async def test(brokers: Brokers) -> None:
        case.prepare(brokers)
        brokers.answer(case.api, case.response(0))
        await case.call(brokers.admin)
        for code in {*ERROR_CODES, 999} - case.facts:
            brokers.answer(case.api, case.response(code))
            with pytest.raises(TransportError) as raised:
                await case.call(brokers.admin)
            passes = code in ERROR_CODES and ERROR_CODES[code].retriable
            if code != 35:
                assert raised.value.retriable is passes, code

    scenario(test)


@EACH
@pytest.mark.parametrize("is_cut", [False, True], ids=["code", "lost connection"])
def test_an_error_that_passes_is_retried(case: Case, is_cut: bool) -> None:
    """Except by requests that are sent once."""

    async def test(brokers: Brokers) -> None:
        def fail(request: Received) -> None:
            if is_cut:
                request.cut()
            else:
                request.reply(**case.response(7))
            brokers.answer(case.api, case.response(0))

        case.prepare(brokers)
        brokers.on(case.api, fail)
        is_sent_once = case.api is OFFSET_COMMIT or (case.api is CREATE_TOPICS and not is_cut)
        if is_sent_once:
            with pytest.raises(TransportError) as raised:
                await case.call(brokers.admin)
            assert raised.value.retriable
        else:
            await case.call(brokers.admin)
        assert len(brokers.received(case.api)) >= (1 if is_sent_once else 2)

    scenario(test)


@EACH
def test_a_broker_that_never_answers_is_given_up(case: Case) -> None:
    async def test(brokers: Brokers) -> None:
        brokers.on(case.api, lambda _request: None)
        began = asyncio.get_running_loop().time()
        with pytest.raises(TransportError) as raised:
            await case.call(brokers.admin)
        assert asyncio.get_running_loop().time() - began <= 5.0
        assert raised.value.retriable
        assert "no answer in time" in str(raised.value)

    scenario(test)


@pytest.mark.parametrize("code", [30, 29])
@pytest.mark.parametrize("retry", [True, False])
def test_a_refused_permission_is_named(code: int, retry: bool) -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.errors = {ONE: code}
        with pytest.raises(AuthorizationError, match="'billing'" if code == 30 else "'orders'"):
            await brokers.admin.commit_without_member("billing", BOTH, retry=retry)
        with pytest.raises(AuthorizationError, match="'billing'" if code == 30 else "'orders'"):
            await brokers.admin.group_commits("billing", [ONE])

    scenario(test)


def test_the_latest_error_explains_a_deadline() -> None:
    """A broker first says that it does not coordinate the group, and then nothing."""

    async def test(brokers: Brokers) -> None:
        answered = asyncio.Event()

        def fetch(request: Received) -> None:
            if not answered.is_set():
                request.reply(groups=[{"group": "billing", "error": 16}])
                answered.set()

        brokers.on(OFFSET_FETCH, fetch)
        with pytest.raises(TransportError, match="NOT_COORDINATOR") as raised:
            await brokers.admin.group_commits("billing", [ONE])
        assert raised.value.retriable

    scenario(test)


# Topics -----------------------------------------------------------------------------------


def test_topics_are_those_that_exist_without_internal_ones() -> None:
    async def test(brokers: Brokers) -> None:
        answer = topic(0)
        answer["topics"] += [
            {"error": 5, "name": "moving"},
            {"error": 29, "name": "secret"},
            {"name": "__consumer_offsets", "internal": True},
        ]
        brokers.answer(METADATA, answer)
        assert await brokers.admin.topics() == {"orders", "moving"}
        brokers.answer(METADATA, {"topics": answer["topics"]})
        with pytest.raises(TransportError):
            await brokers.admin.topics()

    scenario(test)


def test_looking_up_a_topic_does_not_create_it() -> None:
    async def test(brokers: Brokers) -> None:
        with pytest.raises(TransportError, match="does not exist"):
            await brokers.admin.partitions("refunds")
        assert await brokers.admin.describe_topic("refunds", [POLICY]) is None
        assert not any(request.values.create_topics for request in brokers.received(METADATA))

    scenario(test)


@pytest.mark.parametrize("answer", [topic(5), topic(0) | {"topics": []}, {"brokers": []}])
def test_an_unavailable_topic_is_not_taken_for_missing(answer: dict[str, Any]) -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(METADATA, answer)
        for call in (brokers.admin.partitions("orders"), brokers.admin.ensure_compacted("orders", 1)):
            with pytest.raises(TransportError) as raised:
                await call
            assert raised.value.retriable
            assert "does not exist" not in str(raised.value)

    scenario(test)


def test_a_new_topic_has_its_settings_and_the_default_replication() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(CREATE_TOPICS, {"topics": [{"name": "refunds"}]})
        assert await brokers.admin.create_topic("refunds", 3, {POLICY: "compact"})
        [request] = brokers.received(CREATE_TOPICS)
        [wanted] = request.values.topics
        assert (wanted.name, wanted.partitions, wanted.replication) == ("refunds", 3, -1)
        assert [tuple(setting) for setting in wanted.configs] == [(POLICY, "compact")]
        assert brokers.model.brokers[1].received(CREATE_TOPICS), "node 1 is the controller"
        brokers.answer(CREATE_TOPICS, {"topics": [{"name": "refunds", "error": 36}]})
        assert not await brokers.admin.create_topic("refunds", 3, {}), "it exists by now"

    scenario(test)


def test_a_topic_that_may_not_be_created_names_the_permission() -> None:
    async def test(brokers: Brokers) -> None:
        for code in (29, 31):
            brokers.answer(CREATE_TOPICS, {"topics": [{"name": "refunds", "error": code}]})
            with pytest.raises(AuthorizationError, match="CREATE"):
                await brokers.admin.create_topic("refunds", 3, {})

    scenario(test)


def test_no_topic_is_created_without_a_controller() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(METADATA, topic(0) | {"controller": -1})
        with pytest.raises(TransportError, match="no controller"):
            await brokers.admin.create_topic("refunds", 1, {})
        assert not brokers.received(CREATE_TOPICS)

    scenario(test)


def test_the_reason_that_a_broker_gives_is_shown() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(CREATE_TOPICS, {"topics": [{"name": "refunds", "error": 44, "message": "Names need a prefix."}]})
        with pytest.raises(TransportError, match="Names need a prefix"):
            await brokers.admin.create_topic("refunds", 1, {})

    scenario(test)


@pytest.mark.parametrize(
    ("name", "created", "found"),
    [
        pytest.param("refunds", {"topics": [{"name": "refunds", "error": 36}]}, {}, id="created concurrently"),
        pytest.param("refunds", {"topics": []}, {}, id="no answer whether created"),
        pytest.param("orders", {}, {"resources": []}, id="no settings"),
        pytest.param("orders", {}, settings(0, {}), id="no policy"),
    ],
)
def test_a_side_topic_missing_in_a_response_is_retriable(
    name: str, created: dict[str, Any], found: dict[str, Any]
) -> None:
    """It is neither too small nor kept by age, as the app would end with."""

    async def test(brokers: Brokers) -> None:
        brokers.answer(CREATE_TOPICS, created)
        brokers.answer(DESCRIBE_CONFIGS, found)
        with pytest.raises(TransportError) as raised:
            await brokers.admin.ensure_compacted(name, 1)
        assert type(raised.value) is TransportError
        assert raised.value.retriable

    scenario(test)


def test_a_side_topic_must_be_compacted_and_large_enough() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(DESCRIBE_CONFIGS, settings(0, {POLICY: "compact"}))
        await brokers.admin.ensure_compacted("orders", 2)
        with pytest.raises(SideTopicError):
            await brokers.admin.ensure_compacted("orders", 3)
        brokers.answer(DESCRIBE_CONFIGS, settings(0, {POLICY: "delete"}))
        with pytest.raises(SideTopicError):
            await brokers.admin.ensure_compacted("orders", 2)
        assert not brokers.received(CREATE_TOPICS)

    scenario(test)


@pytest.mark.parametrize(
    ("answer", "creates"), [("true", True), ("false", False), (None, None)], ids=["they do", "they do not", "hidden"]
)
def test_whether_brokers_create_topics_on_demand(answer: str | None, creates: bool | None) -> None:
    async def test(brokers: Brokers) -> None:
        def describe(request: Received) -> None:
            [resource] = request.values.resources
            values = {} if answer is None else {"auto.create.topics.enable": answer}
            request.reply(**settings(31 if answer is None else 0, values, resource.kind, resource.name))

        brokers.on(DESCRIBE_CONFIGS, describe)
        assert await brokers.admin.creates_topics() is creates

    scenario(test)


# Logs -------------------------------------------------------------------------------------


def test_the_bounds_of_a_log_include_the_end_of_open_transactions() -> None:
    async def test(brokers: Brokers) -> None:
        log = brokers.model.logs[ONE]
        log.append(b"1", b"2", b"3")
        log.stable_end = 2
        log.start = 1
        assert await brokers.admin.bounds([ONE, TWO]) == {ONE: LogBounds(1, 2, 3), TWO: LogBounds(0, 0, 0)}

    scenario(test)


def test_a_search_by_time_without_a_newer_record_finds_nothing() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.model.logs[ONE].times[1_500] = 3
        found = await brokers.admin.offsets_at([ONE, TWO], 1.5, "read_committed")
        assert found == {ONE: 3, TWO: None}

    scenario(test)


@pytest.mark.parametrize("code", [0, *ERROR_CODES, 999])
def test_a_log_with_an_error_has_neither_bounds_nor_offsets(code: int) -> None:
    """Code 0 stands for a response without the partition."""

    async def test(brokers: Brokers) -> None:
        def change(at: TopicPartition, part: dict[str, Any]) -> None:
            if at == TWO and code:
                part["error"] = code
            elif at == TWO:
                part["partition"] = 0

        brokers.model.change_offset = change
        for call in (
            brokers.admin.bounds([ONE, TWO]),
            brokers.admin.offsets_at([ONE, TWO], 1.5, "read_uncommitted"),
        ):
            with pytest.raises(TransportError):
                await call

    scenario(test)


def test_bounds_wait_for_an_election() -> None:
    async def test(brokers: Brokers) -> None:
        log = brokers.model.logs[TWO]
        log.lead(None)
        with pytest.raises(TransportError, match="leader of orders/1") as raised:
            await brokers.admin.bounds([ONE, TWO])
        assert raised.value.retriable
        asyncio.get_running_loop().call_later(PATIENCE / 2, log.lead, 3)
        assert (await brokers.admin.bounds([ONE, TWO])).keys() == {ONE, TWO}

    scenario(test)


def test_a_partition_that_does_not_exist_is_named_at_once() -> None:
    async def test(brokers: Brokers) -> None:
        for missing in (TopicPartition("orders", 2), OTHER):
            with pytest.raises(TransportError, match=f"{missing} does not exist"):
                await brokers.admin.bounds([ONE, missing])

    scenario(test)


# Groups -----------------------------------------------------------------------------------


def test_the_coordinator_is_named_with_its_address() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.coordinator = 3
        assert await brokers.admin.coordinator("billing") == Coordinator(3, "kafka-3", 9092)

    scenario(test)


def test_session_limits_are_those_of_the_coordinator() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.coordinator = 2
        limits = {"group.min.session.timeout.ms": "6000", "group.max.session.timeout.ms": "1800000"}
        brokers.answer(DESCRIBE_CONFIGS, settings(0, limits, 4, "2"))
        assert await brokers.admin.session_limits("billing") == (6.0, 1800.0)
        assert brokers.model.brokers[2].received(DESCRIBE_CONFIGS)

    scenario(test)


def test_times_are_set_in_milliseconds_and_returned_when_a_broker_shows_them() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(INCREMENTAL_ALTER_CONFIGS, altered(0))
        brokers.answer(
            DESCRIBE_CONFIGS,
            times(45_000, 5_000),
            times(10_000, 5_000, SESSION_TIMEOUT),  # of an earlier change
            times(30_000, 2_500, SESSION_TIMEOUT, HEARTBEAT_INTERVAL),
        )

        found = await brokers.admin.set_group_times("billing", {SESSION_TIMEOUT: 30.0, HEARTBEAT_INTERVAL: 2.5})

        assert found == GroupTimes(GroupTime(30.0, is_own=True), GroupTime(2.5, is_own=True))
        [request] = brokers.received(INCREMENTAL_ALTER_CONFIGS)
        [resource] = request.values.resources
        assert (resource.kind, resource.name, request.values.validate_only) == (32, "billing", False)
        assert [tuple(setting) for setting in resource.configs] == [
            (SESSION_TIMEOUT, 0, "30000"),
            (HEARTBEAT_INTERVAL, 0, "2500"),
        ]

    scenario(test)


def test_a_time_that_is_not_named_stays_as_it_is() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(INCREMENTAL_ALTER_CONFIGS, altered(0))
        brokers.answer(DESCRIBE_CONFIGS, times(30_000, 2_500, SESSION_TIMEOUT, HEARTBEAT_INTERVAL))
        await brokers.admin.set_group_times("billing", {SESSION_TIMEOUT: 30.0})
        [request] = brokers.received(INCREMENTAL_ALTER_CONFIGS)
        assert [setting.name for setting in request.values.resources[0].configs] == [SESSION_TIMEOUT]

    scenario(test)


def test_a_reset_removes_both_times() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(INCREMENTAL_ALTER_CONFIGS, altered(0))
        brokers.answer(DESCRIBE_CONFIGS, times(30_000, 5_000, SESSION_TIMEOUT), times(45_000, 5_000))

        found = await brokers.admin.reset_group_times("billing")

        assert found == GroupTimes(GroupTime(45.0, is_own=False), GroupTime(5.0, is_own=False))
        [request] = brokers.received(INCREMENTAL_ALTER_CONFIGS)
        assert [tuple(setting) for setting in request.values.resources[0].configs] == [
            (SESSION_TIMEOUT, 1, None),
            (HEARTBEAT_INTERVAL, 1, None),
        ]

    scenario(test)


def test_a_change_that_no_broker_shows_is_an_error_that_says_so() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(INCREMENTAL_ALTER_CONFIGS, altered(0))
        brokers.answer(DESCRIBE_CONFIGS, times(45_000, 5_000))
        with pytest.raises(TransportError, match="have stored the change, but a broker does not show it yet") as raised:
            await brokers.admin.set_group_times("billing", {SESSION_TIMEOUT: 30.0})
        assert raised.value.retriable

    scenario(test)


LIMITS = {
    "group.consumer.min.session.timeout.ms": "45000",
    "group.consumer.max.session.timeout.ms": "60000",
    "group.consumer.min.heartbeat.interval.ms": "5000",
    "group.consumer.max.heartbeat.interval.ms": "15000",
}
SESSION_LIMITS = "group.consumer.min.session.timeout.ms and group.consumer.max.session.timeout.ms"


def show_limits(brokers: Brokers, code: int = 0) -> None:
    def describe(request: Received) -> None:
        [resource] = request.values.resources
        request.reply(**settings(code, {} if code else LIMITS, resource.kind, resource.name))

    brokers.on(DESCRIBE_CONFIGS, describe)


def test_the_limits_of_times_are_those_of_the_brokers_if_this_user_may_see_them() -> None:
    async def test(brokers: Brokers) -> None:
        show_limits(brokers)
        assert await brokers.admin.time_limits() == {
            SESSION_TIMEOUT: TimeLimits(45.0, 60.0),
            HEARTBEAT_INTERVAL: TimeLimits(5.0, 15.0),
        }
        show_limits(brokers, code=31)
        assert await brokers.admin.time_limits() == {}

    scenario(test)


@pytest.mark.parametrize(
    ("seconds", "code", "reason"),
    [
        ({SESSION_TIMEOUT: 44.999}, 0, rf"a session timeout of 44.999 s is outside 45 to 60 s \({SESSION_LIMITS}\)"),
        ({SESSION_TIMEOUT: 60.001}, 0, "a session timeout of 60.001 s is outside 45 to 60 s"),
        ({SESSION_TIMEOUT: 45.0, HEARTBEAT_INTERVAL: 3.0}, 0, "': a heartbeat interval of 3 s is outside 5 to 15 s"),
        (
            {SESSION_TIMEOUT: 5.0, HEARTBEAT_INTERVAL: 1.0},
            0,
            "5 s is outside .*, and a heartbeat interval of 1 s",
        ),
        ({SESSION_TIMEOUT: 45.0, HEARTBEAT_INTERVAL: 15.0}, 0, "': INVALID_CONFIG: It is odd$"),
        (
            {SESSION_TIMEOUT: 5.0},
            31,
            "': INVALID_CONFIG: It is odd; grant DESCRIBE_CONFIGS on the cluster",
        ),
    ],
)
def test_refused_times_are_explained_by_the_limits_that_they_are_outside_of(
    seconds: dict[str, float], code: int, reason: str
) -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(INCREMENTAL_ALTER_CONFIGS, altered(40, "It is odd."))
        show_limits(brokers, code)
        with pytest.raises(SettingsError, match=reason) as raised:
            await brokers.admin.set_group_times("billing", seconds)
        assert ("outside" in reason) == ("choose a value within the limits" in str(raised.value))

    scenario(test)


def test_settings_of_a_group_that_may_not_be_seen_or_changed_name_the_permission() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(INCREMENTAL_ALTER_CONFIGS, altered(30))
        brokers.answer(DESCRIBE_CONFIGS, times(45_000, 5_000, code=30))
        with pytest.raises(AuthorizationError, match="to see the settings of group 'billing': grant DESCRIBE_CONFIGS"):
            await brokers.admin.group_times("billing")
        for call in (
            brokers.admin.set_group_times("billing", {SESSION_TIMEOUT: 30.0}),
            brokers.admin.reset_group_times("billing"),
        ):
            with pytest.raises(AuthorizationError, match="to change the settings of group 'billing': grant ALTER_CON"):
                await call

    scenario(test)


def test_brokers_that_are_too_old_for_the_consumer_protocol() -> None:
    async def test(brokers: Brokers) -> None:
        assert not await brokers.admin.has_consumer_protocol("billing")

    offered = {api: KAFKA_2_8[api.name] for api in ALL if api.name in KAFKA_2_8}
    scenario(test, versions=offered, without=tuple(api for api in ALL if api not in offered))


@pytest.mark.parametrize(("code", "has_it"), [(0, True), (69, True), (35, False)])
def test_brokers_on_which_the_consumer_protocol_is_switched_off(code: int, has_it: bool) -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(CONSUMER_GROUP_DESCRIBE, described(code))
        assert await brokers.admin.has_consumer_protocol("billing") is has_it

    scenario(test)


def test_brokers_without_the_new_group_protocol_describe_classic_groups() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(DESCRIBE_GROUPS, described(0))
        group = await brokers.admin.group("billing")
        assert (group.protocol, group.state) == ("classic", "stable")

    scenario(test, without=(CONSUMER_GROUP_DESCRIBE,))


@pytest.mark.parametrize("code", [35, 69])
def test_a_group_that_is_not_one_of_the_new_protocol_is_described_as_classic(code: int) -> None:
    """Brokers on which the protocol is switched off answer with code 35."""

    async def test(brokers: Brokers) -> None:
        brokers.answer(CONSUMER_GROUP_DESCRIBE, described(code))
        brokers.answer(DESCRIBE_GROUPS, described(0))
        assert (await brokers.admin.group("billing")).protocol == "classic"
        brokers.answer(DESCRIBE_GROUPS, described(69))
        assert (await brokers.admin.group("billing")).state == "dead"

    scenario(test)


@pytest.mark.parametrize(
    "call",
    [
        lambda admin: admin.group("billing"),
        lambda admin: admin.remove_member("billing", "gone"),
        lambda admin: admin.topic_settings("orders", [POLICY]),
        lambda admin: admin.session_limits("billing"),
        lambda admin: admin.group_times("billing"),
        lambda admin: admin.reset_group_times("billing"),
    ],
    ids=["group", "remove", "settings", "limits", "times", "alter"],
)
def test_a_request_that_the_brokers_do_not_know_is_not_retried(call: Callable[[KafkaAdmin], Awaitable[Any]]) -> None:
    async def test(brokers: Brokers) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TransportError, match="do not support"):
            await call(brokers.admin)
        assert await brokers.admin.creates_topics() is None
        assert asyncio.get_running_loop().time() - began < PATIENCE / 2

    lacking = (CONSUMER_GROUP_DESCRIBE, DESCRIBE_GROUPS, LEAVE_GROUP, DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS)
    scenario(test, without=lacking)


@pytest.mark.parametrize(("code", "removed"), [(0, True), (25, False)])
@pytest.mark.parametrize("ids", [("gone", None), ("", "worker-1")], ids=["dynamic", "static"])
def test_removing_a_member(code: int, removed: bool, ids: tuple[str, str | None]) -> None:
    async def test(brokers: Brokers) -> None:
        member_id, instance_id = ids
        answer = {"members": [{"member": member_id or "its id", "instance": instance_id, "error": code}]}
        brokers.answer(LEAVE_GROUP, answer)
        assert await brokers.admin.remove_member("billing", member_id, instance_id=instance_id) is removed
        [request] = brokers.received(LEAVE_GROUP)
        [member] = request.values.members
        assert (request.values.group, member.member, member.instance) == ("billing", member_id, instance_id)

    scenario(test)


@pytest.mark.parametrize(
    ("api", "answer", "call"),
    [
        (DESCRIBE_CONFIGS, {"resources": []}, lambda admin: admin.topic_settings("orders", [POLICY])),
        (DESCRIBE_CONFIGS, settings(0, {}), lambda admin: admin.topic_settings("orders", [POLICY])),
        (INCREMENTAL_ALTER_CONFIGS, {"resources": []}, lambda admin: admin.reset_group_times("billing")),
        (CONSUMER_GROUP_DESCRIBE, {"groups": []}, lambda admin: admin.group("billing")),
        (LEAVE_GROUP, {"members": []}, lambda admin: admin.remove_member("billing", "gone")),
    ],
    ids=["settings", "one setting", "alter", "group", "member"],
)
def test_a_response_without_the_requested_item_is_a_clear_error(
    api: Api, answer: dict[str, Any], call: Callable[[KafkaAdmin], Awaitable[Any]]
) -> None:
    async def test(brokers: Brokers) -> None:
        brokers.answer(api, answer)
        with pytest.raises(TransportError, match="missing in the response"):
            await call(brokers.admin)

    scenario(test)


# Offsets of a group -----------------------------------------------------------------------


def test_a_partition_without_a_commit_has_none() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.committed = {ONE: CommittedOffset(5, 3, "text")}
        assert await brokers.admin.group_commits("billing", [ONE, TWO]) == {ONE: Committed(5, "text"), TWO: None}
        assert await brokers.admin.group_commits("billing", []) == {}
        assert await brokers.admin.all_commits("billing") == {ONE: Committed(5, "text")}

    scenario(test)


def test_commits_of_a_group_wait_for_open_transactions() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.committed = {ONE: CommittedOffset(5, 3, "")}
        brokers.group.errors = {ONE: 88}
        asyncio.get_running_loop().call_later(PATIENCE / 2, brokers.group.errors.clear)
        assert await brokers.admin.group_commits("billing", [ONE]) == {ONE: Committed(5, "")}
        assert all(request.values.stable for request in brokers.received(OFFSET_FETCH))

    scenario(test)


def test_the_embedded_broker_does_not_list_all_commits() -> None:
    """It speaks version 6 at most, and then leaves the list of topics out."""

    async def test(brokers: Brokers) -> None:
        brokers.on(OFFSET_FETCH, lambda request: request.reply_bytes(b"\0" * 4 + b"\0" + b"\0\0" + b"\0"))
        with pytest.raises(TransportError, match="do not support"):
            await brokers.admin.all_commits("billing")

    scenario(test, versions={OFFSET_FETCH: (6, 6)})


def test_a_commit_is_one_without_a_member() -> None:
    async def test(brokers: Brokers) -> None:
        await brokers.admin.commit_without_member("billing", BOTH)
        [(request, offsets)] = brokers.group.commits
        assert (request.group, request.generation, request.member, request.instance) == ("billing", -1, "", None)
        assert offsets == {at: CommittedOffset(offset, -1, metadata) for at, (offset, metadata) in BOTH.items()}

    scenario(test)


@pytest.mark.parametrize("retry", [True, False])
def test_a_partition_omitted_in_a_commit_response_is_not_acknowledged(retry: bool) -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.omitted = {TWO}
        with pytest.raises(TransportError, match="missing"):
            await brokers.admin.commit_without_member("billing", BOTH, retry=retry)

    scenario(test)


@pytest.mark.parametrize("code", [22, 23, 25, 27, 68, 82, 110, 113])
@pytest.mark.parametrize("retry", [True, False])
def test_a_group_with_members_refuses_a_commit(code: int, retry: bool) -> None:
    """They are reported before a topic that this user may not see."""

    async def test(brokers: Brokers) -> None:
        brokers.group.errors = {ONE: 29, TWO: code}
        with pytest.raises(CommitRefusedError, match="it has members"):
            await brokers.admin.commit_without_member("billing", BOTH, retry=retry)
        assert len(brokers.group.commits) == 1

    scenario(test)


def test_a_commit_is_retried_only_on_request() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.errors = {ONE: 14}
        with pytest.raises(CommitError, match="of orders/0 were not stored") as raised:
            await brokers.admin.commit_without_member("billing", BOTH)
        assert raised.value.retriable
        assert len(brokers.group.commits) == 1
        asyncio.get_running_loop().call_later(PATIENCE / 2, brokers.group.errors.clear)
        await brokers.admin.commit_without_member("billing", BOTH, retry=True)
        assert brokers.group.committed.keys() == {ONE, TWO}

    scenario(test)


def test_a_commit_follows_the_coordinator() -> None:
    async def test(brokers: Brokers) -> None:
        brokers.group.errors = {ONE: 16}

        def move() -> None:
            brokers.group.errors.clear()
            brokers.group.coordinator = 3

        asyncio.get_running_loop().call_later(PATIENCE / 2, move)
        await brokers.admin.commit_without_member("billing", BOTH, retry=True)
        assert brokers.model.brokers[3].received(OFFSET_COMMIT)

    scenario(test)


def test_an_unanswered_commit_is_not_overtaken() -> None:
    async def test(brokers: Brokers) -> None:
        held: list[Received] = []
        brokers.on(OFFSET_COMMIT, held.append)
        with pytest.raises(CommitError, match="no answer in time") as raised:
            await brokers.admin.commit_without_member("billing", BOTH)
        assert raised.value.retriable
        later = asyncio.create_task(brokers.admin.commit_without_member("billing", {ONE: Committed(6, "")}))
        await asyncio.sleep(1.0)  # virtual
        assert len(held) == 1
        brokers.on(OFFSET_COMMIT, brokers.group.commit)
        brokers.group.commit(held[0])
        await later
        assert [offsets[ONE].offset for _, offsets in brokers.group.commits] == [5, 6]

    scenario(test)
