"""Every number and name that a user may set, with its default, unit and limits, in one place.

A setting comes from an argument, else from its environment variable (`AIOSHARD_` and the name in
capitals), else from the default below. What cannot work is refused with a sentence; nothing that is
set is ever ignored.
"""

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from aioshard.errors import SettingsError
from aioshard.records import TOPIC_NAME

__all__ = [
    "CLIENT_OPTIONS",
    "CONFLUENT_OWNED_OPTIONS",
    "DRAIN_DEPENDS_ON",
    "OWNED_OPTIONS",
    "PREFIX",
    "SettingDescription",
    "Settings",
    "by_hand_contradictions",
    "checked_assign",
    "checked_directory",
    "checked_servers",
    "client_contradictions",
    "close_match",
    "confluent_option_refusals",
    "contradictions",
    "misspelled_variables",
    "out_of_range",
    "room_to_drain",
    "shown",
    "timeout_warnings",
    "together",
    "unknown",
]

_COMMITS = "aioshard commits itself, and only what is finished; committing by time loses records"
_PREFETCH = "use max_buffered_bytes, which bounds the prefetch too"
CONFLUENT_OWNED_OPTIONS: Mapping[str, str] = {
    "auto_commit_enable": _COMMITS,
    "auto_commit_interval_ms": _COMMITS,
    "auto_offset_reset": "use auto_offset_reset",
    "bootstrap_servers": "use bootstrap_servers",
    "client_id": "use client_id",
    "debug": "what the client then logs shows what is committed",
    "enable_auto_commit": _COMMITS,
    "enable_auto_offset_store": _COMMITS,
    "enable_partition_eof": "aioshard needs it, to pass offsets without records",
    "error_cb": "aioshard listens itself; statistics and the health check say what is wrong",
    "fetch_max_bytes": _PREFETCH,
    "fetch_message_max_bytes": _PREFETCH,
    "fetch_queue_backoff_ms": _PREFETCH,
    "fetch_wait_max_ms": "use fetch_max_wait, in seconds",
    "group_id": "the group id is the first argument of App",
    "group_instance_id": "use group_instance_id",
    "group_protocol": "use group_protocol",
    "group_remote_assignor": "use remote_assignor",
    "heartbeat_interval_ms": "use heartbeat_interval, in seconds",
    "isolation_level": "use isolation_level",
    "logger": "the client logs to aioshard.kafka.confluent.librdkafka",
    "max_partition_fetch_bytes": _PREFETCH,
    "max_poll_interval_ms": "use rebalance_timeout, in seconds: this client has one number for both",
    "metadata_broker_list": "use bootstrap_servers",
    "on_commit": _COMMITS,
    "partition_assignment_strategy": "use assignor",
    "queued_max_messages_kbytes": _PREFETCH,
    "queued_min_messages": _PREFETCH,
    "sasl_mechanism": "use sasl_mechanism",
    "sasl_mechanisms": "use sasl_mechanism",
    "sasl_password": "use sasl_password",
    "sasl_username": "use sasl_username",
    "security_protocol": "use security_protocol",
    "session_timeout_ms": "use session_timeout, in seconds",
    "socket_timeout_ms": "use commit_timeout: the client waits for twice as long, at least 10 s",
    "ssl_ca_location": "use ssl_cafile",
    "ssl_certificate_location": "use ssl_certfile",
    "ssl_key_location": "use ssl_keyfile",
    "ssl_key_password": "use ssl_password",
    "topic_metadata_refresh_interval_ms": "use metadata_max_age, in seconds",
}
"""Options of confluent-kafka that aioshard decides, and what a user does instead; dots are underscores."""

_BROKERS_OWN = ("session_timeout", "heartbeat_interval")


def client_contradictions(values: Mapping[str, Any], given: Collection[str]) -> Iterable[str]:
    """What is wrong with the client, the group protocol and the assignor together.

    Args:
        values: All settings.
        given: The names of those that somebody has set.
    """
    confluent = values["client"] == "confluent"
    if values["group_protocol"] == "consumer":
        yield from _broker_assigns(values, given, confluent=confluent)
    elif values["remote_assignor"] is not None:
        yield (
            f"remote_assignor={values['remote_assignor']!r} is for group_protocol='consumer', where the broker assigns"
            "; under 'classic' a member does: use assignor"
        )
    if values["reassignment_delay"] and (confluent or values["assignor"] not in {"sticky", "lag"}):
        yield (
            f"reassignment_delay={values['reassignment_delay']:g} s has no effect here: only 'sticky' and 'lag' of "
            "client='aiokafka' know who had what; set assignor='sticky', or leave it out"
        )
    if not confluent:
        return
    if values["assignor"] in {"fair", "lag"} and values["group_protocol"] == "classic":
        yield (
            f"assignor={values['assignor']!r} is one of aioshard's own, which client='confluent' cannot be given: use "
            "'sticky', 'roundrobin' or 'range', or client='aiokafka'"
        )
    session, rebalance = values["session_timeout"], values["rebalance_timeout"]
    if rebalance < session and values["group_protocol"] == "classic":
        yield (
            f"rebalance_timeout={rebalance:g} s is less than session_timeout={session:g} s, which client='confluent' "
            f"refuses: raise rebalance_timeout to {session:g} s or lower session_timeout"
        )
    if values["sasl_mechanism"] in {"OAUTHBEARER", "GSSAPI"}:
        yield (
            f"sasl_mechanism={values['sasl_mechanism']!r} is not available in this version of aioshard with "
            "client='confluent': use client='aiokafka', or PLAIN or SCRAM"
        )


def _broker_assigns(values: Mapping[str, Any], given: Collection[str], *, confluent: bool) -> Iterable[str]:
    if not confluent:
        yield (
            "group_protocol='consumer' needs client='confluent': aiokafka knows the classic protocol only; set "
            "client='confluent', or leave group_protocol at 'classic'"
        )
    for name in _BROKERS_OWN:
        if name in given:
            yield (
                f"{name}={values[name]:g} s has no effect under group_protocol='consumer', where it belongs to the "
                f"broker (group.consumer.{name.replace('_', '.')}.ms of the broker or the group): leave it out"
            )
    if "assignor" in given:
        yield (
            f"assignor={values['assignor']!r} has no effect under group_protocol='consumer', where the broker assigns: "
            "use remote_assignor='uniform' or 'range'"
        )


def confluent_option_refusals(options: Mapping[str, Any]) -> Iterable[str]:
    """What of `client_options` aioshard decides; other names are checked by the client when it is built."""
    for name in options:
        instead = CONFLUENT_OWNED_OPTIONS.get(name.replace(".", "_"))
        if instead is not None:
            yield f"client_options has {name!r}, which is refused: {instead}"


_MOST = 100_000
"""Partitions that one process may be given: more are a slip of the pen."""
_PART = re.compile(r"(?P<topic>[^:,]+):(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")
_EXAMPLE = "assign={'orders': [0, 1, 2]}, or as text 'orders:0-2,payments:1'"

_GROUPS_OWN: Mapping[str, object] = {
    "group_instance_id": None,
    "group_protocol": "classic",
    "assignor": "sticky",
    "reassignment_delay": 0.0,
    "remote_assignor": None,
}
"""What says how a group assigns, and the value that says nothing."""
_MEMBERS_OWN = ("session_timeout", "heartbeat_interval", "rebalance_timeout")


def checked_assign(value: object) -> dict[str, tuple[int, ...]]:
    """Partitions by topic, both in order.

    Args:
        value: A mapping of topics to partition numbers, or text: `orders:0-2,payments:1`.

    Raises:
        ValueError: It is neither, names a partition twice, or none at all.

    Example:
        >>> checked_assign("payments:1,orders:0-2,orders:7")
        {'orders': (0, 1, 2, 7), 'payments': (1,)}
    """
    pairs = _in_text(value) if isinstance(value, str) else _in_mapping(value)
    found: dict[str, set[int]] = {}
    for count, (topic, number) in enumerate(pairs):
        if count >= _MOST:
            raise ValueError(f"expected at most {_MOST} partitions")
        if not TOPIC_NAME.fullmatch(topic):
            raise ValueError(f"{topic!r} is no name of a topic: expected {_EXAMPLE}")
        numbers = found.setdefault(topic, set())
        if number in numbers:
            raise ValueError(f"partition {topic}/{number} is named twice: name each once")
        numbers.add(number)
    if not found:
        raise ValueError(f"it names no partition: expected {_EXAMPLE}; without assign the group assigns")
    return {topic: tuple(sorted(found[topic])) for topic in sorted(found)}


def _in_text(text: str) -> Iterator[tuple[str, int]]:
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not TOPIC:PARTITION or TOPIC:FIRST-LAST: expected {_EXAMPLE}")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if last < first:
            raise ValueError(f"{part.strip()!r} ends before it begins: expected TOPIC:FIRST-LAST")
        for number in range(first, last + 1):
            yield match["topic"].strip(), number


def _in_mapping(value: object) -> Iterator[tuple[str, int]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {_EXAMPLE}")  # noqa: TRY004 - pydantic makes sentences of these
    for topic, numbers in value.items():
        if not isinstance(topic, str) or isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
            raise ValueError(f"expected topics with lists of numbers: {_EXAMPLE}")  # noqa: TRY004 - as above
        some = False
        for number in numbers:
            if type(number) is not int or number < 0:
                raise ValueError(f"{topic!r} has {number!r} among its partitions: expected whole numbers from 0 on")
            some = True
            yield topic, number
        if not some:
            raise ValueError(f"{topic!r} has no partitions: name at least one, or leave the topic out")


def by_hand_contradictions(values: Mapping[str, Any], given: Collection[str]) -> Iterable[str]:
    """What is set beside `assign` and has no meaning there, because nobody joins the group.

    Args:
        values: All settings.
        given: The names of those that somebody has set.
    """
    if values["assign"] is None:
        return
    for name, says_nothing in _GROUPS_OWN.items():
        if values[name] != says_nothing:
            yield (
                f"{name}={values[name]!r} has no effect with assign, which gives the partitions by hand: nobody joins "
                f"the group, and it assigns nothing; leave {name} out, or leave assign out to join the group"
            )
    for name in _MEMBERS_OWN:
        if name in given:
            yield (
                f"{name}={values[name]:g} s has no effect with assign: it is for members of a group, and with "
                f"partitions given by hand nobody joins; leave {name} out"
            )


PREFIX = "AIOSHARD_"
"""What the name of each environment variable begins with."""
_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """Marks the unit of a setting in its annotation."""

    name: str


_SECONDS = _Unit("seconds")
_RECORDS = _Unit("records")
_BYTES = _Unit("bytes")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), _SECONDS]
Name = Annotated[str | None, Field(min_length=1, max_length=249)]


@dataclasses.dataclass(frozen=True, slots=True)
class SettingDescription:
    """What there is to know about one setting; the settings table of the documentation is made of these."""

    name: str
    variable: str
    """The environment variable."""
    type: str
    default: str
    """As a user would write it; `""` in quotes is text."""
    unit: str | None
    description: str
    secret: bool


def _computed_drain_timeout(values: Mapping[str, Any]) -> float:
    """What `drain_timeout` is when nobody sets it: 20 s, or 90 % of what the rebalance leaves for it.

    Args:
        values: The settings that it depends on. Those that are missing were refused, which ends
            validation anyway.
    """
    room = room_to_drain(values) if values.keys() >= DRAIN_DEPENDS_ON else None
    # Without room the sum is refused below; any positive number leads there.
    return 20.0 if room is None or room <= 0 else min(20.0, 0.9 * room)


class Settings(BaseSettings):
    """The settings of an app: checked, frozen, and complete once they exist.

    `Settings()` reads the environment; `Settings(_env_file=".env")` a file too, and
    `Settings(_secrets_dir="/run/secrets")` one file per setting, named like its variable in lower
    case. In all of them the text `none` stands for None and an empty text for "not set".

    Raises:
        SettingsError: Values that are unknown, out of range or contradict each other; all of them
            are listed, and no secret is in the message.

    Example:
        >>> settings = Settings(bootstrap_servers="localhost:9092", commit_interval=0.5)
        >>> settings.drain_timeout
        20.0
        >>> Settings(heartbeat_interval=20)
        Traceback (most recent call last):
        aioshard.errors.SettingsError: session_timeout=45 s is less than 3 times heartbeat_interval=20 s: ...
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        env_parse_none_str="none",
        dotenv_filtering="match_prefix",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    # Where the brokers are, and who we are to them ------------------------------------

    bootstrap_servers: str | None = None
    """Brokers to ask first: `host:port`, several separated by commas or as a list. Needed to start."""
    client_id: Name = None
    """Our name in the brokers' logs and quotas; None is `aioshard`."""
    group_instance_id: Name = None
    """Makes this process a static member: restarting it within `session_timeout` moves no partition.
    Unique per process; a static member that ends for good keeps its partitions for `session_timeout`."""
    client: Literal["aiokafka", "confluent"] = "aiokafka"
    """The Kafka client underneath. `confluent` needs the extra `confluent`; there, a rebalance takes only the
    partitions that move."""
    group_protocol: Literal["classic", "consumer"] = "classic"
    """The group protocol: `classic`, or `consumer`, where the broker assigns (KIP-848): Kafka 4.0 and
    `client="confluent"`."""
    assignor: Literal["range", "roundrobin", "sticky", "fair", "lag"] = "sticky"
    """How partitions are spread over the members; all members of a group need the same. With
    `client="confluent"`, `sticky` is the client's `cooperative-sticky`."""
    reassignment_delay: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False), _SECONDS] = 0.0
    """How long the partitions of a member that left or died wait for one that comes in its place; nobody reads
    them until then. 0 gives them to the others at once. For the assignors `sticky` and `lag` of aiokafka."""
    remote_assignor: Literal["uniform", "range"] | None = None
    """How the broker spreads partitions under `group_protocol="consumer"`; None is the broker's own choice."""
    assign: Annotated[dict[str, tuple[int, ...]] | None, NoDecode] = None
    """Partitions given by hand, such as `{"orders": [0, 1, 2]}`, or as text `orders:0-2,payments:1`: nobody joins the
    group then, its commits stay in use, and no partition ever moves. None: the group assigns."""
    client_options: Annotated[dict[str, Any], NoDecode] = Field(default_factory=dict)
    """Options for the client that aioshard does not interpret, under the client's own names and units.
    In the environment: one JSON object."""

    # Membership -----------------------------------------------------------------------

    session_timeout: Seconds = 45.0
    """Without a heartbeat for this long the group takes our partitions; at least 3 times `heartbeat_interval`."""
    heartbeat_interval: Seconds = 3.0
    """Time between heartbeats, and so the time until we hear of a rebalance."""
    rebalance_timeout: Seconds = 60.0
    """How long the group waits for a member to give its partitions back."""
    commit_timeout: Seconds = 5.0
    """Limit of one commit request."""
    drain_timeout: Seconds = Field(default_factory=_computed_drain_timeout)
    """How long records in progress may take to finish when partitions are taken away. `drain_timeout` +
    `commit_timeout` + `heartbeat_interval` stay below `rebalance_timeout`. None: 20 s, or what fits."""

    # Start, stop, commit --------------------------------------------------------------

    start_timeout: Annotated[float | None, Field(gt=0, allow_inf_nan=False), _SECONDS] = 10.0
    """The start fails when the first assignment takes longer. None starts without the brokers and keeps
    trying; readiness is false until then, or until `ready_timeout`."""
    ready_timeout: Annotated[float | None, Field(gt=0, allow_inf_nan=False), _SECONDS] = None
    """Seconds after the start from which `/readyz` is 200 although the group has not been joined yet, for a rollout
    that is not to wait for the brokers. None waits for the first join. Useful with `start_timeout=None`."""
    shutdown_timeout: Seconds = 25.0
    """How long stopping may take, from the request to the last commit. Kubernetes kills after 30 s."""
    commit_interval: Seconds = 1.0
    """Time between commits while records complete; what a crash can repeat."""
    auto_offset_reset: Literal["earliest", "latest", "error"] | None = None
    """Where a group without committed offsets begins, and what follows when the log no longer holds a position.
    None refuses to start without committed offsets: `latest` skips and `earliest` repeats, so somebody must choose."""

    # Reading --------------------------------------------------------------------------

    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """Whether records of open and aborted transactions are left out."""
    metadata_max_age: Seconds = 30.0
    """How often topics and partitions are looked up; new partitions are found within this time."""
    fetch_max_wait: Annotated[float, Field(gt=0, le=30, allow_inf_nan=False), _SECONDS] = 0.1
    """How long a broker may hold a fetch that has nothing to return; at most 30. Unless you set it, the aiokafka client
    waits longer, up to 0.5 s, while hundreds of partitions are idle."""
    max_buffered_records: Annotated[int, Field(ge=1), _RECORDS] = 10_000
    """Bound of the records in memory that are not complete, over all partitions of the process."""
    max_buffered_bytes: Annotated[int, Field(ge=1), _BYTES] = 64 * _MIB
    """Bound of their bytes; a record costs its bytes + 500. The client prefetches up to half as much beside it."""

    # Seeing what happens --------------------------------------------------------------

    stuck_after: Seconds = 60.0
    """A record that is incomplete for longer is reported in the logs and by the health check."""
    restart_when_stuck: bool = False
    """Whether a record that has been running, not halted and not waiting, for longer than `stuck_after` makes `/livez`
    503: for handlers that may hang for good and that a restart cures."""
    show_keys: bool = False
    """Whether keys appear in logs, explanations and the journal; otherwise they are hidden."""
    journal: str | None = None
    """Directory for Parquet files that say what became of each record; None writes none. Needs the extra `journal`."""

    # TLS and SASL ---------------------------------------------------------------------

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How connections are secured."""
    ssl_cafile: str | None = None
    """Certificates (PEM) that the brokers' are checked against; None is the system's."""
    ssl_certfile: str | None = None
    """Our certificate (PEM) for mutual TLS; it may contain the key."""
    ssl_keyfile: str | None = None
    """The key (PEM) of `ssl_certfile`."""
    ssl_password: SecretStr | None = None
    """What `ssl_keyfile` is encrypted with."""
    ssl_check_hostname: bool = True
    """Whether a broker's certificate must name the host that we connect to."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER"] | None = None
    """How we prove who we are, under the two SASL protocols."""
    sasl_username: str | None = None
    """The user, for PLAIN and SCRAM."""
    sasl_password: SecretStr | None = None
    """The user's password."""

    # Validation -----------------------------------------------------------------------

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_sentences(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Not an `except ... raise`: the original error, which holds the values, must not be its context.
        sentences: list[str] = []
        settings: Self | None = None
        try:
            settings = handler(values)
        except ValidationError as error:
            sentences = [_sentence(cls, detail) for detail in error.errors() if detail["type"] != _DEPENDENT]
        if settings is not None:
            sentences = contradictions(settings.__dict__, settings.model_fields_set)
            if not sentences:
                return settings
        raise SettingsError(together(sentences))

    @field_validator("bootstrap_servers", mode="before")
    @classmethod
    def _join_servers(cls, value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = ",".join(map(str, value))
        return checked_servers(value) if isinstance(value, str) else value

    @field_validator("assign", mode="before")
    @classmethod
    def _read_assign(cls, value: Any) -> Any:
        return None if value is None else checked_assign(value)

    @field_validator("journal", mode="before")
    @classmethod
    def _take_path(cls, value: Any) -> Any:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        return checked_directory(value) if isinstance(value, str) else value

    @field_validator("drain_timeout", mode="before")
    @classmethod
    def _fill_drain_timeout(cls, value: Any, info: ValidationInfo) -> Any:
        return _computed_drain_timeout(info.data) if value is None else value

    @field_validator("client_options", mode="before")
    @classmethod
    def _parse_client_options(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            message = f"it is not a JSON object ({error})"
            raise ValueError(message) from None

    # Use ------------------------------------------------------------------------------

    def replace(self, **overrides: Any) -> Self:
        """The same settings with *overrides*, checked again as a whole.

        What was not set explicitly is looked up and computed anew.

        Raises:
            SettingsError: The result cannot work.
        """
        explicit = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(explicit | overrides))

    def require_bootstrap_servers(self) -> str:
        """The brokers' addresses, joined by commas.

        Raises:
            SettingsError: None are set.
        """
        if self.bootstrap_servers is None:
            message = (
                "bootstrap_servers is not set: name at least one broker, for example "
                f"bootstrap_servers='localhost:9092', {PREFIX}BOOTSTRAP_SERVERS=localhost:9092 or, of a command, "
                "--bootstrap-servers localhost:9092"
            )
            raise SettingsError(message)
        return self.bootstrap_servers

    def asdict(self) -> dict[str, Any]:
        """Every setting as it is in effect, ready for JSON; secrets are `***`."""
        return {name: _plain(getattr(self, name)) for name in type(self).model_fields}

    @classmethod
    def descriptions(cls) -> tuple[SettingDescription, ...]:
        """Every setting in the order of declaration."""
        return tuple(
            SettingDescription(
                name=name,
                variable=PREFIX + name.upper(),
                type=_type_name(field.annotation),
                default=_default(cls, name),
                unit=next((mark.name for mark in field.metadata if isinstance(mark, _Unit)), None),
                description=" ".join((field.description or "").split()),
                secret="SecretStr" in _type_name(field.annotation),
            )
            for name, field in cls.model_fields.items()
        )


# Sentences and plain values -----------------------------------------------------------

_DEPENDENT = "default_factory_not_called"
"""Pydantic's word for a computed default whose inputs were refused; the inputs are reported."""


def _sentence(settings: type[Settings], detail: ErrorDetails) -> str:
    """What pydantic found, in our words."""
    name = str(detail["loc"][0]) if detail["loc"] else "the settings"
    if detail["type"] == "extra_forbidden":
        return unknown(name, settings.model_fields)
    value = detail["input"]
    variable = PREFIX + name.upper()
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    reason = reason.replace("expected greater", "it must be greater").replace("expected less", "it must be less")
    return out_of_range(
        name,
        value,
        reason[:1].lower() + reason[1:],
        _default(settings, name),
        variable=variable if isinstance(value, str) and os.environ.get(variable) == value else None,
    )


def _default(settings: type[Settings], name: str) -> str:
    field = settings.model_fields.get(name)
    if field is None:
        return "none"
    if name == "drain_timeout":
        return "20, or what fits"
    return shown(field.get_default(call_default_factory=True))


def _type_name(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("pydantic.types.", "")


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, Mapping):
        return {str(name): _plain(content) for name, content in value.items()}
    if isinstance(value, tuple):
        return [_plain(content) for content in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return f"<{type(value).__name__}>"


CLIENT_OPTIONS = frozenset(
    {
        "api_version",
        "check_crcs",
        "client_rack",
        "connections_max_idle_ms",
        "exclude_internal_topics",
        "fetch_min_bytes",
        "request_timeout_ms",
        "retry_backoff_ms",
        "sasl_kerberos_domain_name",
        "sasl_kerberos_service_name",
        "sasl_oauth_token_provider",
        "ssl_context",
    }
)
"""The client's options that pass through `client_options`."""
OWNED_OPTIONS: Mapping[str, str] = {
    "auto_commit_interval_ms": _COMMITS,
    "auto_offset_reset": "use auto_offset_reset",
    "bootstrap_servers": "use bootstrap_servers",
    "client_id": "use client_id",
    "consumer_timeout_ms": "aioshard polls the client by itself",
    "enable_auto_commit": _COMMITS,
    "fetch_max_bytes": _PREFETCH,
    "fetch_max_wait_ms": "use fetch_max_wait, in seconds",
    "group_id": "the group id is the first argument of App",
    "group_instance_id": "use group_instance_id",
    "heartbeat_interval_ms": "use heartbeat_interval, in seconds",
    "isolation_level": "use isolation_level",
    "key_deserializer": "decode record.key in the handler",
    "loop": "the app runs in the event loop that starts it",
    "max_partition_fetch_bytes": _PREFETCH,
    "max_poll_interval_ms": "a slow handler leaves the group in peace; stuck_after reports it",
    "max_poll_records": "use max_buffered_records",
    "metadata_max_age_ms": "use metadata_max_age, in seconds",
    "partition_assignment_strategy": "use assignor",
    "rebalance_timeout_ms": "use rebalance_timeout, in seconds",
    "sasl_mechanism": "use sasl_mechanism",
    "sasl_plain_password": "use sasl_password",
    "sasl_plain_username": "use sasl_username",
    "security_protocol": "use security_protocol",
    "session_timeout_ms": "use session_timeout, in seconds",
    "topics": "topics belong to handlers: @app.consume",
    "value_deserializer": "decode record.value in the handler",
}
"""The client's options that aioshard decides, and what a user does instead."""

DRAIN_DEPENDS_ON = frozenset({"heartbeat_interval", "rebalance_timeout", "commit_timeout"})

_WITH_PASSWORD = frozenset({"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"})
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_MAX_PORT = 65_535
_LEGAL_INSTANCE = re.compile(r"[A-Za-z0-9._-]+")
_SECRETIVE = frozenset({"client_options", "sasl_password", "ssl_password"})


# Words --------------------------------------------------------------------------------


def together(sentences: Sequence[str]) -> str:
    """One message of all refusals."""
    if len(sentences) == 1:
        return sentences[0]
    return "\n".join([f"{len(sentences)} settings were refused:", *(f"  - {sentence}" for sentence in sentences)])


def shown(value: object) -> str:
    """A value as a user would write it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def close_match(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)), None)


def unknown(name: str, names: Collection[str]) -> str:
    """A setting that does not exist, and what was probably meant."""
    option = name.lower().replace(".", "_")
    if option in OWNED_OPTIONS:
        return f"{name!r} is no setting: {OWNED_OPTIONS[option]}"
    if option in CLIENT_OPTIONS:
        return f"{name!r} is no setting but an option of the client: put it into client_options"
    meant = close_match(option.removeprefix("aioshard_"), names)
    if meant is not None:
        return f"{name!r} is no setting; did you mean {meant!r}?"
    return f"{name!r} is no setting; aioshard.Settings lists all of them"


def out_of_range(name: str, value: object, reason: str, default: str, *, variable: str | None) -> str:
    """A value that one setting cannot have.

    Args:
        name: The setting.
        value: What was given.
        reason: What was expected.
        default: What the setting is when it is not given.
        variable: The environment variable that the value came from, if it did.
    """
    secret = name in _SECRETIVE or (name == "bootstrap_servers" and "@" in str(value))
    text = "***" if secret else shown(value)
    return f"{variable or name}={text} is refused: {reason} (default: {default})"


# Values -------------------------------------------------------------------------------


def checked_servers(text: str) -> str:
    """Broker addresses without stray blanks.

    Raises:
        ValueError: An address is not `host:port`.
    """
    servers = [server.strip() for server in text.split(",")]
    for server in servers:
        if "://" in server:
            message = "expected host:port without a scheme; TLS and SASL are set with security_protocol"
            raise ValueError(message)
        match = _HOST.fullmatch(server)
        if match is None or not 0 < int(match["port"] or 9092) <= _MAX_PORT:
            message = f"expected host:port, several separated by commas, but found {server!r}"
            raise ValueError(message)
    return ",".join(servers)


def checked_directory(text: str) -> str:
    """A directory of this machine.

    Raises:
        ValueError: It is an address of something else.
    """
    if "://" in text:
        message = "expected a directory of this machine, without a scheme; copy its files to where they are read"
        raise ValueError(message)
    return text


def room_to_drain(values: Mapping[str, Any]) -> float:
    """Seconds of a rebalance that are left for draining; `drain_timeout` must be less."""
    return float(values["rebalance_timeout"] - values["commit_timeout"] - values["heartbeat_interval"])


# Contradictions -----------------------------------------------------------------------


def contradictions(values: Mapping[str, Any], given: Collection[str]) -> list[str]:
    """Everything that valid settings get wrong together.

    Args:
        values: All settings.
        given: The names of those that somebody has set.
    """
    chosen = [*by_hand_contradictions(values, given)] or client_contradictions(values, given)
    return [*chosen, *(sentence for rule in _RULES for sentence in rule(values))]


def _membership(values: Mapping[str, Any]) -> Iterable[str]:
    if values["assign"] is not None:
        return  # there is none
    session, heartbeat = values["session_timeout"], values["heartbeat_interval"]
    if session < 3 * heartbeat:
        yield (
            f"session_timeout={session:g} s is less than 3 times heartbeat_interval={heartbeat:g} s: one late "
            f"heartbeat would cost us our partitions; raise session_timeout to {3 * heartbeat:g} s or lower "
            f"heartbeat_interval to {session / 3:.3g} s"
        )
    instance = values["group_instance_id"]
    if instance is not None and (instance in {".", ".."} or not _LEGAL_INSTANCE.fullmatch(instance)):
        yield f"group_instance_id={instance!r} is refused: Kafka takes letters, digits, '.', '_' and '-' only"


def _draining(values: Mapping[str, Any]) -> Iterable[str]:
    if values["assign"] is not None:
        return  # no group waits for the drain
    drain, rebalance = values["drain_timeout"], values["rebalance_timeout"]
    commit, heartbeat = values["commit_timeout"], values["heartbeat_interval"]
    room = room_to_drain(values)
    if room <= 0:
        yield (
            f"rebalance_timeout={rebalance:g} s leaves no time to drain: commit_timeout={commit:g} s and "
            f"heartbeat_interval={heartbeat:g} s take {commit + heartbeat:g} s of it; raise rebalance_timeout "
            f"well above {commit + heartbeat:g} s or lower the other two"
        )
    elif drain >= room:
        yield (
            f"drain_timeout={drain:g} s does not fit: with commit_timeout={commit:g} s and heartbeat_interval="
            f"{heartbeat:g} s it is not less than rebalance_timeout={rebalance:g} s, and the group would expel us "
            f"while we drain; lower it below {room:g} s or raise rebalance_timeout above "
            f"{drain + commit + heartbeat:g} s"
        )


def _options(values: Mapping[str, Any]) -> Iterable[str]:
    if values["client"] == "confluent":
        yield from confluent_option_refusals(values["client_options"])
        return
    for name in values["client_options"]:
        option = name.replace(".", "_")
        if option in OWNED_OPTIONS:
            yield f"client_options has {name!r}, which is refused: {OWNED_OPTIONS[option]}"
        elif name not in CLIENT_OPTIONS:
            meant = close_match(option, CLIENT_OPTIONS)
            advice = f"did you mean {meant!r}?" if meant else f"it takes {', '.join(sorted(CLIENT_OPTIONS))}"
            yield f"client_options has {name!r}, which the client does not know: {advice}"


def _tls(values: Mapping[str, Any]) -> Iterable[str]:
    files = [name for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile") if values[name] is not None]
    protocol = values["security_protocol"]
    given = [*files, *(["client_options['ssl_context']"] if "ssl_context" in values["client_options"] else [])]
    if given and protocol not in {"SSL", "SASL_SSL"}:
        yield (
            f"{given[0]} is set but security_protocol={protocol!r} does not use TLS: set it to 'SSL' or 'SASL_SSL', "
            f"or leave {given[0]} out"
        )
    if files and len(given) > len(files):
        yield f"client_options['ssl_context'] replaces {', '.join(files)}: give one or the other"
    for name in files:
        if not Path(values[name]).is_file():
            yield f"{name}={values[name]!r} is no file that can be found: correct the path or mount the file"
    if values["ssl_keyfile"] is not None and values["ssl_certfile"] is None:
        yield "ssl_keyfile is set without ssl_certfile: name the certificate that the key belongs to"
    if values["ssl_password"] is not None and values["ssl_certfile"] is None:
        yield "ssl_password is set without ssl_certfile: name the certificate whose key it opens, or leave it out"


def _sasl(values: Mapping[str, Any]) -> Iterable[str]:
    protocol, mechanism = values["security_protocol"], values["sasl_mechanism"]
    given = [name for name in ("sasl_mechanism", "sasl_username", "sasl_password") if values[name] is not None]
    if protocol not in {"SASL_PLAINTEXT", "SASL_SSL"}:
        if given:
            yield (
                f"{given[0]} is set but security_protocol={protocol!r} does not use SASL: set it to 'SASL_SSL' (or "
                f"'SASL_PLAINTEXT', which sends passwords unencrypted), or leave {given[0]} out"
            )
        return
    if mechanism is None:
        yield f"security_protocol={protocol!r} needs sasl_mechanism: one of 'PLAIN', 'SCRAM-SHA-512' and others"
    elif mechanism in _WITH_PASSWORD:
        for name in ("sasl_username", "sasl_password"):
            if values[name] is None:
                yield f"sasl_mechanism={mechanism!r} needs {name}: set it, or AIOSHARD_{name.upper()}"
    else:
        for name in given[1:]:
            yield f"{name} is set but sasl_mechanism={mechanism!r} does not use it: leave it out"
    if mechanism == "OAUTHBEARER" and "sasl_oauth_token_provider" not in values["client_options"]:
        yield "sasl_mechanism='OAUTHBEARER' needs client_options={'sasl_oauth_token_provider': …}"


_RULES: tuple[Callable[[Mapping[str, Any]], Iterable[str]], ...] = (
    _membership,
    _draining,
    _options,
    _tls,
    _sasl,
)


def timeout_warnings(settings: Settings, timeouts: Iterable[tuple[str, float | None]]) -> list[str]:
    """What works but not as the numbers suggest: handlers that may run longer than we wait for them.

    Args:
        settings: The settings in effect.
        timeouts: Name and `timeout` (seconds) of each handler.
    """
    return [
        f"handler {name!r} may run for timeout={timeout:g} s but {limit}={getattr(settings, limit):g} s: {consequence}"
        for name, timeout in timeouts
        for limit, consequence in (
            ("drain_timeout", "a rebalance cancels runs that take longer, and their records run again"),
            ("shutdown_timeout", "stopping cancels runs that take longer, and their records run again"),
        )
        if timeout is not None and timeout > getattr(settings, limit)
    ]


def misspelled_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Sentences about variables that look like settings but are none.

    They are no errors: clusters make variables such as `AIOSHARD_PORT` by themselves, so only names
    close to a setting's are reported.
    """
    sentences = []
    for variable in sorted(os.environ if environment is None else environment):
        name = variable.lower().removeprefix(PREFIX.lower())
        if not variable.upper().startswith(PREFIX) or name in Settings.model_fields:
            continue
        meant = close_match(name, Settings.model_fields)
        if meant is not None:
            sentences.append(f"{variable} is not used; did you mean {PREFIX}{meant.upper()}?")
    return sentences
