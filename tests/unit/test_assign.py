"""The setting `assign`: its formats, conflicts with other settings, and matching handlers."""

import asyncio
import os
from typing import Any

import pytest

from aioshard import App, Park, Record
from aioshard.errors import SettingsError
from aioshard.settings import Settings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.upper().startswith("AIOSHARD_")]:
        monkeypatch.delenv(variable)


def refusal(**values: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"orders": [2, 0]}, {"orders": (0, 2)}),
        ({"b": (1, 0, 1), "a": (7,)}, {"a": (7,), "b": (0, 1)}),
        ("orders:0-2,payments:1", {"orders": (0, 1, 2), "payments": (1,)}),
        (" orders:5 , orders:0-1 ", {"orders": (0, 1, 5)}),
        ("my.topic_x-1:3", {"my.topic_x-1": (3,)}),
        (None, None),
    ],
)
def test_assign_is_a_mapping_or_text(given: object, read: object) -> None:
    assert Settings(assign=given).assign == read


def test_assign_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_ASSIGN", "orders:0-2,payments:1")
    assert Settings().assign == {"orders": (0, 1, 2), "payments": (1,)}
    assert App("billing", assign={"orders": [4]}).settings.assign == {"orders": (4,)}
    monkeypatch.setenv("AIOSHARD_ASSIGN", "none")
    assert Settings().assign is None


def test_assign_can_come_from_a_file(tmp_path: Any) -> None:
    file = tmp_path / "settings.env"
    file.write_text("AIOSHARD_ASSIGN=orders:0-1\n")
    assert Settings(_env_file=file).assign == {"orders": (0, 1)}


def test_assign_survives_json_and_replace() -> None:
    settings = Settings(assign="orders:0-1")
    assert settings.asdict()["assign"] == {"orders": [0, 1]}
    assert settings.replace(commit_interval=2.0).assign == {"orders": (0, 1)}
    assert settings.replace(assign=None).assign is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "at least 1 item"),
        ("", "TOPIC:PARTITION"),
        ({"orders": []}, "at least 1 item"),
        ({"orders": 3}, "valid tuple"),
        ({"orders": "0-2"}, "valid tuple"),
        ({"orders": [True]}, "valid integer"),
        ({"orders": [-1]}, "greater than or equal to 0"),
        ({"two words": [1]}, "match pattern"),
        (["orders"], "valid dictionary"),
        ("orders", "TOPIC:PARTITION or TOPIC:FIRST-LAST"),
        ("orders:2-0", "at least 1 item"),
        ("orders:0-999999999", "TOPIC:PARTITION"),
    ],
)
def test_an_invalid_assign_is_refused_with_a_reason(given: object, why: str) -> None:
    with pytest.raises(SettingsError, match=rf"assign=.* is refused: .*({why})"):
        Settings(assign=given)


def test_the_refusal_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_ASSIGN", "orders")
    assert refusal().startswith("AIOSHARD_ASSIGN='orders' is refused: 'orders' is not TOPIC:PARTITION")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assignor", "fair"),
        ("group_instance_id", "left-hand"),
        ("reassignment_delay", 30.0),
        ("session_timeout", 45.0),
        ("heartbeat_interval", 1.0),
        ("rebalance_timeout", 90.0),
    ],
)
def test_group_settings_are_refused_with_assign(name: str, value: object) -> None:
    assert refusal(assign="orders:0", **{name: value}).startswith(f"{name}=")
    assert "has no effect with assign" in refusal(assign="orders:0", **{name: value})


def test_kip_848_is_refused_with_assign() -> None:
    message = refusal(assign="orders:0", group_protocol="consumer")
    assert "group_protocol='consumer' has no effect with assign" in message


def test_drain_timeout_is_unlimited_with_assign() -> None:
    assert Settings(assign="orders:0", drain_timeout=600.0).drain_timeout == 600.0
    assert "does not fit" in refusal(drain_timeout=600.0, rebalance_timeout=60.0)


def app_of(*topics: str, assign: Any, **options: Any) -> App:
    app = App("billing", bootstrap_servers="127.0.0.1:1", auto_offset_reset="earliest", assign=assign)

    @app.consume(*topics, **options)
    async def handle(record: Record) -> None: ...

    return app


@pytest.mark.parametrize(
    ("topics", "assign", "options", "why"),
    [
        (
            ["orders"],
            "orders:0,payments:1",
            {},
            "topic 'payments' is in assign, but no handler consumes it",
        ),
        (
            ["orders", "payments"],
            "orders:0",
            {},
            "topic 'payments' has no partitions in assign",
        ),
        ([], "orders:0", {"pattern": "ord.*"}, "'handle' has a pattern, which needs a consumer group"),
        (
            ["orders"],
            "orders:0",
            {"on_failure": Park("aside")},
            r"on_failure=Park\(…\), which needs a consumer group",
        ),
    ],
)
async def test_topics_without_a_handler_are_refused_before_connecting(
    topics: list[str], assign: str, options: dict[str, Any], why: str
) -> None:
    app = app_of(*topics, assign=assign, **options)
    with pytest.raises(SettingsError, match=why):
        app.check()
    async with asyncio.timeout(1):
        with pytest.raises(SettingsError, match=why):
            await app.serve()


def test_topics_of_the_handlers_are_accepted() -> None:
    app_of("orders", "payments", assign="payments:0,orders:3").check()
    app_of("orders", assign=None).check()
