"""All exceptions of the package; each message says what was found, what was expected and what to do."""

import signal
from collections.abc import Iterable, Mapping
from typing import ClassVar

from aioshard.records import Record, TopicPartition, counted

_SHOWN = 10


class AioshardError(Exception):
    """Base class of every exception that the package raises on purpose."""


# Invalid use --------------------------------------------------------------------------


class HandlerError(AioshardError):
    """A handler or its options cannot work: raised when the decorator is applied, or when the app starts."""


class MessageError(AioshardError):
    """A message to publish is invalid; the error says what was expected."""


class SettingsError(AioshardError):
    """A setting was refused: the message names the value, the limit and the fix."""


class MissingExtraError(AioshardError):
    """A feature needs packages that an extra installs."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra {extra!r}: install it with  pip install 'aioshard[{extra}]'")


class TaskCancelledError(AioshardError):
    """A task that the engine cannot work without was cancelled, but not by the engine."""

    def __init__(self, task: str) -> None:
        super().__init__(
            f"the task {task!r} was cancelled: the handler cancelled its own task, or something cancels tasks that are "
            "not its own; cancel what the handler awaits instead, and stop the app with stop()"
        )


class StateError(AioshardError):
    """A call is not possible in the current state, such as starting an app twice."""


# Raised by handlers -------------------------------------------------------------------


class DecodeError(AioshardError):
    """A record cannot be decoded into its handler's type: the attempt fails and is not retried.

    `on_failure` decides what happens to the record. A function given as `decode` may raise it.
    """


class _LaterError(AioshardError):
    """Base of the exceptions with which a handler chooses the delay until its next attempt."""

    default: ClassVar[str]
    """Message without a reason, before the delay."""

    def __init__(self, seconds: float, why: str = "") -> None:
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{type(self).__name__}({seconds!r}) was refused: expected a number of seconds, 0 or more")
        super().__init__(why or f"{self.default} {seconds:g} s")
        self.seconds = float(seconds)

    def __reduce__(self) -> tuple[type, tuple[float, str]]:
        return type(self), (self.seconds, str(self))


class RetryLater(_LaterError):  # noqa: N818 - a request rather than an error
    """Raised by a handler to choose the delay until its next attempt, as with HTTP's `Retry-After`.

    It counts as a failed attempt, regardless of `retry_on` and `give_up_on`. `Retry.maximum` does not limit the delay.

    Args:
        seconds: Delay until the next attempt.
        why: For logs and explanations.

    Raises:
        ValueError: *seconds* is negative or not finite.

    Example:
        >>> raise RetryLater(30, "the partner is busy")
        Traceback (most recent call last):
        ...
        aioshard.errors.RetryLater: the partner is busy
    """

    default = "retry in"


class ParkLater(_LaterError):  # noqa: N818 - a request rather than an error
    """Raised by a handler to park its record now, durably, and to try it again after a delay that may be long.

    The handler needs `on_failure=Park(...)`. The record moves to the side topic immediately, without the attempts of
    `retry`, and later records of its key wait there behind it, in order. The delay survives restarts and rebalances,
    and `Park.delay` does not apply. A parked record that raises this again counts as a failed retry; see
    `Park.attempts`. In a batch handler it parks every record of the batch, and in a `BatchError` those that it is given
    for.

    Without `Park`, in a backfill on Spark and in `aioshard dlt replay --app` nothing can be parked: the record has then
    failed for good, and its failure policy applies.

    Args:
        seconds: Delay until the next attempt.
        why: For logs and explanations.

    Raises:
        ValueError: *seconds* is negative or not finite.

    Example:
        >>> raise ParkLater(3600, "the partner is closed for maintenance")
        Traceback (most recent call last):
        ...
        aioshard.errors.ParkLater: the partner is closed for maintenance
    """

    default = "parked for"


class BatchError(AioshardError):
    """Some records of a batch failed: raise it in a batch handler. The records that it does not name are complete.

    Each record that it names has failed one attempt, with the error given for it.

    Attributes:
        errors: The error of each failed record.

    Raises:
        HandlerError: It names no record, or an error is not an exception. If this happens in a handler, the whole
            batch fails.

    Example:
        >>> one, two = (Record("clicks", 0, offset, None, b"", (), 0.0) for offset in (7, 8))
        >>> print(BatchError({two: ValueError("no user")}))
        1 record of the batch failed: clicks/0/8 (ValueError)
    """

    def __init__(self, errors: Mapping[Record, BaseException]) -> None:
        if not isinstance(errors, Mapping):
            raise HandlerError(
                f"BatchError was given a {type(errors).__name__}; expected a mapping from records of the batch to "
                "their exceptions, such as BatchError({record: error})"
            )
        self.errors = dict(errors)
        if not self.errors:
            raise HandlerError("BatchError names no record: raise it only when at least one record of the batch failed")
        for record, error in self.errors.items():
            if not (isinstance(record, Record) and isinstance(error, BaseException)):  # type: ignore[redundant-expr]
                raise HandlerError(
                    f"BatchError was given {record!r}: {error!r}; expected records of the batch, each with its "
                    "exception"
                )
        failed = tuple(
            f"{record.topic}/{record.partition}/{record.offset} ({type(error).__name__})"
            for record, error in self.errors.items()
        )
        super().__init__(f"{counted(len(failed), 'record')} of the batch failed: {_some_of(failed)}")

    def __reduce__(self) -> tuple[type, tuple[object]]:
        """Pickle the errors, to send them from a worker process to the app."""
        return type(self), (self.errors,)


# Schema registry ----------------------------------------------------------------------


class RegistryUnavailableError(AioshardError, ConnectionError):
    """A schema registry does not answer, or refuses to, so that a value can be neither decoded nor encoded.

    The record is not to blame: its handler runs again, however often it takes, and no attempt of it is used.
    """


class SchemaNotLoadedError(RegistryUnavailableError):
    """A record was to be decoded before the schema that it was written with had been loaded."""


# Broker errors ------------------------------------------------------------------------


class TransportError(AioshardError):
    """Communication with the brokers failed.

    Attributes:
        retriable: Whether the same request may succeed later without any intervention.
    """

    retriable = True

    def __init__(self, message: str = "", *, retriable: bool | None = None) -> None:
        super().__init__(message)
        if retriable is not None:
            self.retriable = retriable


class _PermanentError(TransportError):
    """An error that repeats until somebody intervenes."""

    retriable = False


class ConnectError(TransportError):
    """No broker could be reached."""


class ClientLostError(TransportError):
    """The client's background work ended; only a new client helps. The app creates one."""


class AuthenticationError(_PermanentError):
    """The brokers refused our credentials, or we refused their certificate."""


class AuthorizationError(_PermanentError):
    """The brokers know us but deny access to the topic or group that the message names."""


class InstanceIdTakenError(_PermanentError):
    """Another process joined with our `group_instance_id`. Once may be a rolling deploy; if it persists, the app ends.

    Attributes:
        session_timeout: Seconds within which a second loss means that the conflict persists.
        persists: Whether it is already known to persist.
    """

    def __init__(
        self, group_id: str, instance_id: str, session_timeout: float, why: str = "", *, persists: bool = False
    ) -> None:
        super().__init__(
            f"another process has joined group {group_id!r} with our group_instance_id={instance_id!r}{why}: two "
            "processes with one id take partitions from each other; give each process a different id"
        )
        self.session_timeout = session_timeout
        self.persists = persists


class SessionTimeoutRefusedError(_PermanentError):
    """The brokers refuse this `session_timeout`.

    Attributes:
        session_timeout: The refused setting, in seconds.
    """

    def __init__(self, session_timeout: float, limits: tuple[float, float] | None = None) -> None:
        """Describe the refusal; *limits* are the least and the most seconds that the brokers accept, if known."""
        accepted = "" if limits is None else f": they accept {limits[0]:g} to {limits[1]:g} s"
        super().__init__(
            f"the brokers refused session_timeout={session_timeout:g} s{accepted}; choose another one, or change "
            "group.min.session.timeout.ms and group.max.session.timeout.ms on the brokers"
        )
        self.session_timeout = session_timeout


class CorruptRecordError(_PermanentError):
    """A batch of a partition cannot be read; the position stays before it and nothing is skipped."""


class OffsetOutOfRangeError(_PermanentError):
    """A position is outside its partition's log: retention passed it, or the topic was recreated.

    Attributes:
        topic_partition: The partition.
        position: The requested offset.
    """

    def __init__(self, topic_partition: TopicPartition, position: int) -> None:
        super().__init__(
            f"offset {position} of {topic_partition} is outside the partition's log: "
            "retention deleted it, or the topic was deleted and created again"
        )
        self.topic_partition = topic_partition
        self.position = position


class TopicRecreatedError(OffsetOutOfRangeError):
    """A topic was deleted and created again, so that a position belongs to another log."""

    def __init__(self, topic_partition: TopicPartition, position: int) -> None:
        super().__init__(topic_partition, position)
        text = f"topic {topic_partition.topic!r} was deleted and created again: offset {position} of {topic_partition}"
        self.args = (f"{text} belongs to the old log",)


class LogTruncatedError(OffsetOutOfRangeError):
    """The cluster has lost records that were already read, for example in an unclean leader election.

    Attributes:
        topic_partition: The partition.
        position: One past the last offset that was lost and that we had read; `resumes_at` if no loss is proven.
        resumes_at: The first offset that the log now has other records for, or none.
    """

    def __init__(self, topic_partition: TopicPartition, resumes_at: int, position: int) -> None:
        super().__init__(topic_partition, position)
        self.resumes_at = resumes_at
        lost = f"the cluster has lost offsets {resumes_at} to {position - 1} of {topic_partition}"
        if position == resumes_at:
            lost = f"the cluster may have lost records of {topic_partition} from offset {resumes_at} on"
        self.args = (f"{lost}: the log of its new leader does not have the records that were read there",)


class UnknownPartitionError(_PermanentError, LookupError):
    """There is no such partition, or the in-memory broker has no such topic."""


class CommitError(TransportError):
    """A commit was not acknowledged; it stays pending and is retried after a new check."""


class CommitRefusedError(CommitError):
    """The broker refused a commit because the group has moved on; it must not be sent again unchanged."""

    retriable = False


class GroupHasMembersError(CommitRefusedError):
    """Manual assignment in a group with members: brokers accept commits only from those members. The app ends."""


class MetadataRefusedError(CommitError):
    """The broker refused commit metadata of this length; the commit may be sent again with less or no metadata."""


class TopicsRefusedError(CommitError):
    """The brokers refused the offsets of some partitions because of their topics, and stored all others.

    Attributes:
        refused: The refused partitions, each with the reason.
    """

    def __init__(self, refused: Mapping[TopicPartition, TransportError]) -> None:
        self.refused = refused
        super().__init__("; ".join(dict.fromkeys(str(reason) for reason in refused.values())))

    @property
    def is_denied(self) -> bool:
        """Whether this user may not read one of the topics."""
        return any(isinstance(reason, AuthorizationError) for reason in self.refused.values())


class MessageTooLargeError(_PermanentError):
    """A message is larger than its topic allows (`max.message.bytes`)."""


class MessageRefusedError(_PermanentError):
    """The brokers refuse a message that a run published in a transaction; it is not retried.

    The run had ended when the transaction was written, so the record fails when its partition begins again.
    """


class MessagesRefusedError(CommitError):
    """A transaction was not committed because messages in it cannot be written: nothing of it is or becomes visible.

    Attributes:
        refused: The refused messages, by their index in the transaction, each with the reason. None if the same
            messages may be sent again, because the client then writes them in smaller batches.
    """

    retriable = False

    def __init__(self, refused: Mapping[int, MessageRefusedError]) -> None:
        self.refused = refused
        first = next(iter(refused.values()), None)
        if first is None:
            message = "a transaction is written again in smaller batches, because the brokers refused a batch in it"
        else:
            message = f"a transaction is written again without {counted(len(refused), 'message')}: {first}"
        super().__init__(message)


class TakenOverError(_PermanentError):
    """Another program does the same work now, and has fenced this one: nothing more can be committed here."""


class SideTopicError(_PermanentError):
    """A topic for parked records cannot be used: not compacted, too few partitions, another group's, or full."""


# End of the engine --------------------------------------------------------------------


class StartError(AioshardError):
    """The app could not start within `start_timeout`, or was refused; nothing was consumed."""


class MissingTopicError(StartError):
    """The app did not start, because topics do not exist that it needs, or this user may not see them."""


class NoOffsetError(AioshardError):
    """A partition has no committed offset, and no policy decides where to begin."""

    def __init__(self, group_id: str, topic_partition: TopicPartition) -> None:
        super().__init__(
            f"group {group_id!r} has no committed offset for {topic_partition} and auto_offset_reset does not say "
            "where to begin: set it to 'earliest' (every record) or 'latest' (only new ones), or commit an offset first"
        )
        self.topic_partition = topic_partition


class HaltedError(AioshardError):
    """Consuming up to the end was requested, but permanently failed records block it.

    Attributes:
        records: `topic/partition/offset` of each halted record.
    """

    def __init__(self, records: Iterable[str]) -> None:
        self.records = tuple(records)
        super().__init__(
            f"{counted(len(self.records), 'record')} failed permanently: {_some_of(self.records)}. Their shards are "
            "blocked, and the partitions are not committed past them. Fix the errors in the log and run again"
        )


class StuckError(AioshardError):
    """Nothing has completed for `stuck_after` seconds in a run that no operator watches."""


class NotDrainedError(AioshardError):
    """The app could not finish and commit everything before it stopped; the rest is delivered again.

    Attributes:
        records: `topic/partition/offset` of each record that was still in flight.
        uncommitted: Number of finished records that may run again, by `topic/partition`: their last commit was not
            acknowledged.
        unrecovered: `topic/partition/offset` of each record whose dead letter could not be written, or which could not
            be parked or removed from its side topic, with the reason.
    """

    def __init__(
        self,
        records: Iterable[str],
        timeout: float,
        *,
        uncommitted: Mapping[str, int] | None = None,
        reason: str | None = None,
        unrecovered: Mapping[str, str] | None = None,
    ) -> None:
        self.records = tuple(records)
        self.uncommitted = dict(uncommitted or {})
        self.unrecovered = dict(unrecovered or {})
        sentences = []
        if self.records:
            sentences.append(
                f"{counted(len(self.records), 'record')} still ran after shutdown_timeout={timeout:g} s and stayed "
                f"uncommitted: {_some_of(self.records)}. They are delivered again; raise shutdown_timeout, or let the "
                "handler end when it is cancelled"
            )
        if self.uncommitted:
            partitions = tuple(f"{name} ({count})" for name, count in self.uncommitted.items())
            finished = counted(sum(self.uncommitted.values()), "record")
            sentences.append(
                f"{finished} finished and may run again, since their commit was not acknowledged before the app "
                f"stopped ({reason}): {_some_of(partitions)}. Fix that cause, or raise shutdown_timeout={timeout:g} s"
            )
        if self.unrecovered:
            failed = counted(len(self.unrecovered), "record")
            first, why = next(iter(self.unrecovered.items()))
            sentences.append(
                f"{failed} could not be completed, {first} first ({why}). Fix that cause; the next start runs what is "
                "incomplete again"
            )
        super().__init__(". ".join(sentences))


# Backfills ----------------------------------------------------------------------------


class PlanError(AioshardError):
    """A backfill cannot be planned as requested, or its plan cannot be used."""


class DataLossError(AioshardError):
    """Records to be read are no longer in the log.

    Attributes:
        lost: `topic/partition: offsets first to last` of each partition with lost records.
    """

    def __init__(self, lost: Iterable[str], advice: str) -> None:
        self.lost = tuple(lost)
        super().__init__(
            f"records that should be read have been deleted from the log (retention, or the topic was recreated): "
            f"{_some_of(self.lost)}. {advice}"
        )


class GroupBusyError(AioshardError):
    """The brokers refused to store offsets for a group from outside: it has members. Nothing was changed.

    Attributes:
        members: The members as described by the brokers; empty if they expired meanwhile.
    """

    def __init__(self, group_id: str, members: Iterable[str], waited: float) -> None:
        self.members = tuple(members)
        shown = _some_of(self.members) if self.members else "the brokers no longer list them"
        super().__init__(
            f"group {group_id!r} has members after {waited:g} s of waiting, and nothing was changed: {shown}. "
            "Stop them; one that was killed, or is static, counts until its session timeout has passed: wait longer"
        )


class GroupMovedError(AioshardError):
    """The group's committed offsets differ from those in the plan: another consumer has moved them.

    Attributes:
        moved: `topic/partition: then 5, now 9` of each partition.
    """

    def __init__(self, group_id: str, moved: Iterable[str]) -> None:
        self.moved = tuple(moved)
        super().__init__(
            f"group {group_id!r} has moved since the plan was made, and nothing was changed: {_some_of(self.moved)}. "
            "Another consumer, or a reset, has moved it: make a new plan, or hand over by force, which may repeat or "
            "skip records"
        )


class RunError(AioshardError):
    """A backfill ended early for a reason unrelated to its records; it may be started again."""


class NotVerifiedError(AioshardError):
    """A backfill cannot be handed over: it was not verified, or it contains halted records."""


# Errors of a single epoch or run ------------------------------------------------------


class CancelledRunError(AioshardError):
    """A handler raised `CancelledError` although it had not been cancelled: the attempt failed."""

    def __init__(self) -> None:
        super().__init__("the handler raised CancelledError by itself: something that it awaited was cancelled")


class AttemptTimeoutError(AioshardError, TimeoutError):
    """An attempt took longer than the handler's `timeout`: its run was cancelled and it failed."""

    def __init__(self, timeout: float) -> None:
        super().__init__(f"the attempt took longer than timeout={timeout:g} s and was cancelled")


class RecordExpiredError(AioshardError):
    """A record was older than the handler's `max_age` when it would have started: its handler did not run."""

    def __init__(self, age: float, max_age: float) -> None:
        super().__init__(f"the record was {age:.3g} s old when it would have started, and max_age={max_age:g} s")


class ProcessError(AioshardError):
    """A worker process ended during a run, or the result or exception of the run cannot be sent to the app."""


class StoppedRunError(AioshardError):
    """An operator cancelled a run with `App.cancel_run`: the attempt failed."""

    def __init__(self) -> None:
        super().__init__("the run was cancelled by cancel_run")


class InterruptedRunError(AioshardError):
    """A run was cancelled because its partition was revoked or the app is stopping; its attempt does not count."""

    def __init__(self) -> None:
        super().__init__("the run was cancelled because its partition was revoked or the app is stopping")


class SwallowedCancellationError(AioshardError):
    """A run that had been cancelled continued and returned: its effects are unknown."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; the handler swallowed the cancellation and returned: let it end when it is cancelled")


class OffsetRegressionError(AioshardError):
    """An offset arrived that is not above the previous ones: the partition was rewound and needs a new epoch."""

    def __init__(self, offset: int, expected: int) -> None:
        super().__init__(f"offset {offset} came after {expected - 1}; at least {expected} was expected")


# Health server and test kit -----------------------------------------------------------


class PortError(AioshardError):
    """The address of the health server cannot be used."""


class DeadlockError(AioshardError):
    """Nothing can proceed, or nothing ever ends; the message shows where each task waits."""


def _some_of(records: tuple[str, ...]) -> str:
    """Return the first of many records, to keep a message readable; all of them are in `records`."""
    shown = ", ".join(records[:_SHOWN])
    return shown if len(records) <= _SHOWN else f"{shown}, …"


def signal_name(number: int) -> str:
    """Return the name of a signal for a message; a real-time signal, and one of another system, has only a number.

    Example:
        >>> signal_name(9), signal_name(35)
        ('SIGKILL', 'signal 35')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
