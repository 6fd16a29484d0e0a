"""Our requests are those of Kafka: compared with the message definitions in the jars of both brokers."""

import functools
import itertools
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from aioshard.kafka.wire import consumer_protocol
from aioshard.kafka.wire.notation import Api, Field
from aioshard.kafka.wire.requests import ALL
from tests.kafka.wire.jars import KAFKAS, libs_of
from tests.support.kafka_libs import NEWEST

pytestmark = pytest.mark.kafka

KINDS = {
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "bool": "bool",
    "string": "s",
    "bytes": "b",
    "records": "b",
    "uuid": "u",
}
NAMES = {
    "aborted": {"AbortedTransactions"},
    "apis": {"ApiKeys"},
    "assignment": {"MemberAssignment"},
    "assignor": {"AssignorName", "ServerAssignor"},
    "brokers": {"BrokerIds"},
    "client": {"ClientId"},
    "cluster": {"ClusterId"},
    "cluster_operations": {"ClusterAuthorizedOperations", "IncludeClusterAuthorizedOperations"},
    "commit": {"Committed"},
    "config_error": {"TopicConfigErrorCode"},
    "content": {"AuthBytes"},
    "controller": {"ControllerId"},
    "create_topics": {"AllowAutoTopicCreation"},
    "diverging": {"DivergingEpoch"},
    "documentation": {"IncludeDocumentation"},
    "end": {"EndOffset"},
    "endpoints": {"NodeEndpoints"},
    "epoch": {
        "CommittedLeaderEpoch",
        "GroupEpoch",
        "LeaderEpoch",
        "MemberEpoch",
        "ProducerEpoch",
        "V3AndBelowProducerEpoch",
    },
    "error": {"ErrorCode", "PartitionErrorCode"},
    "fetched_epoch": {"LastFetchedEpoch"},
    "finalized": {"FinalizedFeatures"},
    "finalized_epoch": {"FinalizedFeaturesEpoch"},
    "first": {"FirstOffset"},
    "forgotten": {"ForgottenTopicsData"},
    "generation": {"GenerationId", "GenerationIdOrMemberEpoch"},
    "group": {"GroupId"},
    "groups": {"GroupIds"},
    "highest": {"MaxVersion", "MaxVersionLevel"},
    "host": {"ClientHost"},
    "id": {"TopicId"},
    "in_sync": {"IsrNodes"},
    "index": {"BatchIndex"},
    "instance": {"GroupInstanceId", "InstanceId"},
    "internal": {"IsInternal"},
    "interval_ms": {"HeartbeatIntervalMs"},
    "isolation": {"IsolationLevel"},
    "key": {"ApiKey"},
    "keys": {"ConfigurationKeys"},
    "kind": {"ConfigType", "KeyType", "MemberType", "ProtocolType", "ResourceType"},
    "leader": {"CurrentLeader", "LeaderId"},
    "leader_epoch": {"CommittedLeaderEpoch", "CurrentLeaderEpoch"},
    "lifetime_ms": {"SessionLifetimeMs"},
    "log_start": {"LogStartOffset"},
    "lowest": {"MinVersion", "MinVersionLevel"},
    "max_bytes": {"PartitionMaxBytes"},
    "member": {"MemberId"},
    "message": {"BatchIndexErrorMessage", "ErrorMessage"},
    "metadata": {"CommittedMetadata", "MemberMetadata"},
    "name": {"ResourceName"},
    "node": {"LeaderId", "NodeId"},
    "offline": {"OfflineReplicas"},
    "offset": {"BaseOffset", "CommittedOffset", "FetchOffset"},
    "operation": {"ConfigOperation"},
    "operations": {"AuthorizedOperations", "IncludeAuthorizedOperations", "TopicAuthorizedOperations"},
    "owned": {"TopicPartitions"},
    "partition": {"Index", "PartitionIndex"},
    "partitions": {
        "NumPartitions",
        "PartitionData",
        "PartitionIndexes",
        "PartitionResponses",
        "ResultsByPartition",
        "TopicPartitions",
    },
    "pattern": {"SubscribedTopicRegex"},
    "preferred": {"PreferredReadReplica"},
    "producer": {"ProducerId"},
    "producer_id": {"V3AndBelowProducerId"},
    "protocol": {"ProtocolData", "ProtocolName"},
    "rack": {"RackId"},
    "replica": {"ReplicaId"},
    "replicas": {"ReplicaNodes"},
    "replication": {"ReplicationFactor"},
    "resources": {"Responses", "Results"},
    "retention_ms": {"RetentionTimeMs"},
    "sensitive": {"IsSensitive"},
    "session": {"SessionId"},
    "software": {"ClientSoftwareName"},
    "software_version": {"ClientSoftwareVersion"},
    "source": {"ConfigSource"},
    "stable": {"RequireStable"},
    "stable_end": {"LastStableOffset"},
    "state": {"GroupState"},
    "supported": {"SupportedFeatures"},
    "synonyms": {"IncludeSynonyms"},
    "target": {"TargetAssignment"},
    "throttle_ms": {"ThrottleTimeMs"},
    "timeout_ms": {"TransactionTimeoutMs"},
    "timestamp": {"LogAppendTimeMs"},
    "topic": {"Name", "TopicName"},
    "topic_operations": {"IncludeTopicAuthorizedOperations"},
    "topics": {
        "Responses",
        "ResultsByTopicV3AndBelow",
        "SubscribedTopicNames",
        "TopicData",
        "TopicPartitions",
        "V3AndBelowTopics",
    },
    "transactional_id": {"V3AndBelowTransactionalId"},
}
"""Kafka's names of our fields, where they are not the same: two fields of one kind cannot change places."""


class Definition(NamedTuple):
    """A field in one version of a message of Kafka's, its kind in our notation."""

    name: str
    kind: str
    fields: "tuple[Definition, ...]"
    tag: int | None


def is_in(version: int, versions: str | None) -> bool:
    """Whether a range such as `3+`, `3-5`, `3` or `none` has a version."""
    if versions in (None, "none"):
        return False
    lowest, dash, highest = versions.removesuffix("+").partition("-")
    if versions.endswith("+"):
        return version >= int(lowest)
    return int(lowest) <= version <= int(highest if dash else lowest)


class Message:
    """The definition of a request or a response in a jar of Kafka's."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.key: int | None = content.get("apiKey")
        self._content = content
        self._structures = {common["name"]: common["fields"] for common in content.get("commonStructs", [])}

    def has(self, version: int) -> bool:
        return is_in(version, self._content["validVersions"])

    def is_flexible(self, version: int) -> bool:
        return is_in(version, self._content["flexibleVersions"])

    def fields(self, version: int) -> tuple[Definition, ...]:
        return self._fields(self._content["fields"], version)

    def _fields(self, fields: Sequence[dict[str, Any]], version: int) -> tuple[Definition, ...]:
        return tuple(self._field(field, version) for field in fields if is_in(version, field["versions"]))

    def _field(self, field: dict[str, Any], version: int) -> Definition:
        tag = field["tag"] if is_in(version, field.get("taggedVersions")) else None
        is_array = field["type"].startswith("[]")
        kind = field["type"].removeprefix("[]")
        if kind in KINDS:
            return Definition(field["name"], KINDS[kind] + ("*" if is_array else ""), (), tag)
        nested = self._fields(field.get("fields") or self._structures[kind], version)
        if is_array:
            return Definition(field["name"], "[", nested, tag)
        if is_in(version, field.get("nullableVersions")):
            # A byte tells it from null. Our notation has no such structure in a tagged field.
            return Definition(field["name"], "{" if tag is None else "nullable", nested, tag)
        return Definition(field["name"], "(" if tag is None else "{", nested, tag)


@functools.cache
def kafkas_message(kafka: str, name: str) -> Message:
    """Read a definition in the jar of a version of Kafka; a test that needs a missing jar is skipped."""
    (jar,) = libs_of(kafka).glob("kafka-clients-*.jar")
    with zipfile.ZipFile(jar) as classes:
        text = classes.read(f"common/message/{name}.json").decode()
    return Message(json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)))


def differences(ours: Sequence[Field], kafkas: Sequence[Definition], version: int, where: str) -> Iterator[str]:
    """Return the differences between our structure and Kafka's; we may leave out tagged fields."""
    present = [field for field in ours if field.is_in(version)]
    pairs = list(
        itertools.zip_longest(
            [field for field in present if field.tag is None], [field for field in kafkas if field.tag is None]
        )
    )
    tagged = {field.tag: field for field in kafkas if field.tag is not None}
    pairs += [(field, tagged.get(field.tag)) for field in present if field.tag is not None]
    for our, kafka in pairs:
        if our is None or kafka is None or our.kind != kafka.kind:
            yield f"{where}: {_described(our)} is {_described(kafka)} in Kafka"
            continue
        if kafka.name.lower() != our.name.replace("_", "") and kafka.name not in NAMES.get(our.name, ()):
            yield f"{where}: {our.name} is called {kafka.name} in Kafka: is it the same field? Then add it to NAMES"
        yield from differences(our.fields, kafka.fields, version, f"{where}, {our.name}")


def _described(field: Field | Definition | None) -> str:
    return "nothing" if field is None else f"{field.name}:{field.kind}"


def messages_of(api: Api, kafka: str) -> list[tuple[str, tuple[Field, ...], Message]]:
    return [
        ("request", api.request, kafkas_message(kafka, f"{api.name}Request")),
        ("response", api.response, kafkas_message(kafka, f"{api.name}Response")),
    ]


@pytest.mark.parametrize("kafka", KAFKAS)
@pytest.mark.parametrize("api", ALL, ids=lambda api: api.name)
def test_each_version_of_our_messages_is_kafkas(api: Api, kafka: str) -> None:
    """An older Kafka does not know all versions that we speak."""
    found: list[str] = []
    compared = 0
    for half, ours, message in messages_of(api, kafka):
        assert message.key == api.key
        for version in range(api.lowest, api.highest + 1):
            if kafka != NEWEST and not message.has(version):
                continue
            where = f"{half} {version}"
            compared += 1
            if not message.has(version):
                found.append(f"{where}: Kafka has no such version")
            if message.is_flexible(version) != api.is_flexible(version):
                found.append(f"{where}: only one of the two is flexible")
            found += differences(ours, message.fields(version), version, where)

    assert not found, "\n".join(found)
    assert compared


@pytest.mark.parametrize("kafka", KAFKAS)
@pytest.mark.parametrize("name", ["Subscription", "Assignment"])
def test_consumers_tell_each_other_what_kafkas_consumers_do(name: str, kafka: str) -> None:
    ours: tuple[Field, ...] = getattr(consumer_protocol, name.upper())
    message = kafkas_message(kafka, f"ConsumerProtocol{name}")

    assert message.has(consumer_protocol.NEWEST)
    for version in range(consumer_protocol.NEWEST + 1):
        assert not list(differences(ours, message.fields(version), version, f"version {version}"))
