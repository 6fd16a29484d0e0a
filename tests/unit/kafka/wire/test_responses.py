"""Values in the responses of brokers; `tests/unit/properties/test_wire_responses.py` damages them."""

import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from aioshard.kafka.groups import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, GroupTime, GroupTimes
from aioshard.kafka.wire.errors import BrokerError, IncompleteResponseError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.metadata import Broker, Leader
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import (
    CONSUMER_GROUP_DESCRIBE,
    DESCRIBE_CONFIGS,
    FIND_COORDINATOR,
    INCREMENTAL_ALTER_CONFIGS,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    OFFSET_FOR_LEADER_EPOCH,
    PRODUCE,
)
from aioshard.kafka.wire.responses import (
    CommittedOffset,
    EpochEnd,
    ListedOffset,
    ResourceKind,
    check_altered_settings,
    committed_offsets,
    consumer_group,
    coordinator,
    described_settings,
    described_topics,
    epoch_ends,
    existing_topics,
    group_times,
    listed_offsets,
    named_leaders,
    new_producer_id,
    refused_indexes,
    refused_offsets,
    stored_offsets,
)
from aioshard.records import PartitionInfo, TopicPartition
from tests.support.model_broker import encode_response

ORDERS = TopicPartition("orders", 0)
OTHERS = TopicPartition("orders", 1)
SALES = TopicPartition("sales", 0)
ID = uuid.UUID(int=7)
ZEROS = uuid.UUID(int=0)


def answer(api: Api, version: int, **values: Any) -> Any:
    """A response as it is decoded."""
    return api.decode(version, api.encode_response(version, {"throttle_ms": 0} | values))


def codes(errors: Mapping[TopicPartition, WireError]) -> dict[TopicPartition, int]:
    return {partition: error.code for partition, error in errors.items()}


# Offsets of groups ----------------------------------------------------------------------------


def acknowledgement(*parts: tuple[str, int, int], version: int = 9) -> Any:
    topics = [
        {"topic": topic, "id": ID, "partitions": [{"partition": number, "error": code}]}
        for topic, number, code in parts
    ]
    return answer(OFFSET_COMMIT, version, topics=topics)


def test_all_partitions_of_a_commit_are_acknowledged() -> None:
    assert refused_offsets(acknowledgement(("orders", 0, 0), ("orders", 1, 0)), [ORDERS, OTHERS]) == {}


def test_a_refused_partition_does_not_take_back_the_others() -> None:
    refused = refused_offsets(acknowledgement(("orders", 0, 0), ("orders", 1, 12)), [ORDERS, OTHERS])

    assert codes(refused) == {OTHERS: 12}


def test_errors_of_single_topics_come_after_those_of_the_group() -> None:
    response = acknowledgement(("orders", 0, 3), ("orders", 1, 29), ("sales", 0, 25))

    assert list(codes(refused_offsets(response, [ORDERS, OTHERS, SALES])).items()) == [
        (SALES, 25),
        (ORDERS, 3),
        (OTHERS, 29),
    ]


def test_a_commit_by_topic_id_is_acknowledged_by_id() -> None:
    response = acknowledgement(("orders", 0, 100), version=10)

    assert codes(refused_offsets(response, [ORDERS], {ID: "orders"})) == {ORDERS: 100}
    with pytest.raises(IncompleteResponseError, match=f"topic {ID}, which was not requested"):
        refused_offsets(response, [ORDERS], {uuid.UUID(int=8): "orders"})


def commits(
    *parts: tuple[int, int, int, str | None, int], version: int = 9, error: int = 0, group: str = "billing"
) -> Any:
    names = ("partition", "offset", "epoch", "metadata", "error")
    partitions = [dict(zip(names, part, strict=True)) for part in parts]
    topics = [{"topic": "orders", "id": ID, "partitions": partitions}] if partitions else []
    groups = [{"group": group, "topics": topics, "error": error}]
    return answer(OFFSET_FETCH, version, topics=topics, error=error, groups=groups)


@pytest.mark.parametrize("version", [6, 7, 8, 9, 10])
def test_commits_are_read_with_epoch_and_metadata_and_minus_one_is_none(version: int) -> None:
    response = commits((0, 7, 3, "note", 0), (1, -1, -1, "", 0), version=version)

    for requested in ([ORDERS, OTHERS], None):
        assert committed_offsets(response, "billing", requested, {ID: "orders"}) == {
            ORDERS: CommittedOffset(7, 3, "note")
        }


def test_an_unknown_epoch_and_missing_metadata_do_no_harm() -> None:
    response = commits((0, 7, -1, None, 0), (1, 8, -2, "", 0))

    assert committed_offsets(response, "billing", None) == {
        ORDERS: CommittedOffset(7, -1, ""),
        OTHERS: CommittedOffset(8, -1, ""),
    }


def test_the_nul_of_a_c_string_is_not_part_of_the_metadata() -> None:
    """librdkafka commits one."""
    assert committed_offsets(commits((0, 7, 3, "note\0", 0)), "billing", [ORDERS])[ORDERS].metadata == "note"


@pytest.mark.parametrize("version", [7, 9])
@pytest.mark.parametrize("code", [14, 15, 16, 30], ids=["loading", "unavailable", "moved", "denied"])
def test_an_error_of_the_group_is_raised(version: int, code: int) -> None:
    """A broker that does not coordinate the group names no partition; that once counted as "nothing is committed"."""
    for requested in ([ORDERS], None):
        with pytest.raises(BrokerError) as raised:
            committed_offsets(commits(version=version, error=code), "billing", requested)
        assert raised.value.code == code


def test_errors_of_the_group_are_raised_before_those_of_single_topics() -> None:
    with pytest.raises(BrokerError, match="UNSTABLE_OFFSET_COMMIT"):
        committed_offsets(commits((0, -1, -1, "", 3), (1, -1, -1, "", 88)), "billing", [ORDERS, OTHERS])


def test_a_negative_offset_that_means_nothing_is_refused() -> None:
    with pytest.raises(IncompleteResponseError, match="-2 as a committed offset"):
        committed_offsets(commits((0, -2, -1, "", 0)), "billing", [ORDERS])


def test_the_commits_of_another_group_are_refused() -> None:
    with pytest.raises(IncompleteResponseError, match="'shipping', not 'billing'"):
        committed_offsets(commits((0, 7, 3, "", 0), group="shipping"), "billing", [ORDERS])


def test_a_response_without_the_group_is_refused() -> None:
    for response in (answer(OFFSET_FETCH, 9, groups=None), answer(OFFSET_FETCH, 9, groups=[])):
        with pytest.raises(IncompleteResponseError, match="group 'billing'"):
            committed_offsets(response, "billing", None)


def test_a_broker_without_a_list_of_all_commits_is_not_one_without_commits() -> None:
    """The embedded broker."""
    response = answer(OFFSET_FETCH, 7, topics=None, error=0)

    with pytest.raises(UnsupportedVersionError, match="does not list"):
        committed_offsets(response, "billing", None)
    with pytest.raises(IncompleteResponseError, match="orders/0"):
        committed_offsets(response, "billing", [ORDERS])


def test_a_group_without_commits_has_none() -> None:
    assert committed_offsets(commits(), "billing", None) == {}


# Logs -----------------------------------------------------------------------------------------


def offsets(*parts: tuple[int, int, int, int, int]) -> Any:
    names = ("partition", "error", "timestamp", "offset", "epoch")
    partitions = [dict(zip(names, part, strict=True)) for part in parts]
    return answer(LIST_OFFSETS, 8, topics=[{"topic": "orders", "partitions": partitions}])


def test_offsets_of_logs_are_read_and_minus_one_means_that_no_record_is_that_recent() -> None:
    answers = listed_offsets(offsets((0, 0, 1700, 5, 3), (1, 0, -1, -1, -1)), [ORDERS, OTHERS])

    assert answers.values == {ORDERS: ListedOffset(5, 1700, 3), OTHERS: ListedOffset(-1, -1, -1)}
    assert answers.errors == {}


@pytest.mark.parametrize("code", [6, 29, 43, -1])
def test_a_partition_with_an_error_does_not_hold_up_the_others(code: int) -> None:
    answers = listed_offsets(offsets((0, code, -1, -1, -1), (1, 0, -1, 5, -1)), [ORDERS, OTHERS, SALES])

    assert answers.values.keys() == {OTHERS}
    assert answers.errors.keys() == {ORDERS, SALES}
    assert answers.errors[ORDERS].code == code


def test_an_offset_below_minus_one_is_not_read() -> None:
    assert listed_offsets(offsets((0, 0, -1, -2, -1)), [ORDERS]).values == {}


def ends(*parts: tuple[int, int, int, int]) -> Any:
    names = ("partition", "error", "epoch", "end")
    partitions = [dict(zip(names, part, strict=True)) for part in parts]
    return answer(OFFSET_FOR_LEADER_EPOCH, 4, topics=[{"topic": "orders", "partitions": partitions}])


def test_the_end_of_an_epoch_is_read() -> None:
    assert epoch_ends(ends((0, 0, 4, 300)), [ORDERS]) == ({ORDERS: EpochEnd(4, 300)}, {})


@pytest.mark.parametrize(("epoch", "end"), [(-1, -1), (-1, 300), (4, -1)])
def test_an_epoch_without_history_is_unknown_and_not_the_end_of_a_shorter_log(epoch: int, end: int) -> None:
    assert epoch_ends(ends((0, 0, epoch, end)), [ORDERS]) == ({ORDERS: None}, {})


def test_each_partition_has_an_end_or_an_error() -> None:
    answers = epoch_ends(ends((0, 0, 4, 300), (1, 74, -1, -1)), [ORDERS, OTHERS, SALES])

    assert answers.values == {ORDERS: EpochEnd(4, 300)}
    assert codes(answers.errors) == {OTHERS: 74, SALES: -1}
    assert all(error.retriable for error in answers.errors.values())
    assert codes(epoch_ends(ends((0, 0, 4, -7)), [ORDERS]).errors) == {ORDERS: -1}


# Writing --------------------------------------------------------------------------------------


def acknowledged(*parts: tuple[int, int, int, dict[str, int] | None], version: int = 12) -> Any:
    """A response to Produce: partition, error, offset and leader of each part."""
    names = ("partition", "error", "offset", "leader")
    rest = {"timestamp": -1, "log_start": 0, "record_errors": [], "message": None}
    partitions = [dict(zip(names, part, strict=True)) | rest for part in parts]
    return answer(PRODUCE, version, topics=[{"topic": "orders", "partitions": partitions}])


@pytest.mark.parametrize("version", range(PRODUCE.lowest, PRODUCE.highest + 1))
def test_a_batch_is_stored_at_an_offset_or_refused(version: int) -> None:
    answers = stored_offsets(acknowledged((0, 0, 7, None), (1, 87, -1, None), version=version), [ORDERS, OTHERS])

    assert answers.values == {ORDERS: 7}
    assert codes(answers.errors) == {OTHERS: 87}
    assert "no record without a key" in str(answers.errors[OTHERS])


def test_the_offset_of_a_stored_batch_may_be_unknown_but_not_invalid() -> None:
    answers = stored_offsets(acknowledged((0, 0, -1, None), (1, 0, -2, None)), [ORDERS, OTHERS])

    assert answers.values == {ORDERS: -1}
    assert isinstance(answers.errors[OTHERS], IncompleteResponseError)


def blamed(*parts: tuple[int, int, list[int]], version: int = 12) -> Any:
    """A response to Produce: partition, error and blamed records of each part."""
    rest = {"offset": -1, "timestamp": -1, "log_start": 0, "message": None, "leader": None}
    partitions = [
        rest
        | {"partition": number, "error": error, "record_errors": [{"index": at, "message": None} for at in indexes]}
        for number, error, indexes in parts
    ]
    return answer(PRODUCE, version, topics=[{"topic": "orders", "partitions": partitions}])


def test_records_are_blamed_only_beside_an_error_and_if_there_are_some() -> None:
    assert refused_indexes(blamed((0, 87, [3, 7]), (1, 87, []))) == {ORDERS: [3, 7]}
    assert refused_indexes(blamed((0, 0, [3]), (1, 32, [0]))) == {OTHERS: [0]}
    assert refused_indexes(blamed((0, 87, [3]), version=7)) == {}, "the version has no such field"
    assert refused_indexes(answer(PRODUCE, 12, topics=None)) == {}


def test_a_leader_is_read_only_beside_an_error_and_if_there_is_one() -> None:
    moved, none = {"node": 3, "epoch": 8}, {"node": -1, "epoch": -1}

    assert named_leaders(acknowledged((0, 6, -1, moved), (1, 6, -1, none))) == {ORDERS: Leader(3, 8)}
    assert named_leaders(acknowledged((0, 0, 7, moved), (1, 6, -1, None))) == {}
    assert named_leaders(answer(PRODUCE, 12, topics=None)) == {}


@pytest.mark.parametrize("version", range(INIT_PRODUCER_ID.lowest, INIT_PRODUCER_ID.highest + 1))
def test_a_producer_id_has_an_epoch(version: int) -> None:
    assert new_producer_id(answer(INIT_PRODUCER_ID, version, error=0, producer_id=7, epoch=0)) == (7, 0)
    with pytest.raises(BrokerError, match="CLUSTER_AUTHORIZATION_FAILED"):
        new_producer_id(answer(INIT_PRODUCER_ID, version, error=31, producer_id=-1, epoch=-1))
    for missing in ({"producer_id": -1, "epoch": 0}, {"producer_id": 7, "epoch": -1}):
        with pytest.raises(IncompleteResponseError, match="producer id is missing"):
            new_producer_id(answer(INIT_PRODUCER_ID, version, error=0, **missing))


# The cluster ----------------------------------------------------------------------------------


def found(node: int = 4, host: str = "broker-4", port: int = 9092, error: int = 0, message: str | None = None) -> Any:
    return answer(FIND_COORDINATOR, 3, error=error, message=message, node=node, host=host, port=port)


def test_the_coordinator_is_read_with_its_address() -> None:
    assert coordinator(found(), "billing") == Broker(4, "broker-4", 9092, None)


def test_the_refusal_of_a_coordinator_has_the_message_of_the_broker() -> None:
    with pytest.raises(BrokerError, match=r"^GROUP_AUTHORIZATION_FAILED: no access$") as raised:
        coordinator(found(-1, "", -1, error=30, message="no access."), "billing")
    assert not raised.value.retriable


@pytest.mark.parametrize("response", [found(node=-1), found(host=""), found(port=-1)], ids=["node", "host", "port"])
def test_a_response_without_a_coordinator_is_refused(response: Any) -> None:
    with pytest.raises(IncompleteResponseError, match="billing"):
        coordinator(response, "billing")


def partition(number: int, *, leader: int = 1, error: int = 0, epoch: int = 5) -> dict[str, Any]:
    return {
        "error": error,
        "partition": number,
        "leader": leader,
        "epoch": epoch,
        "replicas": [1, 2],
        "in_sync": [1],
        "offline": [2],
    }


def topic(
    *partitions: dict[str, Any], name: str | None = "orders", topic_id: uuid.UUID = ID, error: int = 0
) -> dict[str, Any]:
    return {
        "error": error,
        "name": name,
        "id": topic_id,
        "internal": name == "__consumer_offsets",
        "partitions": list(partitions),
        "operations": 0,
    }


def metadata(*topics: dict[str, Any], version: int = 12, error: int = 0) -> Any:
    brokers = [{"node": node, "host": f"broker-{node}", "port": 9092, "rack": None} for node in (1, 2)]
    return answer(
        METADATA,
        version,
        brokers=brokers,
        cluster="c",
        controller=1,
        topics=list(topics),
        cluster_operations=0,
        error=error,
    )


def test_topics_are_read_with_leaders_epochs_and_ids() -> None:
    brokers, topics, errors = described_topics(metadata(topic(partition(0), partition(1, leader=-1))), ["orders"])

    assert brokers == {1: Broker(1, "broker-1", 9092, None), 2: Broker(2, "broker-2", 9092, None)}
    assert errors == {}
    assert topics["orders"].topic_id == ID
    assert not topics["orders"].is_internal
    assert topics["orders"].partitions == {
        0: PartitionInfo(0, 1, (1, 2), (1,)),
        1: PartitionInfo(1, None, (1, 2), (1,)),
    }
    assert topics["orders"].epochs == {0: 5, 1: 5}
    assert topics["orders"].errors == {}


@pytest.mark.parametrize("version", [9, 12])
def test_a_topic_without_an_id_has_none(version: int) -> None:
    """Version 9 has no ids; later ones have zeros while the cluster is being upgraded."""
    topics = described_topics(metadata(topic(partition(0), topic_id=ZEROS), version=version), ["orders"]).topics

    assert topics["orders"].topic_id is None


def test_an_error_of_a_partition_affects_only_this_one() -> None:
    topics = described_topics(metadata(topic(partition(0, error=5), partition(1, epoch=-2))), ["orders"]).topics

    assert topics["orders"].partitions == {
        0: PartitionInfo(0, None, (1, 2), (1,)),
        1: PartitionInfo(1, 1, (1, 2), (1,)),
    }
    assert {number: error.code for number, error in topics["orders"].errors.items()} == {0: 5}
    assert topics["orders"].epochs == {1: -1}


def test_an_error_of_a_topic_affects_only_this_one() -> None:
    response = metadata(topic(name="sales", error=29), topic(partition(0)), topic(name="refunds"))

    _, topics, errors = described_topics(response, ["orders", "sales", "refunds", "missing"])

    assert topics.keys() == {"orders"}
    denied = errors["sales"]
    assert (denied.code, denied.topics, denied.retriable) == (29, ("sales",), False)
    assert isinstance(errors["refunds"], IncompleteResponseError), "without partitions"
    assert isinstance(errors["missing"], IncompleteResponseError)
    assert errors.keys() == {"sales", "refunds", "missing"}


def test_topics_are_looked_up_by_id() -> None:
    """A broker that does not know an id does not know its name either."""
    unknown, missing = uuid.UUID(int=8), uuid.UUID(int=9)
    response = metadata(topic(partition(0)), topic(name=None, topic_id=unknown, error=100))

    _, topics, errors = described_topics(response, [ID, unknown, missing])

    assert topics["orders"].topic_id == ID
    assert {key: error.code for key, error in errors.items()} == {unknown: 100, missing: -1}


def test_a_topic_that_was_not_requested_is_refused() -> None:
    for requested in (["sales"], [uuid.UUID(int=8)]):
        with pytest.raises(IncompleteResponseError, match="topic orders, which was not requested"):
            described_topics(metadata(topic(partition(0))), requested)


def test_topics_that_exist_are_listed_also_during_an_election() -> None:
    response = metadata(
        topic(partition(0)),
        topic(partition(0, error=5), name="sales"),
        topic(name="electing", error=5),
        topic(name="denied", error=29),
        topic(name="deleted", error=3),
        topic(name="in/valid", error=17),
        topic(partition(0), name="__consumer_offsets"),
        topic(name=None, error=100),
    )

    assert existing_topics(response) == {"orders", "sales", "electing"}


def settings(*configs: tuple[str, str | None], error: int = 0, message: str | None = None, name: str = "orders") -> Any:
    described: list[dict[str, Any]] = [
        {
            "name": setting,
            "value": value,
            "read_only": False,
            "source": 1,
            "sensitive": value is None,
            "synonyms": [],
            "kind": 2,
            "documentation": None,
        }
        for setting, value in configs
    ]
    resource = {"error": error, "message": message, "kind": 2, "name": name, "configs": described}
    return answer(DESCRIBE_CONFIGS, 4, resources=[resource])


def test_settings_are_read_and_others_ignored() -> None:
    response = settings(("retention.ms", "5"), ("cleanup.policy", "compact"), ("password", None))

    assert described_settings(response, ResourceKind.TOPIC, "orders", ["retention.ms"]) == {"retention.ms": "5"}


def test_a_setting_without_a_value_is_missing() -> None:
    with pytest.raises(IncompleteResponseError, match="password of topic 'orders' is missing"):
        described_settings(settings(("password", None)), ResourceKind.TOPIC, "orders", ["password"])


def test_a_refused_description_has_the_message_of_the_broker() -> None:
    with pytest.raises(BrokerError, match=r"^TOPIC_AUTHORIZATION_FAILED: no access$") as raised:
        described_settings(settings(error=29, message="no access"), ResourceKind.TOPIC, "orders", ["retention.ms"])
    assert raised.value.topics == ("orders",)


def test_the_settings_of_something_else_are_refused() -> None:
    for kind, name in [(ResourceKind.TOPIC, "sales"), (ResourceKind.GROUP, "orders")]:
        with pytest.raises(IncompleteResponseError, match="about 'orders', not about"):
            described_settings(settings(("retention.ms", "5")), kind, name, ["retention.ms"])


def times(session: str, heartbeat: str, *, session_source: int = 5, heartbeat_source: int = 5) -> Any:
    configs: list[dict[str, Any]] = [
        {
            "name": name,
            "value": value,
            "read_only": False,
            "source": source,
            "sensitive": False,
            "synonyms": [],
            "kind": 3,
            "documentation": None,
        }
        for name, value, source in (
            (HEARTBEAT_INTERVAL, heartbeat, heartbeat_source),
            (SESSION_TIMEOUT, session, session_source),
        )
    ]
    resource = {"error": 0, "message": None, "kind": 32, "name": "billing", "configs": configs}
    return answer(DESCRIBE_CONFIGS, 4, resources=[resource])


def test_times_of_a_group_are_its_own_or_the_default_of_the_brokers() -> None:
    found = group_times(times("45000", "2500", heartbeat_source=8), "billing")
    assert found == GroupTimes(GroupTime(45.0, is_own=False), GroupTime(2.5, is_own=True))
    assert found.by_name == {SESSION_TIMEOUT: found.session_timeout, HEARTBEAT_INTERVAL: found.heartbeat_interval}
    for broker_source in (1, 2, 3, 4, 5):
        found = group_times(times("45000", "2500", session_source=broker_source), "billing")
        assert not found.session_timeout.is_own, broker_source


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(IncompleteResponseError, match=r"'soon' as consumer\.session\.timeout\.ms"):
        group_times(times("soon", "2500"), "billing")


def test_refused_settings_have_the_message_of_the_broker() -> None:
    resource = {"error": 40, "message": "It is too short.", "kind": 32, "name": "billing"}
    response = answer(INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource])
    with pytest.raises(BrokerError, match=r"^INVALID_CONFIG: It is too short$"):
        check_altered_settings(response, ResourceKind.GROUP, "billing")


# Groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "kind", "protocol"),
    [(1, 0, "classic"), (1, 1, "consumer"), (1, -1, None), (1, 2, None), (0, 1, None)],
    ids=["classic", "consumer", "unknown", "of a newer broker", "of an older broker"],
)
def test_the_protocol_of_a_member_is_the_one_that_the_broker_names(
    version: int, kind: int, protocol: str | None
) -> None:
    described = {"group": "billing", "state": "Stable", "members": [{"member": "m-1", "assignment": {}, "kind": kind}]}
    body = encode_response(CONSUMER_GROUP_DESCRIBE, version, groups=[described])
    group = consumer_group(CONSUMER_GROUP_DESCRIBE.decode(version, body), "billing")
    assert group is not None
    assert [member.protocol for member in group.members] == [protocol]
