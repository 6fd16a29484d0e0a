"""Kafka's error codes.

A test compares the names, and which errors are retriable, with `org.apache.kafka.common.protocol.Errors` in the jars of
Kafka. The texts are ours.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from aioshard.kafka.wire.errors import BrokerError


class ErrorCode(NamedTuple):
    """The meaning of an error code."""

    name: str
    """Kafka's name."""
    text: str
    """A sentence without a final full stop."""
    retriable: bool = False
    """Whether Kafka's own clients send the same request again."""


def _retriable(name: str, text: str) -> ErrorCode:
    return ErrorCode(name, text, retriable=True)


ERROR_CODES: Final[Mapping[int, ErrorCode]] = {
    -1: ErrorCode("UNKNOWN_SERVER_ERROR", "The broker failed for a reason that only its log tells"),
    1: ErrorCode("OFFSET_OUT_OF_RANGE", "The log of the partition does not contain this offset"),
    2: _retriable("CORRUPT_MESSAGE", "A batch is damaged, too large, or lacks a key that a compacted topic needs"),
    3: _retriable("UNKNOWN_TOPIC_OR_PARTITION", "The broker does not know this topic or partition"),
    4: ErrorCode("INVALID_FETCH_SIZE", "The requested fetch size is not valid"),
    5: _retriable("LEADER_NOT_AVAILABLE", "The partition has no leader now, for example during an election"),
    6: _retriable("NOT_LEADER_OR_FOLLOWER", "Another broker leads the partition"),
    7: _retriable("REQUEST_TIMED_OUT", "The brokers could not complete the request in time"),
    8: ErrorCode("BROKER_NOT_AVAILABLE", "The broker is not available"),
    9: _retriable("REPLICA_NOT_AVAILABLE", "A replica of the partition is not available"),
    10: ErrorCode("MESSAGE_TOO_LARGE", "A record is larger than the broker accepts"),
    11: ErrorCode("STALE_CONTROLLER_EPOCH", "Another broker is the controller now"),
    12: ErrorCode("OFFSET_METADATA_TOO_LARGE", "The metadata of a committed offset are larger than the broker accepts"),
    13: _retriable("NETWORK_EXCEPTION", "The broker closed the connection before it answered"),
    14: _retriable("COORDINATOR_LOAD_IN_PROGRESS", "The coordinator is still loading the group or transaction"),
    15: _retriable("COORDINATOR_NOT_AVAILABLE", "No broker coordinates the group or transaction now"),
    16: _retriable("NOT_COORDINATOR", "Another broker coordinates the group or transaction"),
    17: ErrorCode("INVALID_TOPIC_EXCEPTION", "This is not a valid topic for this operation"),
    18: ErrorCode("RECORD_LIST_TOO_LARGE", "A batch is larger than a segment of the log"),
    19: _retriable("NOT_ENOUGH_REPLICAS", "Too few replicas of the partition are in sync; nothing was written"),
    20: _retriable("NOT_ENOUGH_REPLICAS_AFTER_APPEND", "The records were written, but to fewer replicas than required"),
    21: ErrorCode("INVALID_REQUIRED_ACKS", "The broker does not know this setting of acks"),
    22: ErrorCode("ILLEGAL_GENERATION", "The group has rebalanced: this is not its current generation"),
    23: ErrorCode("INCONSISTENT_GROUP_PROTOCOL", "The other members of the group use another protocol or assignor"),
    24: ErrorCode("INVALID_GROUP_ID", "The group id is not valid"),
    25: ErrorCode("UNKNOWN_MEMBER_ID", "The group does not know this member"),
    26: ErrorCode("INVALID_SESSION_TIMEOUT", "The broker does not allow this session timeout"),
    27: ErrorCode("REBALANCE_IN_PROGRESS", "The group is rebalancing"),
    28: ErrorCode("INVALID_COMMIT_OFFSET_SIZE", "The commit is larger than the broker accepts"),
    29: ErrorCode("TOPIC_AUTHORIZATION_FAILED", "This user lacks a permission on the topic"),
    30: ErrorCode("GROUP_AUTHORIZATION_FAILED", "This user lacks a permission on the group"),
    31: ErrorCode("CLUSTER_AUTHORIZATION_FAILED", "This user lacks a permission on the cluster"),
    32: ErrorCode("INVALID_TIMESTAMP", "The timestamp of a record is outside the range that the broker accepts"),
    33: ErrorCode("UNSUPPORTED_SASL_MECHANISM", "The broker does not support this SASL mechanism"),
    34: ErrorCode("ILLEGAL_SASL_STATE", "The broker did not expect this request during the authentication"),
    35: ErrorCode("UNSUPPORTED_VERSION", "The broker does not support this version of the request"),
    36: ErrorCode("TOPIC_ALREADY_EXISTS", "A topic with this name exists already"),
    37: ErrorCode("INVALID_PARTITIONS", "This number of partitions is not possible"),
    38: ErrorCode("INVALID_REPLICATION_FACTOR", "The cluster has fewer brokers than the replication factor requires"),
    39: ErrorCode("INVALID_REPLICA_ASSIGNMENT", "The replicas cannot be assigned to brokers in this way"),
    40: ErrorCode("INVALID_CONFIG", "A setting is not valid"),
    41: _retriable("NOT_CONTROLLER", "Another broker is the controller of the cluster"),
    42: ErrorCode("INVALID_REQUEST", "The broker does not accept the contents of the request"),
    43: ErrorCode("UNSUPPORTED_FOR_MESSAGE_FORMAT", "The log has an old format that does not support the request"),
    44: ErrorCode("POLICY_VIOLATION", "A policy of the cluster does not allow this"),
    45: ErrorCode("OUT_OF_ORDER_SEQUENCE_NUMBER", "The broker misses batches that the producer sent earlier"),
    46: ErrorCode("DUPLICATE_SEQUENCE_NUMBER", "The broker has this batch already"),
    47: ErrorCode("INVALID_PRODUCER_EPOCH", "A newer producer uses the same transactional id"),
    48: ErrorCode("INVALID_TXN_STATE", "The transaction is not in a state that allows this operation"),
    49: ErrorCode("INVALID_PRODUCER_ID_MAPPING", "The producer id does not belong to the transactional id"),
    50: ErrorCode("INVALID_TRANSACTION_TIMEOUT", "The transaction timeout is longer than the broker allows"),
    51: _retriable("CONCURRENT_TRANSACTIONS", "The previous transaction of this producer is still being completed"),
    52: ErrorCode("TRANSACTION_COORDINATOR_FENCED", "Another broker coordinates the transaction now"),
    53: ErrorCode("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "This user lacks a permission on the transactional id"),
    54: ErrorCode("SECURITY_DISABLED", "The brokers do not check permissions"),
    55: ErrorCode("OPERATION_NOT_ATTEMPTED", "The broker did not try this, because another part of the request failed"),
    56: _retriable("KAFKA_STORAGE_ERROR", "The broker cannot access the log on its disk"),
    57: ErrorCode("LOG_DIR_NOT_FOUND", "The broker does not have this log directory"),
    58: ErrorCode("SASL_AUTHENTICATION_FAILED", "The broker rejected the credentials"),
    59: ErrorCode("UNKNOWN_PRODUCER_ID", "The broker no longer knows this producer"),
    60: ErrorCode("REASSIGNMENT_IN_PROGRESS", "The partition is being moved to other brokers"),
    61: ErrorCode("DELEGATION_TOKEN_AUTH_DISABLED", "The brokers do not accept delegation tokens"),
    62: ErrorCode("DELEGATION_TOKEN_NOT_FOUND", "The broker does not know this delegation token"),
    63: ErrorCode("DELEGATION_TOKEN_OWNER_MISMATCH", "This user may not renew or expire the delegation token"),
    64: ErrorCode("DELEGATION_TOKEN_REQUEST_NOT_ALLOWED", "Delegation tokens cannot be requested on this connection"),
    65: ErrorCode("DELEGATION_TOKEN_AUTHORIZATION_FAILED", "This user lacks a permission on the delegation token"),
    66: ErrorCode("DELEGATION_TOKEN_EXPIRED", "The delegation token has expired"),
    67: ErrorCode("INVALID_PRINCIPAL_TYPE", "The broker does not know this type of principal"),
    68: ErrorCode("NON_EMPTY_GROUP", "The group has members"),
    69: ErrorCode("GROUP_ID_NOT_FOUND", "The group does not exist"),
    70: _retriable("FETCH_SESSION_ID_NOT_FOUND", "The broker no longer has this fetch session"),
    71: _retriable("INVALID_FETCH_SESSION_EPOCH", "The fetch session is out of step"),
    72: _retriable("LISTENER_NOT_FOUND", "The leader has no listener with the name of the one that was asked"),
    73: ErrorCode("TOPIC_DELETION_DISABLED", "The brokers do not allow topics to be deleted"),
    74: _retriable("FENCED_LEADER_EPOCH", "The partition has a newer leader than the request assumes"),
    75: _retriable("UNKNOWN_LEADER_EPOCH", "The broker has not heard of the partition's newest leader yet"),
    76: ErrorCode("UNSUPPORTED_COMPRESSION_TYPE", "The partition has batches with a compression unknown to us"),
    77: ErrorCode("STALE_BROKER_EPOCH", "The broker has registered again since"),
    78: _retriable("OFFSET_NOT_AVAILABLE", "The new leader does not know yet where its log ends"),
    79: ErrorCode("MEMBER_ID_REQUIRED", "The member has to join again with the member id that it was given"),
    80: _retriable("PREFERRED_LEADER_NOT_AVAILABLE", "The preferred leader is not available"),
    81: ErrorCode("GROUP_MAX_SIZE_REACHED", "The group has as many members as the brokers allow"),
    82: ErrorCode("FENCED_INSTANCE_ID", "Another member uses the same group instance id"),
    83: _retriable("ELIGIBLE_LEADERS_NOT_AVAILABLE", "No replica that may lead the partition is available"),
    84: _retriable("ELECTION_NOT_NEEDED", "The partition does not need an election"),
    85: ErrorCode("NO_REASSIGNMENT_IN_PROGRESS", "The partition is not being moved to other brokers"),
    86: ErrorCode("GROUP_SUBSCRIBED_TO_TOPIC", "The group has members that read the topic"),
    87: ErrorCode(
        "INVALID_RECORD", "The record itself was rejected; a compacted topic accepts no record without a key"
    ),
    88: _retriable(
        "UNSTABLE_OFFSET_COMMIT",
        "A transaction of the group is still open; it ends at transaction_timeout at the latest",
    ),
    89: _retriable("THROTTLING_QUOTA_EXCEEDED", "This user has exceeded a quota"),
    90: ErrorCode("PRODUCER_FENCED", "A newer producer uses the same transactional id"),
    91: ErrorCode("RESOURCE_NOT_FOUND", "The request names a resource that does not exist"),
    92: ErrorCode("DUPLICATE_RESOURCE", "The request names a resource twice"),
    93: ErrorCode("UNACCEPTABLE_CREDENTIAL", "The new credentials do not meet the requirements"),
    94: ErrorCode("INCONSISTENT_VOTER_SET", "The broker is not one of the expected voters"),
    95: ErrorCode("INVALID_UPDATE_VERSION", "This version of the update is not valid"),
    96: ErrorCode("FEATURE_UPDATE_FAILED", "The finalized features could not be updated"),
    97: ErrorCode("PRINCIPAL_DESERIALIZATION_FAILURE", "A broker could not forward the request as this user"),
    98: ErrorCode("SNAPSHOT_NOT_FOUND", "The requested snapshot does not exist"),
    99: ErrorCode("POSITION_OUT_OF_RANGE", "The snapshot does not contain this position"),
    100: _retriable("UNKNOWN_TOPIC_ID", "The broker does not know this topic id"),
    101: ErrorCode("DUPLICATE_BROKER_REGISTRATION", "Another broker uses the same broker id"),
    102: ErrorCode("BROKER_ID_NOT_REGISTERED", "No broker with this id is registered"),
    103: _retriable("INCONSISTENT_TOPIC_ID", "The topic id is not the one of the log"),
    104: ErrorCode("INCONSISTENT_CLUSTER_ID", "The request is for another cluster"),
    105: ErrorCode("TRANSACTIONAL_ID_NOT_FOUND", "The coordinator does not know this transactional id"),
    106: _retriable("FETCH_SESSION_TOPIC_ID_ERROR", "The fetch session was opened without topic ids, or with them"),
    107: ErrorCode("INELIGIBLE_REPLICA", "A replica may not become in sync"),
    108: ErrorCode("NEW_LEADER_ELECTED", "The partition was changed, and has a new leader"),
    109: ErrorCode("OFFSET_MOVED_TO_TIERED_STORAGE", "The records at this offset are in tiered storage"),
    110: ErrorCode("FENCED_MEMBER_EPOCH", "The group has removed this member; it has to join again"),
    111: ErrorCode("UNRELEASED_INSTANCE_ID", "Another member still uses this group instance id"),
    112: ErrorCode("UNSUPPORTED_ASSIGNOR", "The brokers do not have this assignor"),
    113: ErrorCode("STALE_MEMBER_EPOCH", "The member has a newer epoch than the request states"),
    114: ErrorCode("MISMATCHED_ENDPOINT_TYPE", "The listener is not one for this kind of request"),
    115: ErrorCode("UNSUPPORTED_ENDPOINT_TYPE", "The broker does not support this type of listener"),
    116: ErrorCode("UNKNOWN_CONTROLLER_ID", "The cluster does not have a controller with this id"),
    117: ErrorCode("UNKNOWN_SUBSCRIPTION_ID", "The subscription to telemetry is not valid, or is outdated"),
    118: ErrorCode("TELEMETRY_TOO_LARGE", "The telemetry is larger than the broker accepts"),
    119: ErrorCode("INVALID_REGISTRATION", "The controller does not accept the registration of the broker"),
    120: ErrorCode("TRANSACTION_ABORTABLE", "The transaction cannot be committed; it has to be aborted"),
    121: ErrorCode("INVALID_RECORD_STATE", "The record can no longer be acknowledged by this member"),
    122: _retriable("SHARE_SESSION_NOT_FOUND", "The broker no longer has this share session"),
    123: _retriable("INVALID_SHARE_SESSION_EPOCH", "The share session is out of step"),
    124: ErrorCode("FENCED_STATE_EPOCH", "The coordinator has a newer epoch of the state"),
    125: ErrorCode("INVALID_VOTER_KEY", "The key of the voter belongs to another replica"),
    126: ErrorCode("DUPLICATE_VOTER", "The voter is one of the voters already"),
    127: ErrorCode("VOTER_NOT_FOUND", "The voter is not one of the voters"),
    128: ErrorCode("INVALID_REGULAR_EXPRESSION", "The pattern of topics is not a valid regular expression"),
    129: ErrorCode("REBOOTSTRAP_REQUIRED", "The client has to connect to the bootstrap servers again"),
    130: ErrorCode("STREAMS_INVALID_TOPOLOGY", "The topology is not valid"),
    131: ErrorCode("STREAMS_INVALID_TOPOLOGY_EPOCH", "The epoch of the topology is not valid"),
    132: ErrorCode("STREAMS_TOPOLOGY_FENCED", "The group has a newer epoch of the topology"),
    133: _retriable("SHARE_SESSION_LIMIT_REACHED", "The broker has as many share sessions as it allows"),
    134: ErrorCode("GROUP_DELETION_FAILED", "The group could not be deleted"),
    135: ErrorCode("STREAMS_TOPOLOGY_DESCRIPTION_UPDATE_FAILED", "The description of the topology was not updated"),
    136: ErrorCode("CONTROLLER_ID_NOT_REGISTERED", "No controller with this id is registered"),
}
"""The error codes of Kafka 4.4 and older. 0 means no error, and is not one of them."""

_ABOUT_TOPICS = frozenset({3, 17, 29})
"""Codes of errors that name the topics that they are about."""


def error_for(code: int, *about: str, message: str | None = None) -> BrokerError:
    """Return the error of an error code in a response.

    Args:
        code: The code. Newer brokers may have codes that are unknown to us: they are not retriable.
        about: The topics, or the group, that the error is about. It keeps only topics.
        message: The broker's own explanation, if it sent one.

    Raises:
        ValueError: The code is 0.
    """
    if not code:
        raise ValueError("0 means no error")
    name, text, retriable = ERROR_CODES.get(code) or ErrorCode(f"ERROR {code}", "The client has no name for it")
    explanation = (message or "").strip().rstrip(".") or text
    topics = about if code in _ABOUT_TOPICS else ()
    return BrokerError(code, f"{name}: {explanation}", retriable=retriable, topics=topics)


def raise_for(code: int, *about: str, message: str | None = None) -> None:
    """Raise the error of an error code, see `error_for`; 0 means no error."""
    if code:
        raise error_for(code, *about, message=message)
