"""Requests of the current epoch of a transactional id, and the errors that end its transactions."""

from collections.abc import Mapping
from typing import Any, Final

from aioshard.errors import CommitError
from aioshard.kafka.transactions.identity import TransactionalId, Version
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import BrokerError, WireError
from aioshard.kafka.wire.notation import Api, Request
from aioshard.kafka.wire.requests import ADD_OFFSETS_TO_TXN, END_TXN, PRODUCE, TXN_OFFSET_COMMIT

_NEWEST_OF_FIRST: Final[Mapping[Api, int]] = {PRODUCE: 11, ADD_OFFSETS_TO_TXN: 3, TXN_OFFSET_COMMIT: 4, END_TXN: 4}
"""The newest versions of requests that belong to the first protocol of transactions."""


def newest_version(api: Api, protocol: Version) -> int:
    """Return the newest version of a request that belongs to a protocol of transactions."""
    return _NEWEST_OF_FIRST.get(api, api.highest) if protocol is Version.FIRST else api.highest


def request_of(transactional: TransactionalId, api: Api, **values: Any) -> Request:
    """Return a request of the current epoch, in the versions of its protocol."""
    identity = transactional.identity
    request = api(transactional_id=transactional.name, producer_id=identity.producer_id, epoch=identity.epoch, **values)
    return request.up_to(newest_version(api, transactional.version))


def aborted(transactional: TransactionalId, why: str, error: WireError | None) -> CommitError:
    """Return the error of a transaction that cannot be committed."""
    return CommitError(f"a transaction of {transactional} was aborted, because {why}: {error}")


def error_of(response: Any) -> BrokerError | None:
    """Return the error of a response that has one for all of the request."""
    return error_for(response.error) if response.error else None
