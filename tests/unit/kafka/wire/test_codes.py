"""Errors in the responses of brokers, as people and the code above see them."""

import re

import pytest

from aioshard.kafka.wire.codes import ERROR_CODES, error_for, raise_for
from aioshard.kafka.wire.errors import BrokerError


def test_an_error_has_kafkas_name_and_our_sentence() -> None:
    error = error_for(16)

    assert str(error) == "NOT_COORDINATOR: Another broker coordinates the group or transaction"
    assert (error.code, error.retriable, error.topics) == (16, True, ())
    assert error.cause.reason == str(error)


def test_the_explanation_of_the_broker_comes_before_ours() -> None:
    assert str(error_for(40, message="Unknown topic config name: x.")) == "INVALID_CONFIG: Unknown topic config name: x"
    assert str(error_for(40, message=" ")) == str(error_for(40, message=None)) == str(error_for(40))


@pytest.mark.parametrize("code", [999, -5, 137])
def test_an_unknown_code_is_named_by_its_number_and_does_not_pass(code: int) -> None:
    error = error_for(code)

    assert str(error) == f"ERROR {code}: The client has no name for it"
    assert (error.code, error.retriable) == (code, False)


def test_an_error_of_topics_keeps_them() -> None:
    assert error_for(29, "orders", "sales").cause.topics == ("orders", "sales")
    assert error_for(30, "billing").cause.topics == (), "a group is not a topic"


def test_zero_means_no_error() -> None:
    raise_for(0, "orders")
    with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        raise_for(3, "orders")
    with pytest.raises(ValueError, match="0 means no error"):
        error_for(0)


@pytest.mark.parametrize("code", ERROR_CODES)
def test_each_text_is_a_sentence_without_a_full_stop(code: int) -> None:
    name, text, _ = ERROR_CODES[code]

    assert re.fullmatch(r"[A-Z][A-Z_]+", name)
    assert re.fullmatch(r"[A-Z][^.]+[^.\s]", text)
    assert len(text) <= 90
