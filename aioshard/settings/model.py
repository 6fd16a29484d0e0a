"""Every number and name that a user may set, with its default, unit and limits, in one place.

A setting comes from an argument, else from its environment variable (`AIOSHARD_` and the name in
capitals), else from the default below. What cannot work is refused with a sentence; nothing that is
set is ever ignored.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
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
from aioshard.settings import refusals
from aioshard.settings.by_hand import checked_assign

__all__ = ["PREFIX", "SettingDescription", "Settings"]

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
    room = refusals.room_to_drain(values) if values.keys() >= refusals.DRAIN_DEPENDS_ON else None
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
            sentences = refusals.contradictions(settings.__dict__, settings.model_fields_set)
            if not sentences:
                return settings
        raise SettingsError(refusals.together(sentences))

    @field_validator("bootstrap_servers", mode="before")
    @classmethod
    def _join_servers(cls, value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = ",".join(map(str, value))
        return refusals.checked_servers(value) if isinstance(value, str) else value

    @field_validator("assign", mode="before")
    @classmethod
    def _read_assign(cls, value: Any) -> Any:
        return None if value is None else checked_assign(value)

    @field_validator("journal", mode="before")
    @classmethod
    def _take_path(cls, value: Any) -> Any:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        return refusals.checked_directory(value) if isinstance(value, str) else value

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
        return refusals.unknown(name, settings.model_fields)
    value = detail["input"]
    variable = PREFIX + name.upper()
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    reason = reason.replace("expected greater", "it must be greater").replace("expected less", "it must be less")
    return refusals.out_of_range(
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
    return refusals.shown(field.get_default(call_default_factory=True))


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
