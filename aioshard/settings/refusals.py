"""Why a setting is refused, in sentences that name the value, the limit and the way out.

Plain functions of plain values: `aioshard.settings.model` gives them what was found. No sentence contains
a secret, and no value of `client_options` or of an unknown name, which may be one.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aioshard.settings.by_hand import by_hand_contradictions
from aioshard.settings.client_refusals import client_contradictions, confluent_option_refusals

__all__ = [
    "CLIENT_OPTIONS",
    "DRAIN_DEPENDS_ON",
    "OWNED_OPTIONS",
    "checked_directory",
    "checked_servers",
    "close_match",
    "contradictions",
    "out_of_range",
    "room_to_drain",
    "shown",
    "together",
    "unknown",
]

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

_COMMITS = "aioshard commits itself, and only what is finished; committing by time loses records"
_PREFETCH = "use max_buffered_bytes, which bounds the prefetch too"
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
