"""Every setting of an app, with its default, unit and limits.

A setting comes from an argument, from its environment variable (`AIOSHARD_` and the name in capitals), or from the
default below, in this order. Settings that cannot work are refused with the reason; none is ignored.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    Secret,
    SecretStr,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from aioshard.errors import SettingsError
from aioshard.records import TOPIC_NAME
from aioshard.timeouts import DEFAULTS, Timeouts, least_beside_drain

PREFIX = "AIOSHARD_"
"""Prefix of the environment variables."""

# Options of the clients ---------------------------------------------------------------

_COMMITS = "aioshard commits itself, and only finished records; committing by time loses records"
_PREFETCH = "use max_buffered_bytes, which bounds the prefetch too"
OWNED_OPTIONS: Mapping[str, str] = {
    "api_version": "aioshard uses the newest version of each request that a broker knows",
    "auto_commit_interval_ms": _COMMITS,
    "auto_offset_reset": "use auto_offset_reset",
    "bootstrap_servers": "use bootstrap_servers",
    "check_crcs": "aioshard checks the checksum of every batch",
    "client_id": "use client_id",
    "consumer_timeout_ms": "aioshard polls the client itself",
    "enable_auto_commit": _COMMITS,
    "exclude_internal_topics": "a pattern never matches the topics of Kafka itself",
    "fetch_max_bytes": _PREFETCH,
    "fetch_max_wait_ms": "use fetch_max_wait, in seconds",
    "group_id": "the group id is the first argument of App",
    "group_instance_id": "use group_instance_id",
    "heartbeat_interval_ms": "use heartbeat_interval, in seconds",
    "isolation_level": "use isolation_level",
    "key_deserializer": "decode record.key in the handler",
    "loop": "the app runs in the event loop that starts it",
    "max_partition_fetch_bytes": _PREFETCH,
    "max_poll_interval_ms": "slow handlers do not affect the group; stuck_after reports them",
    "max_poll_records": "use max_buffered_records",
    "metadata_max_age_ms": "use metadata_max_age, in seconds",
    "partition_assignment_strategy": "use assignor",
    "rebalance_timeout_ms": "use rebalance_timeout, in seconds",
    "request_timeout_ms": "each kind of request has its own limit; use commit_timeout for commits",
    "retry_backoff_ms": "the pauses between attempts grow by themselves",
    "sasl_mechanism": "use sasl_mechanism",
    "sasl_plain_password": "use sasl_password",
    "sasl_plain_username": "use sasl_username",
    "security_protocol": "use security_protocol",
    "session_timeout_ms": "use session_timeout, in seconds",
    "topics": "topics belong to handlers: @app.consume",
    "value_deserializer": "decode record.value in the handler",
}
"""Options of aiokafka that aioshard controls, each with the alternative."""
_NUMBERS = frozenset({"connections_max_idle_ms", "fetch_min_bytes"})
_TEXTS = frozenset({"client_rack", "group_remote_assignor", "sasl_kerberos_domain_name", "sasl_kerberos_service_name"})
CLIENT_OPTIONS = _NUMBERS | _TEXTS | {"sasl_oauth_token_provider", "ssl_context"}
"""Options that `client_options` accepts, under the names of aiokafka."""
_SHOWN_OPTIONS = _NUMBERS | _TEXTS
"""Options whose values may be shown. A list of harmless options, not of secret ones."""
_MASK = "*" * 10
"""Shown instead of a secret, as pydantic does."""

# Types --------------------------------------------------------------------------------


class _ClientOptions(dict[str, Any]):
    """Options of the client that never show secrets, even where the mapping is printed without the settings."""

    def __repr__(self) -> str:
        return repr(self.masked())

    def masked(self) -> dict[str, Any]:
        """Return the options for output; an object is shown as its type only, because its text may contain a secret."""
        masked = dict(self)
        for name, value in self.items():
            if not _may_be_shown(name, value):
                masked[name] = _MASK if isinstance(value, str | int | float) else f"<{type(value).__name__}>"
        return masked

    def wrapped(self) -> dict[str, Any]:
        """Return the options with those that may not be shown as secrets of pydantic."""
        wrapped = dict(self)
        for name, value in self.items():
            if not _may_be_shown(name, value):
                wrapped[name] = Secret(value)
        return wrapped


def _may_be_shown(name: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return True
    return isinstance(value, str | int | float) and name in _SHOWN_OPTIONS


def _read_client_options(options: dict[str, Any]) -> _ClientOptions:
    """Unwrap values that are secrets of pydantic: the client needs them as they are."""
    plain = _ClientOptions(options)
    for name, value in options.items():
        if isinstance(value, Secret | SecretStr):
            plain[name] = value.get_secret_value()
    return plain


_ASSIGNED = re.compile(r"(?P<topic>[^:,]+):(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")
_SERVER = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")


def _read_servers(value: object) -> object:
    """Join a list of addresses with commas, and check each."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        return value
    servers = [server.strip() for server in value.split(",")]
    matches = map(_SERVER.fullmatch, servers)
    if not all(match and 0 < int(match["port"] or 9092) <= 65_535 for match in matches):  # noqa: PLR2004 - highest port
        raise ValueError(
            "expected host:port without a scheme, several separated by commas; TLS and SASL are set with "
            "security_protocol"
        )
    return ",".join(servers)


def _read_json(value: object) -> object:
    """Parse text from the environment."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"it is not a JSON object ({error})") from None


def _read_assign(value: object) -> object:
    """Parse text such as `orders:0-2,payments:1`."""
    if not isinstance(value, str):
        return value
    assign: dict[str, list[int]] = {}
    for part in value.split(","):
        match = _ASSIGNED.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is not TOPIC:PARTITION or TOPIC:FIRST-LAST: expected text such as "
                "'orders:0-2,payments:1', or a mapping such as {'orders': [0, 1, 2]}"
            )
        numbers = range(int(match["first"]), int(match["last"] or match["first"]) + 1)
        assign.setdefault(match["topic"], []).extend(numbers)
    return assign


def _read_directory(value: object) -> object:
    if "://" in str(value):
        raise ValueError("expected a local directory, without a scheme")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), "seconds"]
Name = Annotated[str | None, Field(min_length=1, max_length=249)]
Topic = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
Partition = Annotated[int, Field(ge=0, lt=100_000, strict=True)]
Partitions = Annotated[
    tuple[Partition, ...], Field(min_length=1), AfterValidator(lambda numbers: tuple(sorted(set(numbers))))
]
Assign = Annotated[dict[Topic, Partitions] | None, Field(min_length=1), NoDecode, BeforeValidator(_read_assign)]
Assignor = Literal["range", "roundrobin", "sticky", "fair", "lag", "cooperative-fair", "cooperative-lag"]


class SettingsDict(TypedDict, total=False):
    """The settings that `App` accepts, for type checkers."""

    bootstrap_servers: str | Sequence[str] | None
    client_id: str | None
    group_instance_id: str | None
    group_protocol: Literal["auto", "classic", "consumer"]
    assignor: Assignor
    reassignment_delay: float
    balance_interval: float
    assign: Mapping[str, Iterable[int]] | str | None
    client_options: Mapping[str, Any]
    session_timeout: float
    heartbeat_interval: float
    rebalance_timeout: float
    commit_timeout: float
    drain_timeout: float | None
    start_timeout: float | None
    missing_output_topics: Literal["warn", "fail"]
    shutdown_timeout: float
    processing_guarantee: Literal["at_least_once", "exactly_once"]
    transaction_timeout: float
    commit_interval: float | None
    commit_records: int | None
    auto_offset_reset: Literal["earliest", "latest", "error"] | None
    isolation_level: Literal["read_committed", "read_uncommitted"]
    metadata_max_age: float
    fetch_max_wait: float
    max_buffered_records: int
    max_buffered_bytes: int
    tune_gc: bool
    processes: int | None
    stuck_after: float
    show_keys: bool
    show_payloads: bool
    journal: str | os.PathLike[str] | None
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
    ssl_cafile: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    ssl_password: SecretStr | str | None
    ssl_check_hostname: bool
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER"] | None
    sasl_username: str | None
    sasl_password: SecretStr | str | None


class Settings(BaseSettings):
    """The settings of an app: checked, frozen and complete.

    Timeouts that you do not set adapt to those that you set: only what you set can be refused.

    `Settings()` reads the environment; `Settings(_env_file=".env")` a file too, and
    `Settings(_secrets_dir="/run/secrets")` one file per setting, named like its variable in lower case. In all of them
    the text `none` stands for None, and an empty text for "not set".

    Raises:
        SettingsError: Values are unknown, out of range or contradict each other. The message lists all of them and
            contains no secret.

    Example:
        >>> settings = Settings(bootstrap_servers="localhost:9092", commit_interval=0.5)
        >>> settings.drain_timeout
        20.0
        >>> Settings(rebalance_timeout=18).drain_timeout
        9.0
        >>> Settings(session_timeout=45, heartbeat_interval=20)
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
    )

    # Brokers and group ------------------------------------------------------------------

    bootstrap_servers: Annotated[str | None, BeforeValidator(_read_servers)] = None
    """Addresses of some brokers: `host:port`, several separated by commas or as a list. Required to start."""
    client_id: Name = None
    """Name of the client in the brokers' logs and quotas; None is `aioshard`."""
    group_instance_id: Name = None
    """Makes this process a static member: restarting it within `session_timeout` moves no partition. Unique per
    process. If it ends permanently, its partitions stay unread for `session_timeout`."""
    group_protocol: Literal["auto", "classic", "consumer"] = "auto"
    """The group protocol. With `consumer` (KIP-848, Kafka 4.0) the brokers assign partitions, with `classic` a member
    does. `auto` is `consumer` where the brokers and the group accept it, and `classic` if a setting is given that only
    `classic` has: `assignor`, `session_timeout`, `heartbeat_interval`, `reassignment_delay` or `balance_interval`."""
    assignor: Assignor = "cooperative-fair"
    """Assigns partitions to members; all members of a group need the same. With a cooperative assignor, a rebalance
    stops only the partitions that move; with any other, it stops all."""
    reassignment_delay: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False), "seconds"] = 0.0
    """How long the partitions of a member that left or died wait, unread, for its replacement. 0 assigns them to other
    members immediately. For all assignors except `range`, `roundrobin` and `fair`."""
    balance_interval: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False), "seconds"] = 0.0
    """How often the leader of the group compares the backlogs of the members. It requests a rebalance if two checks in
    a row find unequal backlogs that a rebalance would even out. 0 never checks. For `lag` and `cooperative-lag`."""
    assign: Assign = None
    """Manual assignment, such as `{"orders": [0, 1, 2]}`, or as text `orders:0-2,payments:1`: the app does not join the
    group, still uses its commits, and never loses a partition. None: the group assigns partitions."""
    client_options: Annotated[
        dict[str, Any], NoDecode, BeforeValidator(_read_json), AfterValidator(_read_client_options)
    ] = Field(default_factory=dict)
    """Further options of the client, under the names and units of aiokafka. In the environment: one JSON object. Values
    of options that may be secret are masked in all output."""

    # Membership -----------------------------------------------------------------------

    session_timeout: Seconds = DEFAULTS["session_timeout"]
    """A member of the classic protocol without a heartbeat for this long loses its partitions; at least 3 times
    `heartbeat_interval`."""
    heartbeat_interval: Seconds = DEFAULTS["heartbeat_interval"]
    """Time between heartbeats of the classic protocol, and so the delay until a member learns of a rebalance."""
    rebalance_timeout: Seconds = DEFAULTS["rebalance_timeout"]
    """How long the group waits for a member to release its partitions."""
    commit_timeout: Seconds = DEFAULTS["commit_timeout"]
    """Timeout of one commit request."""
    drain_timeout: Seconds = DEFAULTS["drain_timeout"]
    """How long records in flight may take to finish when partitions are revoked. `drain_timeout` + `commit_timeout` +
    `heartbeat_interval` must be less than `rebalance_timeout`. None: 20 s, or less if that does not fit."""

    # Start, stop, commit --------------------------------------------------------------

    start_timeout: Annotated[float | None, Field(gt=0, allow_inf_nan=False), "seconds"] = 10.0
    """The start fails if no broker answers within this time, or if a topic does not exist. Once a broker has answered,
    the start waits for an outage or a rebalance to end. None starts immediately, also without brokers, and keeps
    trying; the app is not ready until it has joined the group."""
    missing_output_topics: Literal["warn", "fail"] = "warn"
    """Whether a start without a topic for results or dead letters, which the brokers do not create on demand, only
    warns or fails after `start_timeout`. The warning is followed by a finding until the topic exists. With
    `start_timeout=None` no start fails."""
    shutdown_timeout: Seconds = 25.0
    """How long stopping may take, from the request to the last commit. Kubernetes kills after 30 s."""
    processing_guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"
    """With `exactly_once`, the messages that a handler publishes for a record, its dead letter and the group's offsets
    become visible in one transaction. It covers Kafka to Kafka only."""
    transaction_timeout: Seconds = DEFAULTS["transaction_timeout"]
    """After how long the brokers abort a transaction whose process has died; must exceed `drain_timeout` +
    `commit_timeout`. Until then, readers of its topics and the next owner of its partitions wait. Used with
    `exactly_once`."""
    commit_interval: Seconds = 1.0
    """Longest time between commits while records complete. After a crash, records since the last commit run again.
    None: 1 s, or 0.1 s with `exactly_once`, where a commit makes messages visible."""
    commit_records: Annotated[int | None, Field(ge=1), "records"] = 500
    """Commit sooner: after this many completed records, and right after the first ones of a newly assigned partition.
    A pause between such commits limits their cost to a few percent of a core. None: only every `commit_interval`. Not
    used with `exactly_once`."""
    auto_offset_reset: Literal["earliest", "latest", "error"] | None = None
    """Where a group without committed offsets begins. None refuses to start then: `latest` skips records and `earliest`
    repeats them, so you must choose. A position that the log no longer holds is replaced by the start of the log;
    `error` ends the app instead."""

    # Reading --------------------------------------------------------------------------

    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """Whether records of open and aborted transactions are skipped."""
    metadata_max_age: Seconds = 30.0
    """How often metadata is refreshed; new topics and partitions are found within this time."""
    fetch_max_wait: Annotated[float, Field(gt=0, le=30, allow_inf_nan=False), "seconds"] = 0.1
    """How long a broker may hold a fetch that has no records to return; at most 30. Unless you set it, the client
    waits longer, up to 0.5 s, while hundreds of partitions are idle."""
    max_buffered_records: Annotated[int, Field(ge=1), "records"] = 10_000
    """Maximum number of incomplete records in memory, over all partitions of the process."""
    max_buffered_bytes: Annotated[int, Field(ge=1), "bytes"] = 64 * 1024 * 1024
    """Maximum size of these records; each counts as its bytes + 500. The client prefetches up to half as much in
    addition."""
    tune_gc: bool = True
    """Whether `App.run` and `aioshard run` make Python's garbage collector run less often, which saves up to a tenth
    of the CPU. `App.serve` and a lifespan never change it, because the process does other work too."""
    processes: Annotated[int | None, Field(ge=1), "processes"] = None
    """Worker processes of the app, for handlers with `run_in="process"`. None: one for each core that it may use."""

    # Observability --------------------------------------------------------------------

    stuck_after: Seconds = 60.0
    """The logs and `/livez` findings report records that stay incomplete for longer."""
    show_keys: bool = False
    """Whether keys appear in logs, explanations and the journal; otherwise they are hashed."""
    show_payloads: bool = False
    """Whether the dashboard shows the payloads of dead letters and parked records."""
    journal: Annotated[str | None, BeforeValidator(_read_directory)] = None
    """Directory for Parquet files with the outcome of each record; None writes none. Needs the extra `journal`."""

    # TLS and SASL ---------------------------------------------------------------------

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How connections are secured."""
    ssl_cafile: str | None = None
    """Certificate authorities (PEM) for the brokers' certificates; None uses the system's."""
    ssl_certfile: str | None = None
    """Client certificate (PEM) for mutual TLS; it may contain the key."""
    ssl_keyfile: str | None = None
    """Private key (PEM) of `ssl_certfile`."""
    ssl_password: SecretStr | None = None
    """Password of `ssl_keyfile`."""
    ssl_check_hostname: bool = True
    """Whether a broker's certificate must match its host name."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER"] | None = None
    """Authentication mechanism for the two SASL protocols."""
    sasl_username: str | None = None
    """User name, for PLAIN and SCRAM."""
    sasl_password: SecretStr | None = None
    """Password of the user."""

    # Validation -----------------------------------------------------------------------

    @field_validator("drain_timeout", "commit_interval", mode="before")
    @classmethod
    def _read_none(cls, value: object, info: ValidationInfo) -> object:
        """Read None, which stands for the default that `_adapt` computes."""
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_with_reasons(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Raised outside of `except`: the original error, which holds the values, must not be its context.
        settings: Self | None = None
        try:
            settings = handler(values)
        except ValidationError as error:
            reasons = [_reason(detail) for detail in error.errors()]
        else:
            if isinstance(values, Mapping):
                settings.model_fields_set.difference_update(name for name in _COMPUTED if values.get(name, 0) is None)
            _adapt(settings)
            reasons = list(_contradictions(settings))
        reasons += _removed_variables()
        if settings is not None and not reasons:
            return settings
        heading = [f"{len(reasons)} settings were refused:"] if len(reasons) > 1 else []
        raise SettingsError("\n  - ".join([*heading, *reasons]))

    @field_serializer("client_options")
    def _mask_options(self, options: dict[str, Any], info: SerializationInfo) -> dict[str, Any]:
        own = _ClientOptions(options)
        # `model_dump()` keeps the values, as it does for a SecretStr, so that its result still makes the same settings.
        return own.masked() if info.mode == "json" else own.wrapped()

    # Use ------------------------------------------------------------------------------

    def replace(self, **overrides: Any) -> Self:
        """Return the same settings with *overrides*, checked again as a whole.

        Settings that were not set explicitly are read from the environment and computed again.

        Raises:
            SettingsError: The result cannot work.
        """
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | overrides)

    @property
    def classic_settings(self) -> tuple[str, ...]:
        """The names of the settings that were given, and that only the classic group protocol has."""
        given = [name for name in _CLASSIC_TIMES if name in self.model_fields_set]
        return (*given, *(name for name in _CLASSIC_BALANCE if getattr(self, name)))

    def require_bootstrap_servers(self) -> str:
        """Return the brokers' addresses, separated by commas.

        Raises:
            SettingsError: None are set.
        """
        if self.bootstrap_servers is None:
            raise SettingsError(
                "bootstrap_servers is not set: name at least one broker, for example "
                f"bootstrap_servers='localhost:9092', {PREFIX}BOOTSTRAP_SERVERS=localhost:9092 or, for a command, "
                "--bootstrap-servers localhost:9092"
            )
        return self.bootstrap_servers

    def asdict(self) -> dict[str, Any]:
        """Return every setting, ready for JSON; secrets are masked."""
        return self.model_dump(mode="json")


_CLASSIC_TIMES = ("assignor", "session_timeout", "heartbeat_interval")
_CLASSIC_BALANCE = ("reassignment_delay", "balance_interval")


# Timeouts -----------------------------------------------------------------------------


def _timeouts(settings: Settings) -> Timeouts:
    return Timeouts(_given(settings, *DEFAULTS), exactly_once=settings.processing_guarantee == "exactly_once")


def _given(settings: Settings, *names: str) -> dict[str, float]:
    """Return those of the timeouts that are set."""
    return {name: getattr(settings, name) for name in names if name in settings.model_fields_set}


def _adapt(settings: Settings) -> None:
    """Replace defaults by values that fit the settings that are set."""
    adapted: dict[str, object] = {**_timeouts(settings).fitting()}
    if "commit_interval" not in settings.model_fields_set and settings.processing_guarantee == "exactly_once":
        adapted["commit_interval"] = 0.1
    for name, value in adapted.items():
        object.__setattr__(settings, name, value)  # nobody has the settings yet: later they are frozen


# Refusals of single settings ----------------------------------------------------------

_COMPUTED = {
    "drain_timeout": "20, or less",
    "commit_interval": "1, or 0.1 with exactly_once",
}
"""Defaults that depend on other settings; None stands for them too."""
_REMOVED = {
    "client": "aioshard has one Kafka client, which has both group protocols and exactly-once processing; remove the "
    "setting, and librdkafka's options from client_options",
}
"""Settings of former versions, each with the reason and the advice."""
_SECRET = frozenset({"client_options", "sasl_password", "ssl_password"})
_ADDRESSES = frozenset({"bootstrap_servers", "journal"})
_CREDENTIALS = re.compile(r"[@=;?]")
"""Characters of an address with credentials, such as `sasl://user:password@host` or a connection string."""


def default_of(name: str) -> str:
    """Return the default of a setting, as in Python code."""
    if name in _COMPUTED:
        return _COMPUTED[name]
    default = Settings.model_fields[name].get_default(call_default_factory=True)
    if isinstance(default, float):
        return f"{default:g}"
    return repr(default)


def unit_of(name: str) -> str | None:
    """Return the unit of a setting; None if it has none."""
    return next((unit for unit in Settings.model_fields[name].metadata if isinstance(unit, str)), None)


def _reason(detail: ErrorDetails) -> str:
    """Return the sentence that explains why pydantic refused a value."""
    name = str(detail["loc"][0])
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        return _unknown(name, value)
    variable = PREFIX + name.upper()
    is_from_environment = isinstance(value, str) and os.environ.get(variable) == value
    source = variable if is_from_environment else name
    is_secret = name in _SECRET or (name in _ADDRESSES and _CREDENTIALS.search(str(value)) is not None)
    given = "***" if is_secret else repr(value)
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    default = "" if default_of(name) == "None" else f" (default: {default_of(name)})"
    return f"{source}={given} is refused: {reason}{default}"


def _unknown(name: str, value: object) -> str:
    option = name.lower().replace(".", "_")
    setting = option.removeprefix(PREFIX.lower())
    if setting in _REMOVED:
        return _removed(setting, name, value)
    if option in OWNED_OPTIONS:
        return f"{name!r} is not a setting: {OWNED_OPTIONS[option]}"
    if option in CLIENT_OPTIONS:
        return f"{name!r} is not a setting but an option of the client: put it into client_options"
    meant = _close_match(setting, Settings.model_fields)
    advice = "aioshard.Settings lists all of them" if meant is None else f"did you mean {meant!r}?"
    return f"{name!r} is not a setting: {advice}"


def _removed(setting: str, source: str, value: object) -> str:
    return f"{source}={value!r} is not a setting any more: {_REMOVED[setting]}"


def _removed_variables() -> Iterator[str]:
    """Refuse variables of settings that were removed: ignored, they would change how the app works in silence."""
    for setting in _REMOVED:
        variable = PREFIX + setting.upper()
        value = os.environ.get(variable)
        if value:
            yield _removed(setting, variable, value)


def _close_match(word: str, words: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.7)), None)


# Contradictions -----------------------------------------------------------------------


def _contradictions(settings: Settings) -> Iterator[str]:
    """Iterate over the reasons why valid settings do not fit together."""
    if settings.assign is None:
        yield from _check_group(settings)
        yield from _check_timeouts(settings)
    else:
        yield from _check_manual_assignment(settings)
    if settings.processing_guarantee == "exactly_once":
        yield from _check_exactly_once(settings)
    yield from _check_client_options(settings)
    yield from _check_remote_assignor(settings)
    yield from _check_tls(settings)
    yield from _check_sasl(settings)


def _check_manual_assignment(settings: Settings) -> Iterator[str]:
    """Refuse settings that only a member of a group has."""
    unset = {
        "group_instance_id": None,
        "reassignment_delay": 0.0,
        "balance_interval": 0.0,
    }
    names = settings.model_fields_set & {"assignor", "session_timeout", "heartbeat_interval", "rebalance_timeout"}
    if "group_protocol" in settings.model_fields_set and settings.group_protocol != "auto":
        names.add("group_protocol")
    names |= {name for name, default in unset.items() if getattr(settings, name) != default}
    for name in sorted(names):
        yield (
            f"{name}={getattr(settings, name)!r} has no effect with assign, because the app does not join the group: "
            f"remove {name}, or remove assign to join the group"
        )


def _check_group(settings: Settings) -> Iterator[str]:
    """Refuse combinations of group protocol and assignor that do not exist."""
    if settings.group_protocol == "consumer":
        yield from _check_consumer_protocol(settings)
    yield from _check_assignor(settings)
    instance = settings.group_instance_id
    if instance is not None and not TOPIC_NAME.fullmatch(instance):
        yield f"group_instance_id={instance!r} is refused: Kafka allows letters, digits, '.', '_' and '-' only"


def _check_consumer_protocol(settings: Settings) -> Iterator[str]:
    """Refuse settings that are the broker's under KIP-848."""
    given = _given(settings, "session_timeout", "heartbeat_interval")
    if given:
        has, it = ("have", "them") if len(given) > 1 else ("has", "it")
        times = " ".join(f"--{name.replace('_', '-')} {value:.10g}" for name, value in given.items())
        yield (
            f"{_listed(given)} {has} no effect under group_protocol='consumer', where the brokers keep the times of "
            f"the group: remove {it} here, and run `aioshard group configure GROUP {times}`"
        )
    if "assignor" in settings.model_fields_set:
        yield (
            f"assignor={settings.assignor!r} has no effect under group_protocol='consumer', where the broker assigns "
            "partitions: use client_options={'group_remote_assignor': …}"
        )


def _check_assignor(settings: Settings) -> Iterator[str]:
    """Refuse settings that need another assignor."""
    assignor = settings.assignor
    by_broker = settings.group_protocol == "consumer"
    if settings.reassignment_delay and (by_broker or assignor in {"range", "roundrobin", "fair"}):
        yield (
            f"reassignment_delay={settings.reassignment_delay:g} s has no effect here: only 'sticky', 'lag' "
            "and the cooperative assignors of group_protocol='classic' know the previous owners; "
            "set assignor='cooperative-fair', or remove it"
        )
    if settings.balance_interval and (by_broker or not assignor.endswith("lag")):
        yield (
            f"balance_interval={settings.balance_interval:g} s has no effect here: only 'lag' and 'cooperative-lag' "
            "of group_protocol='classic' balance backlogs; set assignor='cooperative-lag', or remove it"
        )


def _check_exactly_once(settings: Settings) -> Iterator[str]:
    """Refuse settings that transactions do not support."""
    setting = "processing_guarantee='exactly_once'"
    if settings.assign is not None:
        yield f"{setting} needs a consumer group, which fences the transactions of stale members: remove assign"
    timeout = settings.transaction_timeout
    parts = _given(settings, "drain_timeout", "commit_timeout")
    if timeout <= settings.drain_timeout + settings.commit_timeout:
        together = " together" if len(parts) > 1 else ""
        yield (
            f"transaction_timeout={timeout:g} s is not longer than {_listed(parts)}{together}: the brokers could abort "
            f"the last transaction of a rebalance; raise it above {sum(parts.values()):g} s"
        )


def _check_timeouts(settings: Settings) -> Iterator[str]:
    """Refuse timeouts that contradict each other. Those that are not set fit, so they are not named."""
    yield from _check_session(settings)
    yield from _check_drain(settings)


def is_too_short(session: float, heartbeat: float) -> bool:
    """Return whether a session has no time for three heartbeats: a late one could cost a member its partitions."""
    return session < 3 * heartbeat and not math.isclose(session, 3 * heartbeat)  # 3 * 0.1 is more than 0.3


def _check_session(settings: Settings) -> Iterator[str]:
    session = settings.session_timeout
    heartbeat = settings.heartbeat_interval
    if is_too_short(session, heartbeat):
        yield (
            f"session_timeout={session:g} s is less than 3 times heartbeat_interval={heartbeat:g} s: one late "
            f"heartbeat would cost the app its partitions; raise session_timeout to {3 * heartbeat:g} s or lower "
            f"heartbeat_interval to {session / 3:.3g} s"
        )


def _check_drain(settings: Settings) -> Iterator[str]:
    """Refuse a drain that, with the last commits and a heartbeat, outlasts a rebalance."""
    drain = settings.drain_timeout
    heartbeat = settings.heartbeat_interval
    rebalance = settings.rebalance_timeout
    commits = _timeouts(settings).commits
    parts = _given(settings, "commit_timeout", "heartbeat_interval")
    least = least_beside_drain(rebalance)
    left = rebalance - drain
    are_set = parts.keys() >= {"commit_timeout", "heartbeat_interval"}
    if "drain_timeout" in settings.model_fields_set and not are_set and 0 < left < least:
        yield (
            f"drain_timeout={drain:g} s leaves {left:g} s of rebalance_timeout={rebalance:g} s for the last commit and "
            f"a heartbeat, which need at least {least:g} s: lower it to {rebalance - least:g} s or less, or raise "
            "rebalance_timeout"
        )
        return
    if drain + commits * settings.commit_timeout + heartbeat < rebalance:
        return
    taken = parts.get("heartbeat_interval", 0.0) + commits * parts.get("commit_timeout", 0.0)
    others = _listed(parts)
    if commits > 1 and "commit_timeout" in parts:
        others = f"{commits} times {others}"
    if "drain_timeout" not in settings.model_fields_set:
        yield (
            f"rebalance_timeout={rebalance:g} s leaves no time to drain: {taken:g} s of it are for {others}; raise "
            f"rebalance_timeout well above {taken:g} s or lower {' and '.join(parts)}"
        )
        return
    room = rebalance - taken
    advice = f"lower it below {room:g} s or " if room > 0 else ""
    with_others = f"with {others} " if parts else ""
    yield (
        f"drain_timeout={drain:g} s does not fit: {with_others}it is not less than "
        f"rebalance_timeout={rebalance:g} s, and the group would remove the app during the drain; {advice}raise "
        f"rebalance_timeout above {drain + taken:g} s"
    )


def _listed(timeouts: Mapping[str, float]) -> str:
    return " and ".join(f"{name}={value:g} s" for name, value in timeouts.items())


def _check_client_options(settings: Settings) -> Iterator[str]:
    yield from _check_values(settings.client_options)
    for name in settings.client_options:
        option = name.replace(".", "_")
        if option in OWNED_OPTIONS:
            yield f"client_options has {name!r}, which is refused: {OWNED_OPTIONS[option]}"
        elif name not in CLIENT_OPTIONS:
            yield (
                f"client_options has {name!r}, which the client does not know: "
                f"it takes {', '.join(sorted(CLIENT_OPTIONS))}"
            )


def _check_values(options: Mapping[str, Any]) -> Iterator[str]:
    """Refuse values of options that the client cannot use; it checks objects itself."""
    for name, value in options.items():
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name in _NUMBERS and not is_number:
            yield f"client_options[{name!r}]={value!r} is refused: it should be a whole number above 0"
        if name in _TEXTS and not (value is None or isinstance(value, str)):
            yield f"client_options[{name!r}]={value!r} is refused: it should be text"


def _check_remote_assignor(settings: Settings) -> Iterator[str]:
    if "group_remote_assignor" not in settings.client_options or settings.group_protocol == "consumer":
        return
    if settings.group_protocol == "classic":
        yield (
            "client_options has 'group_remote_assignor', which has no effect under group_protocol='classic', where a "
            "member assigns partitions: use assignor, or group_protocol='consumer'"
        )
    elif settings.classic_settings:
        yield (
            "client_options has 'group_remote_assignor', which only group_protocol='consumer' has, but only 'classic' "
            f"has {' and '.join(settings.classic_settings)}: remove one or the other"
        )


def _check_tls(settings: Settings) -> Iterator[str]:
    paths = [(name, getattr(settings, name)) for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile")]
    files = {name: path for name, path in paths if path is not None}
    given = list(files)
    if "ssl_context" in settings.client_options:
        if given:
            yield f"client_options['ssl_context'] replaces {', '.join(given)}: use one or the other"
        given.append("client_options['ssl_context']")
    if given and settings.security_protocol not in {"SSL", "SASL_SSL"}:
        yield (
            f"{given[0]} is set but security_protocol={settings.security_protocol!r} does not use TLS: set it to 'SSL' "
            f"or 'SASL_SSL', or remove {given[0]}"
        )
    for name, path in files.items():
        if not Path(path).is_file():
            yield f"{name}={path!r} does not exist or is not a file: correct the path or mount the file"
    if settings.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_password"):
            if getattr(settings, name) is not None:
                yield f"{name} is set without ssl_certfile: set ssl_certfile too, or remove {name}"


def _check_sasl(settings: Settings) -> Iterator[str]:
    protocol = settings.security_protocol
    mechanism = settings.sasl_mechanism
    options = ("sasl_mechanism", "sasl_username", "sasl_password")
    given = [name for name in options if getattr(settings, name) is not None]
    if protocol not in {"SASL_PLAINTEXT", "SASL_SSL"}:
        if given:
            yield (
                f"{given[0]} is set but security_protocol={protocol!r} does not use SASL: set it to 'SASL_SSL' (or "
                f"'SASL_PLAINTEXT', which sends passwords unencrypted), or remove {given[0]}"
            )
    elif mechanism is None:
        yield f"security_protocol={protocol!r} needs sasl_mechanism: one of 'PLAIN', 'SCRAM-SHA-512' and others"
    elif mechanism in {"GSSAPI", "OAUTHBEARER"}:
        for name in given[1:]:
            yield f"{name} is set but sasl_mechanism={mechanism!r} does not use it: remove it"
        if mechanism == "OAUTHBEARER" and "sasl_oauth_token_provider" not in settings.client_options:
            yield "sasl_mechanism='OAUTHBEARER' needs client_options={'sasl_oauth_token_provider': …}"
    else:
        for name in options:
            if name not in given:
                yield f"sasl_mechanism={mechanism!r} needs {name}: set it, or AIOSHARD_{name.upper()}"


# Warnings -----------------------------------------------------------------------------


def timeout_warnings(settings: Settings, timeouts: Iterable[tuple[str, float | None]]) -> list[str]:
    """Return warnings about handlers that may run longer than a drain or a shutdown waits.

    Args:
        settings: The settings in effect.
        timeouts: Name and `timeout` (seconds) of each handler.
    """
    limits = (
        ("drain_timeout", settings.drain_timeout, "a rebalance"),
        ("shutdown_timeout", settings.shutdown_timeout, "stopping"),
    )
    warnings = []
    for name, timeout in timeouts:
        for limit_name, limit, event in limits:
            if timeout is not None and timeout > limit:
                warnings.append(
                    f"handler {name!r} may run for timeout={timeout:g} s but {limit_name}={limit:g} s: {event} "
                    "cancels runs that take longer, and their records run again"
                )
    return warnings


def misspelled_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return warnings about environment variables with names close to a setting's.

    They are not refused: Kubernetes sets variables such as `AIOSHARD_PORT` for a service named `aioshard`.
    """
    variables = sorted(os.environ if environment is None else environment)
    names = {name: name[len(PREFIX) :].lower() for name in variables if name.upper().startswith(PREFIX)}
    return [
        f"{variable} is not used; did you mean {PREFIX}{meant.upper()}?"
        for variable, name in names.items()
        if name not in Settings.model_fields and (meant := _close_match(name, Settings.model_fields))
    ]
