"""The times of a group under the consumer protocol: which are refused, and when they have no effect."""

import re
import shlex

import click
import pytest

from aioshard.cli.group import Configured, check_times, configure
from aioshard.cli.options import seconds
from aioshard.errors import SettingsError
from aioshard.kafka.groups import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, Group, GroupMember, GroupTime, GroupTimes
from aioshard.settings import Settings
from tests.support.commands import Run

TIMES = GroupTimes(GroupTime(45.0, is_own=False), GroupTime(5.0, is_own=True))
MEMBER = GroupMember("m-1", "billing-1", "/10.0.0.7", None)


@pytest.mark.parametrize(
    "wanted",
    [
        {SESSION_TIMEOUT: 15.0},
        {HEARTBEAT_INTERVAL: 15.0},
        {SESSION_TIMEOUT: 0.3, HEARTBEAT_INTERVAL: 0.1},
        {SESSION_TIMEOUT: 600.0, HEARTBEAT_INTERVAL: 200.0},
    ],
)
def test_a_session_of_three_heartbeats_is_long_enough(wanted: dict[str, float]) -> None:
    check_times(wanted, TIMES)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (
            {SESSION_TIMEOUT: 14.0},
            (
                "a session timeout of 14 s is less than 3 times a heartbeat interval of 5 s; the heartbeat interval is "
                "the one in force: one late heartbeat would cost a member its partitions. Use --session-timeout 15 or "
                "more, or --heartbeat-interval 4.666 or less"
            ),
        ),
        (
            {HEARTBEAT_INTERVAL: 20.0},
            (
                "a session timeout of 45 s is less than 3 times a heartbeat interval of 20 s; the session timeout is "
                "the one in force: one late heartbeat would cost a member its partitions. Use --session-timeout 60 or "
                "more, or --heartbeat-interval 15 or less"
            ),
        ),
        (
            {SESSION_TIMEOUT: 6.0, HEARTBEAT_INTERVAL: 3.0},
            (
                "a session timeout of 6 s is less than 3 times a heartbeat interval of 3 s: one late heartbeat would "
                "cost a member its partitions. Use --session-timeout 9 or more, or --heartbeat-interval 2 or less"
            ),
        ),
    ],
)
def test_a_shorter_session_is_refused_with_values_that_fit(wanted: dict[str, float], sentence: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        check_times(wanted, TIMES)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("group", "caveat"),
    [
        (None, None),
        (Group("stable", "consumer", "uniform", (MEMBER,)), None),
        (Group("empty", "consumer", "uniform", ()), None),
        (Group("dead", "classic", "", ()), "The group does not exist yet: its first member"),
        (Group("empty", "classic", "", ()), "The group has no members now: its first member"),
        (Group("stable", "classic", "sticky", (MEMBER,)), "They have no effect yet: the group uses the classic"),
    ],
)
def test_times_without_effect_are_said_to_have_none(group: Group | None, caveat: str | None) -> None:
    found = Configured(TIMES, {}, group).caveat
    assert found is None if caveat is None else str(found).startswith(caveat)


def test_limits_that_this_user_may_not_see_are_left_out() -> None:
    found = Configured(TIMES, {}, None)
    assert found.rows == [
        ("session timeout", "45 s", "default of the brokers", None),
        ("heartbeat interval", "5 s", "set for the group", None),
    ]
    assert found.as_object(SESSION_TIMEOUT) == {"seconds": 45.0, "from": "brokers", "least": None, "most": None}


@pytest.mark.parametrize("text", ["0", "0.0009", "-1", "nan", "inf", "soon", ""])
def test_what_is_not_a_number_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"expected a number of seconds, at least 0\.001"):
        seconds(text)
    assert seconds("0.001") == 0.001


async def test_a_reset_sets_nothing(aioshard: Run) -> None:
    ended = await aioshard("group", "configure", "billing", "--reset", "--session-timeout", "30")
    assert ended.code == 2
    assert "--reset removes both times of the group" in ended.errors


def test_the_command_that_refused_settings_name_sets_these_values() -> None:
    with pytest.raises(SettingsError) as refused:
        Settings(group_protocol="consumer", session_timeout=30.25, heartbeat_interval=3)
    named = re.search(r"`aioshard group configure (.+)`", str(refused.value))
    assert named is not None
    with configure.make_context("configure", shlex.split(named[1])) as context:
        assert (context.params["session_timeout"], context.params["heartbeat_interval"]) == (30.25, 3.0)
