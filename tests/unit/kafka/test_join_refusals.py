"""Refusals to let a member join: which of them end the start, and which are waited out."""

import pytest

from aioshard.errors import AuthorizationError, ClientLostError, SessionTimeoutRefusedError
from aioshard.kafka.errors import Cause, group_error

FINAL = [24, 26, 35, 42, 112, 128]
"""Only another setting helps."""
WAITED_FOR = [23, 81]
"""Another member has to leave."""


@pytest.mark.parametrize("code", FINAL)
def test_a_refusal_of_a_setting_is_final_and_says_what_to_change(code: int) -> None:
    error = group_error(Cause(code, "REASON"), "billing", 0.5)

    assert not error.retriable
    assert not isinstance(error, ClientLostError)


@pytest.mark.parametrize("code", WAITED_FOR)
def test_a_refusal_that_ends_when_others_leave_is_retried(code: int) -> None:
    error = group_error(Cause(code, "REASON"), "billing", 0.5)

    assert isinstance(error, ClientLostError)
    assert "stop" in str(error), "it says what to do"


def test_a_refused_session_timeout_is_named_with_the_limits() -> None:
    error = group_error(Cause(26, "REASON"), "billing", 0.5)

    assert isinstance(error, SessionTimeoutRefusedError)
    assert error.session_timeout == 0.5
    assert "6 to 1800 s" in str(SessionTimeoutRefusedError(0.5, (6, 1800)))


def test_a_missing_permission_and_an_unknown_error_are_what_they_were() -> None:
    assert isinstance(group_error(Cause(30, "REASON"), "billing", 45), AuthorizationError)
    assert isinstance(group_error(Cause(-1, "REASON"), "billing", 45), ClientLostError)
