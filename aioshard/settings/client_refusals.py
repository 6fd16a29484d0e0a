"""Why a choice of client, group protocol or assignor is refused, in sentences that name the way out."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

__all__ = ["CONFLUENT_OWNED_OPTIONS", "client_contradictions", "confluent_option_refusals"]

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
