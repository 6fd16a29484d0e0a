"""Settings: their sources, refusals and messages."""

import inspect
import json
import math
import os
import pickle
import pprint
import ssl
import sys
from pathlib import Path
from typing import Any

import aiokafka
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.errors import AioshardError, SettingsError
from aioshard.settings import (
    CLIENT_OPTIONS,
    OWNED_OPTIONS,
    Settings,
    default_of,
    misspelled_variables,
    timeout_warnings,
    unit_of,
)
from aioshard.timeouts import DEFAULTS, least_beside_drain
from tests.project.docs.tables import descriptions


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.upper().startswith("AIOSHARD_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def pem(tmp_path: Path) -> str:
    path = tmp_path / "file.pem"
    path.write_text("a certificate")
    return str(path)


CONSUMER: dict[str, Any] = {"group_protocol": "consumer"}


def refusal(**values: Any) -> str:
    """The message with which the values are refused."""
    with pytest.raises(SettingsError) as caught:
        Settings(**values)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "the original error holds the values, secrets too"
    return str(caught.value)


# Sources of a value


def test_defaults_are_the_documented_ones() -> None:
    settings = Settings()
    expected = {
        "session_timeout": 45.0,
        "heartbeat_interval": 3.0,
        "rebalance_timeout": 60.0,
        "drain_timeout": 20.0,
        "shutdown_timeout": 25.0,
        "start_timeout": 10.0,
        "commit_interval": 1.0,
        "commit_timeout": 5.0,
        "auto_offset_reset": None,
        "isolation_level": "read_committed",
        "metadata_max_age": 30.0,
        "max_buffered_records": 10_000,
        "max_buffered_bytes": 64 * 1024 * 1024,
        "fetch_max_wait": 0.1,
        "stuck_after": 60.0,
        "show_keys": False,
        "show_payloads": False,
        "journal": None,
    }
    assert {name: getattr(settings, name) for name in expected} == expected


def test_argument_overrides_variable_overrides_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_COMMIT_INTERVAL", "0.5")
    monkeypatch.setenv("AIOSHARD_STUCK_AFTER", "7")
    settings = Settings(commit_interval=0.25)
    assert (settings.commit_interval, settings.stuck_after, settings.commit_timeout) == (0.25, 7.0, 5.0)


def test_the_text_none_is_none_and_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_START_TIMEOUT", "none")
    monkeypatch.setenv("AIOSHARD_COMMIT_INTERVAL", "")
    settings = Settings()
    assert settings.start_timeout is None
    assert settings.commit_interval == 1.0


def test_client_options_are_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_CLIENT_OPTIONS", '{"fetch_min_bytes": 9}')
    assert Settings().client_options == {"fetch_min_bytes": 9}
    monkeypatch.setenv("AIOSHARD_CLIENT_OPTIONS", "fetch_min_bytes=9")
    assert "AIOSHARD_CLIENT_OPTIONS=*** is refused: it is not a JSON object" in refusal()


def test_dotenv_file_and_secrets_directory_are_read(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("AIOSHARD_STUCK_AFTER=9\nOTHER_PROGRAM=1\n")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "aioshard_client_id").write_text("from-a-file")
    settings = Settings(_env_file=dotenv, _secrets_dir=secrets)
    assert (settings.stuck_after, settings.client_id) == (9.0, "from-a-file")
    dotenv.write_text("AIOSHARD_STUCK_AFTR=9\n")
    assert "did you mean 'stuck_after'?" in refusal(_env_file=dotenv)


@pytest.mark.parametrize(
    ("given_servers", "expected"),
    [
        ("localhost:9092", "localhost:9092"),
        (["a:1", "b:2"], "a:1,b:2"),
        (("a:1",), "a:1"),
        ("a:1, b:2", "a:1,b:2"),
        ("[::1]:9092", "[::1]:9092"),
        ("broker.example", "broker.example"),
    ],
)
def test_bootstrap_servers_become_one_text(given_servers: object, expected: str) -> None:
    assert Settings(bootstrap_servers=given_servers).bootstrap_servers == expected


@pytest.mark.parametrize("servers", ["", "a:1,", "kafka://a:1", "a:0", "a:65536", "a:b", "a b:1", 5, ["a:x"]])
def test_bootstrap_servers_that_cannot_be_addresses_are_refused(servers: object) -> None:
    assert "bootstrap_servers=" in refusal(bootstrap_servers=servers)


def test_missing_bootstrap_servers_are_refused_when_they_are_needed() -> None:
    assert Settings(bootstrap_servers="a:1").require_bootstrap_servers() == "a:1"
    with pytest.raises(SettingsError, match="AIOSHARD_BOOTSTRAP_SERVERS=localhost:9092"):
        Settings().require_bootstrap_servers()


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().commit_interval = 2.0  # type: ignore[misc]


def test_replace_validates_everything_and_recomputes() -> None:
    settings = Settings(commit_interval=0.5, sasl_password="hunter2", sasl_username="u", sasl_mechanism="PLAIN",
                        security_protocol="SASL_SSL")  # fmt: skip
    replaced = settings.replace(rebalance_timeout=18)
    assert replaced.commit_interval == 0.5
    assert replaced.sasl_password is not None
    assert replaced.sasl_password.get_secret_value() == "hunter2"
    assert settings.drain_timeout == 20.0
    assert replaced.drain_timeout == pytest.approx(0.9 * (18 - 5 - 3))
    with pytest.raises(SettingsError, match="session_timeout=1 s"):
        settings.replace(session_timeout=1, heartbeat_interval=1)


def test_settings_survive_pickling() -> None:
    settings = Settings(commit_interval=0.5)
    assert pickle.loads(pickle.dumps(settings)) == settings


# Refusals


def test_unknown_names_suggest_the_nearest_name() -> None:
    assert "did you mean 'session_timeout'?" in refusal(sesion_timeout=30)
    assert "the group id is the first argument of App" in refusal(group_id="billing")
    assert "use session_timeout, in seconds" in refusal(session_timeout_ms=30_000)
    assert "put it into client_options" in refusal(client_rack="here")
    assert "aioshard.Settings lists all" in refusal(zzz=1)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("session_timeout", -1, "greater than 0"),
        ("commit_interval", 0, "greater than 0"),
        ("commit_timeout", float("nan"), "finite"),
        ("stuck_after", float("inf"), "finite"),
        ("start_timeout", 0, "greater than 0"),
        ("fetch_max_wait", 31, "less than or equal to 30"),
        ("max_buffered_records", 0, "greater than or equal to 1"),
        ("max_buffered_records", 1.5, "integer"),
        ("max_buffered_bytes", -5, "greater than or equal to 1"),
        ("metadata_max_age", "soon", "number"),
        ("auto_offset_reset", "smallest", "'earliest', 'latest' or 'error'"),
        ("isolation_level", "committed", "'read_committed'"),
        ("client_id", "", "at least 1 character"),
        ("show_keys", "perhaps", "boolean"),
        ("client_options", [1], "dictionary"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_the_limit(name: str, value: object, limit: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name}=")
    assert limit in message
    assert ("(default: " in message) == (default_of(name) != "None")


@pytest.mark.parametrize("client", ["confluent", "aiokafka"])
def test_the_former_choice_of_a_client_is_refused(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignored, it would move an app to another client in silence."""
    advice = "is not a setting any more: aioshard has one Kafka client"
    assert refusal(client=client).startswith(f"client={client!r} {advice}")
    with pytest.raises(SettingsError, match=advice):
        Settings().replace(client=client)
    dotenv = tmp_path / ".env"
    dotenv.write_text(f"AIOSHARD_CLIENT={client}\n")
    assert f"client={client!r} {advice}" in refusal(_env_file=dotenv)
    monkeypatch.setenv("AIOSHARD_CLIENT", client)
    assert refusal().startswith(f"AIOSHARD_CLIENT={client!r} {advice}")
    assert refusal(session_timeout=-1).startswith("2 settings were refused:")
    monkeypatch.setenv("AIOSHARD_CLIENT", "")
    assert Settings().group_protocol == "auto", "an empty variable is unset"


def test_a_refused_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_COMMIT_TIMEOUT", "5s")
    assert refusal().startswith("AIOSHARD_COMMIT_TIMEOUT='5s' is refused: ")


def test_several_refusals_are_all_listed() -> None:
    message = refusal(session_timeout=-1, commit_timeout="x", foo=1)
    assert message.startswith("3 settings were refused:\n  - ")
    assert all(name in message for name in ("session_timeout=-1", "commit_timeout='x'", "'foo'"))
    assert "drain_timeout" not in message, "it is computed from them"


def test_several_contradictions_are_all_listed() -> None:
    message = refusal(
        session_timeout=5, heartbeat_interval=3, rebalance_timeout=7, drain_timeout=8, sasl_mechanism="PLAIN"
    )
    assert message.startswith("3 settings were refused:")


def test_session_shorter_than_three_heartbeats_is_refused() -> None:
    assert Settings(session_timeout=9, heartbeat_interval=3).session_timeout == 9.0
    message = refusal(session_timeout=8.9, heartbeat_interval=3)
    assert "session_timeout=8.9 s is less than 3 times heartbeat_interval=3 s" in message
    assert "raise session_timeout to 9 s or lower heartbeat_interval to 2.97 s" in message


def test_drain_timeout_that_does_not_fit_the_rebalance_is_refused() -> None:
    assert Settings(drain_timeout=51.9).drain_timeout == 51.9
    message = refusal(drain_timeout=52, commit_timeout=5, heartbeat_interval=3, rebalance_timeout=60)
    assert "drain_timeout=52 s does not fit" in message
    assert "lower it below 52 s or raise rebalance_timeout above 60 s" in message


def test_rebalance_timeout_without_time_to_drain_is_refused() -> None:
    message = refusal(rebalance_timeout=8, commit_timeout=5, heartbeat_interval=3)
    assert "rebalance_timeout=8 s leaves no time to drain" in message
    assert "raise rebalance_timeout well above 8 s" in message


@given(
    rebalance=st.floats(min_value=0.01, max_value=10_000),
    commit=st.floats(min_value=0.001, max_value=1_000),
    heartbeat=st.floats(min_value=0.001, max_value=15),
)
def test_a_computed_drain_timeout_always_fits(rebalance: float, commit: float, heartbeat: float) -> None:
    values: dict[str, Any] = {"rebalance_timeout": rebalance, "commit_timeout": commit, "heartbeat_interval": heartbeat}
    if rebalance - commit - heartbeat <= 0:
        assert "leaves no time to drain" in refusal(**values)
    else:
        settings = Settings(**values)
        assert 0 < settings.drain_timeout <= 20
        assert settings.drain_timeout < rebalance - commit - heartbeat


def test_drain_timeout_none_is_computed() -> None:
    settings = Settings(drain_timeout=None, rebalance_timeout=18)
    assert settings.drain_timeout == pytest.approx(9.0)
    assert settings.replace(rebalance_timeout=15).drain_timeout < 15 - settings.commit_timeout


MODES: list[dict[str, Any]] = [
    {},
    {"processing_guarantee": "exactly_once"},
    CONSUMER,
    {"group_protocol": "consumer", "processing_guarantee": "exactly_once"},
]


@given(
    mode=st.sampled_from(MODES),
    timeouts=st.dictionaries(st.sampled_from(sorted(DEFAULTS)), st.integers(1, 2_000).map(lambda number: number / 8)),
)
def test_only_timeouts_that_are_set_are_refused_and_named(mode: dict[str, Any], timeouts: dict[str, Any]) -> None:
    if mode.get("group_protocol") == "consumer":  # there, these two are refused altogether
        timeouts = {name: value for name, value in timeouts.items() if name not in NOT_OF_CONSUMERS}
    if contradict(timeouts, mode):
        message = refusal(**mode, **timeouts)
        assert [name for name in DEFAULTS if f"{name}=" in message and name not in timeouts] == []
        return
    settings = Settings(**mode, **timeouts)
    assert {name: getattr(settings, name) for name in timeouts} == timeouts
    assert not contradict({name: getattr(settings, name) for name in DEFAULTS}, mode)
    assert min(getattr(settings, name) for name in DEFAULTS) > 0


NOT_OF_CONSUMERS = {"session_timeout", "heartbeat_interval"}


def contradict(timeouts: dict[str, float], mode: dict[str, Any]) -> bool:
    """Whether the timeouts cannot be used together, for any values of the others."""
    exactly_once = "processing_guarantee" in mode

    def part(name: str) -> float:
        return timeouts.get(name, 0.0)

    def limit(name: str) -> float:
        return timeouts.get(name, math.inf)

    needed = part("drain_timeout") + (2 if exactly_once else 1) * part("commit_timeout") + part("heartbeat_interval")
    left = timeouts.get("rebalance_timeout", math.inf) - timeouts.get("drain_timeout", -math.inf)
    is_tight = left < least_beside_drain(timeouts.get("rebalance_timeout", math.inf))
    return (
        (is_tight and not timeouts.keys() >= {"commit_timeout", "heartbeat_interval"})
        or limit("session_timeout") < 3 * part("heartbeat_interval")
        or limit("rebalance_timeout") <= needed
        or (exactly_once and limit("transaction_timeout") <= part("drain_timeout") + part("commit_timeout"))
    )


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", sorted(DEFAULTS))
@pytest.mark.parametrize("value", [0.5, 5, 30, 1_000])
def test_a_single_timeout_is_never_refused(mode: dict[str, Any], name: str, value: float) -> None:
    if mode.get("group_protocol") != "consumer" or name not in NOT_OF_CONSUMERS:
        assert getattr(Settings(**mode | {name: value}), name) == value


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"assignor": "fair", "reassignment_delay": 30}, "reassignment_delay=30 s has no effect here"),
        ({"balance_interval": 60}, "balance_interval=60 s has no effect here"),
        (CONSUMER | {"session_timeout": 45}, "session_timeout=45 s has no effect under group_protocol='consumer'"),
        (
            CONSUMER | {"heartbeat_interval": 3},
            "remove it here, and run `aioshard group configure GROUP --heartbeat-interval 3`",
        ),
        (
            CONSUMER | {"session_timeout": 30.25, "heartbeat_interval": 3},
            (
                "session_timeout=30.25 s and heartbeat_interval=3 s have no effect under group_protocol='consumer', "
                "where the brokers keep the times of the group: remove them here, and run `aioshard group configure "
                "GROUP --session-timeout 30.25 --heartbeat-interval 3`"
            ),
        ),
        (CONSUMER | {"assignor": "sticky"}, "use client_options={'group_remote_assignor': …}"),
        (CONSUMER | {"reassignment_delay": 30}, "reassignment_delay=30 s has no effect here"),
        (CONSUMER | {"balance_interval": 60}, "balance_interval=60 s has no effect here"),
        (
            {"group_protocol": "classic", "client_options": {"group_remote_assignor": "range"}},
            "'group_remote_assignor', which has no effect",
        ),
        (
            {"session_timeout": 20, "client_options": {"group_remote_assignor": "range"}},
            "only 'classic' has session_timeout",
        ),
    ],
)
def test_settings_of_the_other_group_protocol_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(**values)


def test_session_variables_are_refused_when_the_broker_sets_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOSHARD_SESSION_TIMEOUT", "45")
    assert "`aioshard group configure GROUP --session-timeout 45`" in refusal(**CONSUMER)


@pytest.mark.parametrize("instance", ["a b", "..", "ü", "a/b"])
def test_an_invalid_instance_id_is_refused(instance: str) -> None:
    assert "letters, digits" in refusal(group_instance_id=instance)


# Client options


@pytest.mark.parametrize("option", ["enable_auto_commit", "enable.auto.commit", "auto_commit_interval_ms"])
def test_auto_commit_is_refused_with_the_reason(option: str) -> None:
    message = refusal(client_options={option: True})
    assert repr(option) in message
    assert "aioshard commits itself, and only finished records" in message


@pytest.mark.parametrize("option", sorted(OWNED_OPTIONS))
def test_an_option_that_aioshard_owns_names_the_setting_to_use(option: str) -> None:
    assert f"client_options has {option!r}, which is refused: {OWNED_OPTIONS[option]}" in refusal(
        client_options={option: 1}
    )


def test_an_unknown_client_option_suggests_the_nearest_name() -> None:
    assert "it takes client_rack, connections_max_idle_ms, " in refusal(client_options={"client_rak": "here"})


@pytest.mark.parametrize(
    ("option", "value"),
    [("fetch_min_bytes", "soon"), ("fetch_min_bytes", 0), ("connections_max_idle_ms", True), ("client_rack", 7)],
)
def test_a_value_that_the_client_cannot_use_is_refused(option: str, value: object) -> None:
    assert f"client_options[{option!r}]={value!r} is refused" in refusal(client_options={option: value})


def test_every_option_of_the_client_is_either_passed_or_owned() -> None:
    """Fails when a new version of the client brings options that nobody has decided about."""
    known = set(inspect.signature(aiokafka.AIOKafkaConsumer.__init__).parameters) - {"self"}
    assert set(CLIENT_OPTIONS) | set(OWNED_OPTIONS) == known | {"group_remote_assignor"}
    assert not set(CLIENT_OPTIONS) & set(OWNED_OPTIONS)


# TLS and SASL


def test_matching_tls_and_sasl_settings_are_accepted(pem: str) -> None:
    settings = Settings(
        security_protocol="SASL_SSL",
        ssl_cafile=pem,
        ssl_certfile=pem,
        ssl_keyfile=pem,
        ssl_password="k",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="u",
        sasl_password="p",
    )
    assert settings.ssl_check_hostname
    Settings(security_protocol="SSL", client_options={"ssl_context": ssl.create_default_context()})
    Settings(
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        client_options={"sasl_oauth_token_provider": object()},
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"security_protocol": "SASL_SSL"}, "needs sasl_mechanism"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_password": "p"}, "needs sasl_username"),
        (
            {"security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-256", "sasl_username": "u"},
            "needs sasl_password: set it, or AIOSHARD_SASL_PASSWORD",
        ),
        ({"sasl_mechanism": "PLAIN"}, "security_protocol='PLAINTEXT' does not use SASL"),
        ({"security_protocol": "SSL", "sasl_username": "u"}, "security_protocol='SSL' does not use SASL"),
        (
            {"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI", "sasl_username": "u"},
            "sasl_username is set but sasl_mechanism='GSSAPI' does not use it",
        ),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}, "sasl_oauth_token_provider"),
        ({"security_protocol": "SSL", "ssl_cafile": "/missing/ca.pem"}, "'/missing/ca.pem' does not exist"),
        ({"ssl_cafile": __file__}, "does not use TLS"),
        ({"security_protocol": "SSL", "ssl_keyfile": __file__}, "ssl_keyfile is set without ssl_certfile"),
        ({"security_protocol": "SSL", "ssl_password": "p"}, "ssl_password is set without ssl_certfile"),
        ({"client_options": {"ssl_context": None}}, "does not use TLS"),
        (
            {"security_protocol": "SSL", "ssl_cafile": __file__, "client_options": {"ssl_context": None}},
            "replaces ssl_cafile",
        ),
    ],
)
def test_security_that_cannot_work_is_refused(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**values)


# Secrets


def test_secrets_are_masked_everywhere(pem: str) -> None:
    settings = Settings(
        security_protocol="SASL_SSL",
        ssl_certfile=pem,
        ssl_password="key-secret",
        sasl_mechanism="PLAIN",
        sasl_username="u",
        sasl_password="user-secret",
        client_options={"sasl_oauth_token_provider": object()},
    )
    everywhere = repr(settings) + str(settings) + json.dumps(settings.asdict())
    assert "key-secret" not in everywhere
    assert "user-secret" not in everywhere
    assert settings.asdict()["client_options"] == {"sasl_oauth_token_provider": "<object>"}


class TokenProvider:
    """A provider whose text shows its secret, as that of a dataclass does."""

    def __repr__(self) -> str:
        return "TokenProvider(secret='user-secret')"


def test_client_options_that_may_be_secret_are_masked() -> None:
    options = {"sasl_oauth_token_provider": TokenProvider()}
    settings = Settings(client_options=options)
    shown = [
        repr(settings),
        str(settings),
        str(settings.asdict()),
        settings.model_dump_json(),
        str(settings.model_dump()),
        str(dict(settings)),
        pprint.pformat(settings.client_options),
        f"{settings.client_options}",
    ]
    assert [text for text in shown if "user-secret" in text] == []
    assert settings.asdict()["client_options"].keys() == options.keys(), "the names are shown"
    assert settings.client_options == options, "the client gets the values"
    assert Settings(**settings.model_dump()).client_options == options


def test_client_options_known_to_be_harmless_are_shown() -> None:
    options = {"fetch_min_bytes": 50, "client_rack": "eu-1a"}
    settings = Settings(client_options=options)
    assert settings.asdict()["client_options"] == options
    assert repr(options) in repr(settings)
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    "values",
    [
        {"sasl_password": ["user-secret"]},
        {"sasl_password": "user-secret", "session_timeout": -1},
        {"sasl_password": "user-secret"},
        {"ssl_password": b"\xffuser-secret"},
        {"bootstrap_servers": "sasl://u:user-secret@broker:9092"},
        {"bootstrap_servers": "Endpoint=sb://hub.example.com/;SharedAccessKey=user-secret"},
        {"journal": "s3://key:user-secret@bucket"},
        {"client_options": "{user-secret"},
        {"client_options": {"sasl_plain_password": "user-secret"}},
        {"sasl_passwort": "user-secret"},
    ],
)
def test_secrets_are_not_in_messages(values: dict[str, Any]) -> None:
    assert "user-secret" not in refusal(**values)


# Descriptions and warnings


def test_every_setting_is_described() -> None:
    assert [name for name, text in descriptions().items() if text] == list(Settings.model_fields)
    assert (default_of("session_timeout"), unit_of("session_timeout")) == ("45", "seconds")
    assert unit_of("max_buffered_bytes") == "bytes"
    assert unit_of("start_timeout") == "seconds"


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name.endswith(("timeout", "interval"))])
def test_durations_are_seconds(name: str) -> None:
    assert unit_of(name) == "seconds"


def test_a_handler_that_outlasts_the_drain_gives_a_warning() -> None:
    settings = Settings()
    assert timeout_warnings(settings, [("fast", 20.0), ("endless", None)]) == []
    drain, *rest = timeout_warnings(settings, [("slow", 22.0)])
    assert drain.startswith("handler 'slow' may run for timeout=22 s but drain_timeout=20 s")
    assert rest == []
    assert len(timeout_warnings(settings, [("slower", 30.0)])) == 2


def test_a_misspelled_variable_is_reported_and_a_foreign_one_is_not() -> None:
    environment = {"AIOSHARD_SESION_TIMEOUT": "1", "AIOSHARD_PORT": "tcp://1", "AIOSHARD_STUCK_AFTER": "1", "HOME": "/"}
    assert misspelled_variables(environment) == [
        "AIOSHARD_SESION_TIMEOUT is not used; did you mean AIOSHARD_SESSION_TIMEOUT?"
    ]


def test_a_refusal_is_a_settings_error() -> None:
    assert issubclass(SettingsError, AioshardError)
    assert "pydantic" not in sys.modules[AioshardError.__module__].__dict__
