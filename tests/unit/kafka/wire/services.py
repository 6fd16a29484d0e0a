"""The versions of requests that brokers and compatible services offer, as far as we send these requests.

Those of Kafka are from the message definitions in its jars without unstable versions, that of Redpanda from its source
of December 2024, and those of Event Hubs from a report of the same time.
"""

from typing import Final

Ranges = dict[str, tuple[int, int]]
"""The lowest and the highest version, by the name of the request."""

KAFKA_2_8: Final[Ranges] = {
    "Fetch": (0, 12),
    "ListOffsets": (0, 6),
    "Metadata": (0, 11),
    "OffsetCommit": (0, 8),
    "OffsetFetch": (0, 7),
    "FindCoordinator": (0, 3),
    "LeaveGroup": (0, 4),
    "DescribeGroups": (0, 5),
    "SaslHandshake": (0, 1),
    "ApiVersions": (0, 3),
    "CreateTopics": (0, 7),
    "OffsetForLeaderEpoch": (0, 4),
    "DescribeConfigs": (0, 4),
    "SaslAuthenticate": (0, 2),
    "IncrementalAlterConfigs": (0, 1),
    "Produce": (0, 9),
    "InitProducerId": (0, 4),
    "AddPartitionsToTxn": (0, 3),
    "AddOffsetsToTxn": (0, 3),
    "TxnOffsetCommit": (0, 3),
    "EndTxn": (0, 3),
}
KAFKA_3_9: Final[Ranges] = {
    **KAFKA_2_8,
    "Fetch": (0, 17),
    "ListOffsets": (0, 9),
    "Metadata": (0, 12),
    "OffsetCommit": (0, 9),
    "OffsetFetch": (0, 9),
    "FindCoordinator": (0, 6),
    "LeaveGroup": (0, 5),
    "ApiVersions": (0, 4),
    "ConsumerGroupDescribe": (0, 0),
    "Produce": (0, 11),
    "InitProducerId": (0, 5),
    "AddPartitionsToTxn": (0, 5),
    "AddOffsetsToTxn": (0, 4),
    "TxnOffsetCommit": (0, 4),
    "EndTxn": (0, 4),
}
KAFKA_4_1: Final[Ranges] = {
    **KAFKA_3_9,
    "Fetch": (4, 18),
    "ListOffsets": (1, 10),
    "Metadata": (0, 13),
    "OffsetCommit": (2, 9),
    "OffsetFetch": (1, 9),
    "DescribeGroups": (0, 6),
    "CreateTopics": (2, 7),
    "OffsetForLeaderEpoch": (2, 4),
    "DescribeConfigs": (1, 4),
    "ConsumerGroupDescribe": (0, 1),
    "Produce": (0, 13),
    "TxnOffsetCommit": (0, 5),
    "EndTxn": (0, 5),
}
KAFKA_4_4: Final[Ranges] = {
    **KAFKA_4_1,
    "ListOffsets": (1, 11),
    "OffsetCommit": (2, 10),
    "OffsetFetch": (1, 10),
    "ApiVersions": (0, 5),
}
REDPANDA: Final[Ranges] = {
    **KAFKA_2_8,
    "Fetch": (4, 11),
    "ListOffsets": (0, 4),
    "Metadata": (0, 8),
    "OffsetCommit": (1, 8),
    "OffsetFetch": (1, 7),
    "CreateTopics": (0, 6),
    "IncrementalAlterConfigs": (0, 0),
    "Produce": (0, 7),
}
EVENT_HUBS: Final[Ranges] = {
    "Fetch": (4, 6),
    "ListOffsets": (0, 8),
    "Metadata": (0, 5),
    "OffsetCommit": (0, 8),
    "OffsetFetch": (0, 8),
    "FindCoordinator": (0, 4),
    "LeaveGroup": (0, 5),
    "ApiVersions": (0, 3),
    "Produce": (0, 7),
    "InitProducerId": (0, 1),
}
WITHOUT_TOPIC_IDS: Final[Ranges] = {**KAFKA_2_8, "Metadata": (0, 9), "OffsetFetch": (0, 8)}
"""A service that has newer requests of groups than of metadata."""

USABLE: Final = {
    "Kafka 2.8": KAFKA_2_8,
    "Kafka 3.9": KAFKA_3_9,
    "Kafka 4.1": KAFKA_4_1,
    "Kafka 4.4": KAFKA_4_4,
    "Redpanda": REDPANDA,
    "without topic ids": WITHOUT_TOPIC_IDS,
}
