"""Limits of a batch, and the errors its handler may raise."""

from typing import Any

import pytest

from aioshard.core.options import Batch
from aioshard.errors import BatchError, HandlerError
from aioshard.records import Record


def record(offset: int) -> Record:
    return Record("clicks", 0, offset, b"key", b"value", (), 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"max_records": 0},
        {"max_records": 2.5},
        {"max_records": True},
        {"max_bytes": 0},
        {"max_bytes": "1 MiB"},
        {"linger": -0.1},
        {"linger": float("inf")},
        {"linger": float("nan")},
        {"linger": "50 ms"},
    ],
    ids=str,
)
def test_an_impossible_batch_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(HandlerError, match=next(iter(options))):
        Batch(**options)


def test_linger_may_be_zero() -> None:
    assert Batch(linger=0).linger == 0


def test_failed_batches_shrink_until_every_record_is_alone() -> None:
    batch = Batch(max_records=4_000)

    assert [batch.size_after(failures, attempts=6) for failures in range(8)] == [4_000, 500, 62, 7, 1, 1, 1, 1]


def test_the_last_attempt_is_always_alone() -> None:
    batch = Batch(max_records=4_000)

    assert [batch.size_after(failures, attempts=3) for failures in range(3)] == [4_000, 500, 1]
    assert [batch.size_after(failures, attempts=1) for failures in range(2)] == [4_000, 1]


def test_a_small_batch_does_not_shrink_to_nothing() -> None:
    assert [Batch(max_records=3).size_after(failures, attempts=10) for failures in range(4)] == [3, 1, 1, 1]


def test_a_batch_error_keeps_the_error_of_each_record_it_names() -> None:
    first, second = ValueError("no user"), KeyError("x")

    error = BatchError({record(1): first, record(2): second})

    assert error.errors == {record(1): first, record(2): second}
    assert str(error) == "2 records of the batch failed: clicks/0/1 (ValueError), clicks/0/2 (KeyError)"


@pytest.mark.parametrize(
    "errors",
    [{}, {record(1): "text"}, {record(1): ValueError}, {7: ValueError()}, [record(1)]],
    ids=["nothing", "no exception", "a class", "an offset", "a list"],
)
def test_an_empty_batch_error_is_refused(errors: Any) -> None:
    with pytest.raises(HandlerError, match="BatchError"):
        BatchError(errors)


def test_the_message_of_a_large_batch_error_stays_readable() -> None:
    text = str(BatchError({record(offset): ValueError() for offset in range(500)}))

    assert text.startswith("500 records")
    assert len(text) < 500
