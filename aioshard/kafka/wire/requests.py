"""The requests that we send, in the notation of `aioshard.kafka.wire.notation`.

A test compares each version with the message definitions in the jars of Kafka. The lower ends of the version ranges are
those of Kafka 2.8 or older, because the embedded broker and compatible services are behind in some of them.
"""

from typing import Final

from aioshard.kafka.wire.notation import Api

OLDEST_BROKER: Final = "2.8"
"""The oldest Kafka that we support; the start refuses older brokers."""

# Connections ------------------------------------------------------------------------------

API_VERSIONS = Api(
    "ApiVersions",
    18,
    (0, 4),
    flexible=3,
    request="software:s@3+ software_version:s@3+",
    response="""
        error:i2 apis:[key:i2 lowest:i2 highest:i2] throttle_ms:i4@1+
        supported:[name:s lowest:i2 highest:i2]#0@3+ finalized_epoch:i8#1@3+
        finalized:[name:s highest:i2 lowest:i2]#2@3+
    """,
)
SASL_HANDSHAKE = Api("SaslHandshake", 17, (1, 1), flexible=99, request="mechanism:s", response="error:i2 mechanisms:s*")
SASL_AUTHENTICATE = Api(
    "SaslAuthenticate",
    36,
    (0, 2),
    flexible=2,
    request="content:b",
    response="error:i2 message:s content:b lifetime_ms:i8@1+",
)

# Cluster ----------------------------------------------------------------------------------

METADATA = Api(
    "Metadata",
    3,
    (8, 12),  # Redpanda before 25.2 stops at 8; librdkafka's mock cluster sends 13 without its error code
    flexible=9,
    request="topics:[id:u@10+ name:s] create_topics:bool cluster_operations:bool@8-10 topic_operations:bool",
    response="""
        throttle_ms:i4 brokers:[node:i4 host:s port:i4 rack:s] cluster:s controller:i4
        topics:[
            error:i2 name:s id:u@10+ internal:bool
            partitions:[error:i2 partition:i4 leader:i4 epoch:i4 replicas:i4* in_sync:i4* offline:i4*]
            operations:i4
        ]
        cluster_operations:i4@8-10
    """,
)
FIND_COORDINATOR = Api(
    "FindCoordinator",
    10,
    (2, 3),
    flexible=3,
    request="key:s kind:i1",
    response="throttle_ms:i4 error:i2 message:s node:i4 host:s port:i4",
)
DESCRIBE_CONFIGS = Api(
    "DescribeConfigs",
    32,
    (1, 4),
    flexible=4,
    request="resources:[kind:i1 name:s keys:s*] synonyms:bool documentation:bool@3+",
    response="""
        throttle_ms:i4
        resources:[
            error:i2 message:s kind:i1 name:s
            configs:[
                name:s value:s read_only:bool source:i1 sensitive:bool
                synonyms:[name:s value:s source:i1] kind:i1@3+ documentation:s@3+
            ]
        ]
    """,
)
INCREMENTAL_ALTER_CONFIGS = Api(
    "IncrementalAlterConfigs",
    44,
    (0, 1),
    flexible=1,
    request="resources:[kind:i1 name:s configs:[name:s operation:i1 value:s]] validate_only:bool",
    response="throttle_ms:i4 resources:[error:i2 message:s kind:i1 name:s]",
)
CREATE_TOPICS = Api(
    "CreateTopics",
    19,
    (2, 7),
    flexible=5,
    request="""
        topics:[
            name:s partitions:i4 replication:i2 assignments:[partition:i4 brokers:i4*] configs:[name:s value:s]
        ]
        timeout_ms:i4 validate_only:bool
    """,
    response="""
        throttle_ms:i4
        topics:[
            name:s id:u@7+ error:i2 message:s config_error:i2#0@5+ partitions:i4@5+ replication:i2@5+
            configs:[name:s value:s read_only:bool source:i1 sensitive:bool]@5+
        ]
    """,
)

# Groups -----------------------------------------------------------------------------------

DESCRIBE_GROUPS = Api(
    "DescribeGroups",
    15,
    (4, 6),
    flexible=5,
    request="groups:s* operations:bool",
    response="""
        throttle_ms:i4
        groups:[
            error:i2 message:s@6+ group:s state:s kind:s protocol:s
            members:[member:s instance:s client:s host:s metadata:b assignment:b]
            operations:i4
        ]
    """,
)
_ASSIGNMENT = "(partitions:[id:u topic:s partitions:i4*])"
CONSUMER_GROUP_DESCRIBE = Api(
    "ConsumerGroupDescribe",
    69,
    (0, 1),
    flexible=0,
    request="groups:s* operations:bool",
    response=f"""
        throttle_ms:i4
        groups:[
            error:i2 message:s group:s state:s epoch:i4 assignment_epoch:i4 assignor:s
            members:[
                member:s instance:s rack:s epoch:i4 client:s host:s topics:s* pattern:s
                assignment:{_ASSIGNMENT} target:{_ASSIGNMENT} kind:i1@1+
            ]
            operations:i4
        ]
    """,
)
CONSUMER_GROUP_HEARTBEAT = Api(
    "ConsumerGroupHeartbeat",
    68,
    (1, 1),  # in version 0, a preview, brokers choose the ids of members, and know no patterns
    flexible=0,
    request="""
        group:s member:s epoch:i4 instance:s rack:s rebalance_timeout_ms:i4 topics:s* pattern:s assignor:s
        owned:[id:u partitions:i4*]
    """,
    response="""
        throttle_ms:i4 error:i2 message:s member:s epoch:i4 interval_ms:i4
        assignment:{topics:[id:u partitions:i4*]}
    """,
)
LEAVE_GROUP = Api(
    "LeaveGroup",
    13,
    (3, 5),
    flexible=4,
    request="group:s members:[member:s instance:s reason:s@5+]",
    response="throttle_ms:i4 error:i2 members:[member:s instance:s error:i2]",
)
JOIN_GROUP = Api(
    "JoinGroup",
    11,
    (5, 9),  # from 9 on, a restarted leader learns that it still leads
    flexible=6,
    skipped=6,  # librdkafka's mock cluster, the embedded broker, closes the connection
    request="""
        group:s session_timeout_ms:i4 rebalance_timeout_ms:i4 member:s instance:s kind:s
        protocols:[name:s metadata:b] reason:s@8+
    """,
    response="""
        throttle_ms:i4 error:i2 generation:i4 kind:s@7+ protocol:s leader:s skip_assignment:bool@9+ member:s
        members:[member:s instance:s metadata:b]
    """,
)
SYNC_GROUP = Api(
    "SyncGroup",
    14,
    (3, 5),
    flexible=4,
    skipped=4,  # as above
    request="""
        group:s generation:i4 member:s instance:s kind:s@5+ protocol:s@5+ assignments:[member:s assignment:b]
    """,
    response="throttle_ms:i4 error:i2 kind:s@5+ protocol:s@5+ assignment:b",
)
HEARTBEAT = Api(
    "Heartbeat",
    12,
    (3, 4),
    flexible=4,
    request="group:s generation:i4 member:s instance:s",
    response="throttle_ms:i4 error:i2",
)

# Offsets of groups ------------------------------------------------------------------------

OFFSET_COMMIT = Api(
    "OffsetCommit",
    8,
    (3, 10),  # up to 4, the request says how long to keep the offsets
    flexible=8,
    request="""
        group:s generation:i4 member:s instance:s@7+ retention_ms:i8@2-4
        topics:[topic:s@-9 id:u@10+ partitions:[partition:i4 offset:i8 epoch:i4@6+ metadata:s]]
    """,
    response="throttle_ms:i4 topics:[topic:s@-9 id:u@10+ partitions:[partition:i4 error:i2]]",
)
OFFSET_FETCH = Api(
    "OffsetFetch",
    9,
    (6, 10),
    flexible=6,
    request="""
        group:s@-7 topics:[topic:s partitions:i4*]@-7
        groups:[group:s member:s@9+ epoch:i4@9+ topics:[topic:s@-9 id:u@10+ partitions:i4*]]@8+
        stable:bool@7+
    """,
    response="""
        throttle_ms:i4
        topics:[topic:s partitions:[partition:i4 offset:i8 epoch:i4 metadata:s error:i2]]@-7 error:i2@-7
        groups:[
            group:s topics:[topic:s@-9 id:u@10+ partitions:[partition:i4 offset:i8 epoch:i4 metadata:s error:i2]]
            error:i2
        ]@8+
    """,
)

# Logs -------------------------------------------------------------------------------------

LIST_OFFSETS = Api(
    "ListOffsets",
    2,
    (4, 11),  # Redpanda before 26.1 stops at 4
    flexible=6,
    request="""
        replica:i4 isolation:i1 topics:[topic:s partitions:[partition:i4 leader_epoch:i4 timestamp:i8]]
        timeout_ms:i4@10+
    """,
    response="""
        throttle_ms:i4 topics:[topic:s partitions:[partition:i4 error:i2 timestamp:i8 offset:i8 epoch:i4]]
    """,
)
OFFSET_FOR_LEADER_EPOCH = Api(
    "OffsetForLeaderEpoch",
    23,
    (3, 4),
    flexible=4,
    request="replica:i4 topics:[topic:s partitions:[partition:i4 leader_epoch:i4 epoch:i4]]",
    response="throttle_ms:i4 topics:[topic:s partitions:[error:i2 partition:i4 epoch:i4 end:i8]]",
)
FETCH = Api(
    "Fetch",
    1,
    (11, 17),
    flexible=12,
    request="""
        replica:i4@-14 max_wait_ms:i4 min_bytes:i4 max_bytes:i4 isolation:i1 session:i4 session_epoch:i4
        topics:[
            topic:s@-12 id:u@13+
            partitions:[partition:i4 leader_epoch:i4 offset:i8 fetched_epoch:i4@12+ log_start:i8 max_bytes:i4]
        ]
        forgotten:[topic:s@-12 id:u@13+ partitions:i4*] rack:s
    """,
    response="""
        throttle_ms:i4 error:i2 session:i4
        topics:[
            topic:s@-12 id:u@13+
            partitions:[
                partition:i4 error:i2 high_watermark:i8 stable_end:i8 log_start:i8
                diverging:{epoch:i4 end:i8}#0@12+ leader:{node:i4 epoch:i4}#1@12+
                aborted:[producer:i8 first:i8] preferred:i4 records:b
            ]
        ]
        endpoints:[node:i4 host:s port:i4 rack:s]#0@16+
    """,
)

PRODUCE = Api(
    "Produce",
    0,
    (3, 12),  # from 13 on, topics have ids only
    flexible=9,
    request="transactional_id:s acks:i2 timeout_ms:i4 topics:[topic:s partitions:[partition:i4 records:b]]",
    response="""
        topics:[
            topic:s
            partitions:[
                partition:i4 error:i2 offset:i8 timestamp:i8 log_start:i8@5+
                record_errors:[index:i4 message:s]@8+ message:s@8+ leader:{node:i4 epoch:i4}#0@10+
            ]
        ]
        throttle_ms:i4 endpoints:[node:i4 host:s port:i4 rack:s]#0@10+
    """,
)
INIT_PRODUCER_ID = Api(
    "InitProducerId",
    22,
    (0, 5),
    flexible=2,
    request="transactional_id:s timeout_ms:i4 producer_id:i8@3+ epoch:i2@3+",
    response="throttle_ms:i4 error:i2 producer_id:i8 epoch:i2",
)

# Transactions -----------------------------------------------------------------------------

ADD_PARTITIONS_TO_TXN = Api(
    "AddPartitionsToTxn",
    24,
    (0, 3),  # from 4 on, for brokers only
    flexible=3,
    request="transactional_id:s producer_id:i8 epoch:i2 topics:[topic:s partitions:i4*]",
    response="throttle_ms:i4 topics:[topic:s partitions:[partition:i4 error:i2]]",
)
ADD_OFFSETS_TO_TXN = Api(
    "AddOffsetsToTxn",
    25,
    (0, 4),
    flexible=3,
    request="transactional_id:s producer_id:i8 epoch:i2 group:s",
    response="throttle_ms:i4 error:i2",
)
TXN_OFFSET_COMMIT = Api(
    "TxnOffsetCommit",
    28,
    (3, 5),  # from 5 on, it adds the group to the transaction
    flexible=3,
    request="""
        transactional_id:s group:s producer_id:i8 epoch:i2 generation:i4 member:s instance:s
        topics:[topic:s partitions:[partition:i4 offset:i8 leader_epoch:i4 metadata:s]]
    """,
    response="throttle_ms:i4 topics:[topic:s partitions:[partition:i4 error:i2]]",
)
END_TXN = Api(
    "EndTxn",
    26,
    (0, 5),  # from 5 on, the producer has another epoch, or id, afterwards
    flexible=3,
    request="transactional_id:s producer_id:i8 epoch:i2 commit:bool",
    response="throttle_ms:i4 error:i2 producer_id:i8@5+ epoch:i2@5+",
)

ALL: Final = tuple(api for api in list(globals().values()) if isinstance(api, Api))
