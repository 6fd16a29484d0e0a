"""The meaning of error codes in answers to the requests of a transaction."""

import enum
from collections.abc import Mapping
from typing import Final

from aioshard.kafka.errors import GROUP_CHANGED


class Meaning(enum.Enum):
    """The meaning of an answer from a coordinator."""

    DONE = enum.auto()
    BUSY = enum.auto()
    """Nothing was done: the coordinator is loading, or an earlier end is not finished. Ask it again soon."""
    MOVED = enum.auto()
    """Nothing was done: another broker coordinates."""
    IN_DOUBT = enum.auto()
    """It may have been done, or may be done later. Ask again; a new epoch must come before the next transaction."""
    UNKNOWN_TOPIC = enum.auto()
    """Nothing was done: the broker does not know a topic or partition, perhaps not yet."""
    ENDED = enum.auto()
    """Nothing was done, and the transaction cannot be committed."""
    FENCED = enum.auto()
    """The coordinator knows a newer epoch than ours."""
    EXPIRED = enum.auto()
    """The coordinator has forgotten the transactional id."""
    REFUSED = enum.auto()
    """It will be refused each time: a missing permission, or a setting."""


DENIED_ID: Final = 53
"""Error code: this user lacks a permission on the transactional id."""
TIMEOUT_TOO_LONG: Final = 50
"""Error code: `transaction_timeout` is longer than `transaction.max.timeout.ms` of the brokers."""
UNSUPPORTED: Final = 35
"""Error code: the feature `transaction.version` was changed."""

_AWAY: Final = {0: Meaning.DONE, 14: Meaning.BUSY, 15: Meaning.MOVED, 16: Meaning.MOVED}
OF_TRANSACTION: Final = frozenset({47, 48, 49, 90, 120, UNSUPPORTED, DENIED_ID})
"""Error codes about the transaction or its id, and not about the group, its offsets or a topic."""
_OVER: Final = dict.fromkeys(OF_TRANSACTION, Meaning.ENDED)

ON_NEW_EPOCH: Final[Mapping[int, Meaning]] = {
    **_AWAY,
    51: Meaning.BUSY,  # it ends the transaction before
    47: Meaning.FENCED,
    90: Meaning.FENCED,
    49: Meaning.EXPIRED,
    **dict.fromkeys((TIMEOUT_TOO_LONG, DENIED_ID, 31, UNSUPPORTED, 42), Meaning.REFUSED),
}
"""InitProducerId."""
ON_ADDING: Final[Mapping[int, Meaning]] = {
    **_AWAY,
    **_OVER,
    51: Meaning.BUSY,
    3: Meaning.UNKNOWN_TOPIC,
    **dict.fromkeys((17, 29, 30, 55), Meaning.ENDED),
}
"""AddPartitionsToTxn and AddOffsetsToTxn."""
ON_OFFSETS: Final[Mapping[int, Meaning]] = {
    **_AWAY,
    **_OVER,
    **dict.fromkeys(GROUP_CHANGED, Meaning.ENDED),
    51: Meaning.BUSY,
    3: Meaning.UNKNOWN_TOPIC,
    **dict.fromkeys((12, 24, 28, 29, 30), Meaning.ENDED),
}
"""TxnOffsetCommit."""
ON_COMMIT: Final[Mapping[int, Meaning]] = {
    **_AWAY,
    **_OVER,
    51: Meaning.BUSY,
}
"""EndTxn. After an attempt in doubt, a newer epoch proves nothing: it may have begun after the commit."""

ENDS_PRODUCING: Final = frozenset({35, 45, 47, 48, 49, 53, 59, 90, 120})
"""Error codes of Produce after which a transaction cannot be committed."""


def meaning(code: int, codes: Mapping[int, Meaning]) -> Meaning:
    """Return what a code means. One that nobody has listed proves nothing."""
    return codes.get(code, Meaning.IN_DOUBT)
