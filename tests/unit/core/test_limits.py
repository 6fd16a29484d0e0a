"""Rate limits, their token buckets, and the shares of a group."""

import math

import pytest

from aioshard.core.limits import KeyBuckets, TokenBucket, share_of
from aioshard.core.options import Limit
from aioshard.engine.limits import SharedLimit
from aioshard.errors import HandlerError
from aioshard.records import TopicPartition


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "100", None, True])
def test_a_rate_that_is_not_positive_is_refused(rate: object) -> None:
    with pytest.raises(HandlerError, match=r"Limit\(per_second=.*greater than 0"):
        Limit("pace", rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("burst", [0, -1, 1.0, "2", True])
def test_a_burst_that_is_not_a_positive_integer_is_refused(burst: object) -> None:
    with pytest.raises(HandlerError, match=r"Limit\(burst=.*at least 1"):
        Limit("pace", 10.0, burst)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "at_once"), [(0.1, 1), (10, 1), (39.0, 1), (40, 2), (1000, 50)])
def test_the_default_burst_is_a_twentieth_of_a_second(rate: float, at_once: int) -> None:
    assert Limit("pace", rate).at_once == at_once


def test_a_new_bucket_is_full() -> None:
    bucket = TokenBucket(1.0, 3)

    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]


def test_tokens_come_back_one_by_one() -> None:
    bucket = TokenBucket(2.0, 2)
    bucket.take(0.0)
    bucket.take(0.0)

    assert bucket.due(0.0) == 0.5
    assert not bucket.take(0.49)
    assert bucket.take(0.5)
    assert not bucket.take(0.5)
    assert bucket.take(1.0)


def test_unused_tokens_beyond_the_burst_are_lost() -> None:
    bucket = TokenBucket(10.0, 2)
    bucket.take(0.0)

    assert [bucket.take(3600.0) for _ in range(3)] == [True, True, False]


def test_a_bucket_does_not_drift_in_a_day() -> None:
    """Adding a thousandth to the loop's time again and again would be off by then."""
    bucket = TokenBucket(1000.0, 2)
    now = began = 123_456.789
    taken = 0
    while bucket.take(now):
        taken += 1
    step = 0.0005  # checking twice per token never finds the bucket full
    for number in range(1, 400_001):
        now = began + number * step
        taken += bucket.take(now)

    assert taken == 2 + 200_000


def test_a_timer_that_fires_early_is_followed_by_another() -> None:
    bucket = TokenBucket(3.0, 1)
    bucket.take(0.1)
    now = 0.1 + bucket.due(0.1) - 1e-9

    assert not bucket.take(now)
    assert 0 < bucket.due(now) < 1e-8
    assert bucket.take(now + bucket.due(now))


@pytest.mark.parametrize("name", ["", " stripe", "x" * 101, None, 7])
def test_a_limit_needs_a_name(name: object) -> None:
    with pytest.raises(HandlerError, match=r"Limit\(name="):
        Limit(name, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("per", ["partition", "Process", None, []])
def test_an_unknown_scope_is_refused(per: object) -> None:
    with pytest.raises(HandlerError, match=r"Limit\(per=.*'process' or 'group' or 'key'"):
        Limit("stripe", 1.0, per=per)  # type: ignore[arg-type]


def test_the_tasks_of_a_backfill_divide_a_limit_but_not_that_of_a_key() -> None:
    assert Limit("a", 100.0, burst=3).divided_among(4) == Limit("a", 25.0, burst=1)
    assert Limit("a", 100.0, per="group").divided_among(4) == Limit("a", 25.0)
    assert Limit("a", 100.0, per="key").divided_among(4) == Limit("a", 100.0, per="key")


# Changes of the rate ------------------------------------------------------------------------


def test_a_bucket_without_a_rate_never_has_a_token() -> None:
    bucket = TokenBucket(0.0, 0.0)

    assert bucket.due(0.0) == bucket.due(1e9) == math.inf
    assert not bucket.take(1e9)
    assert bucket.level(1e9) == 0.0


def test_a_larger_share_brings_no_tokens_with_it() -> None:
    bucket = TokenBucket(0.0, 0.0)

    bucket.resize(2.0, 10.0, 100.0)
    assert not bucket.take(100.0)
    assert bucket.due(100.0) == 0.5
    bucket.resize(4.0, 20.0, 100.25)
    assert bucket.level(100.25) == 0.5
    assert bucket.due(100.25) == 0.125


def test_a_smaller_share_takes_the_tokens_above_its_capacity() -> None:
    bucket = TokenBucket(10.0, 10.0)

    bucket.resize(3.0, 3.0, 5.0)
    assert [bucket.take(5.0) for _ in range(4)] == [True, True, True, False]
    bucket.resize(0.0, 0.0, 6.0)
    bucket.resize(10.0, 10.0, 7.0)
    assert bucket.level(7.0) == 0.0


def test_a_smaller_share_keeps_what_was_taken() -> None:
    bucket = TokenBucket(10.0, 10.0)
    for _ in range(10):
        bucket.take(0.0)

    bucket.resize(5.0, 5.0, 0.0)
    assert not bucket.take(0.1)
    assert bucket.take(0.2)


def test_a_token_that_is_put_back_after_a_change_fits_the_new_capacity() -> None:
    bucket = TokenBucket(10.0, 10.0)
    bucket.take(0.0)
    bucket.resize(2.0, 2.0, 0.0)
    bucket.put_back()

    assert [bucket.take(0.0) for _ in range(3)] == [True, True, False]


def drawn(member: SharedLimit) -> int:
    """How many runs a member may start now; it starts them."""
    runs = 0
    while not member.due():
        member.take(lambda: True)
        runs += 1
    return runs


def test_members_divide_the_burst_but_each_has_room_for_a_run() -> None:
    now = 0.0
    limit = Limit("stripe", 1.0, burst=12, per="group")
    members = [SharedLimit(limit, lambda: now) for _ in range(4)]
    for member, share in zip(members, (0.75, 0.25, 0.05, 0.0), strict=True):
        member.use_share(share)

    assert [drawn(member) for member in members] == [0, 0, 0, 0]
    now = 1_000.0
    assert [drawn(member) for member in members] == [9, 3, 1, 0]


def test_a_member_keeps_up_to_one_token_while_it_has_no_partition() -> None:
    now = 0.0
    member = SharedLimit(Limit("stripe", 1.0, burst=12, per="group"), lambda: now)
    member.use_share(1.0)
    now = 100.0

    member.use_share(0.0)
    assert (member.due(), member.statistics().due) == (math.inf, None)
    now = 200.0
    member.use_share(1.0)
    assert drawn(member) == 1


# Keys ---------------------------------------------------------------------------------------


def test_each_key_has_its_own_tokens() -> None:
    buckets = KeyBuckets(1.0, 2.0)

    assert [buckets.take(b"a", 0.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert [buckets.take(b"b", 0.5) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert buckets.take(b"a", 1.0) == 0.0
    buckets.put_back(b"a")
    assert buckets.take(b"a", 1.0) == 0.0
    assert buckets.take(b"a", 1.0) == 1.0


def test_full_buckets_are_forgotten() -> None:
    buckets = KeyBuckets(1.0, 5.0)
    most = 0
    for number in range(100_000):  # 1,000 keys a second, each of which is full again after a second
        buckets.take(number, number / 1_000)
        most = max(most, len(buckets))

    assert most <= 3 * 1_000


def test_a_bucket_that_is_not_full_is_not_forgotten() -> None:
    buckets = KeyBuckets(0.001, 1.0)
    buckets.take(b"slow", 0.0)
    for number in range(10_000):
        buckets.take(number, 0.05 * number)

    assert buckets.take(b"slow", 999.0) == pytest.approx(1.0)


# Shares -------------------------------------------------------------------------------------


def owned(topic: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


def test_the_shares_of_all_owners_add_up_to_one() -> None:
    sizes = {"orders": 5, "refunds": 3}
    members = [owned("orders", 0, 1), owned("orders", 2, 3, 4), owned("refunds", 0, 1, 2), []]

    assert [share_of(member, sizes) for member in members] == [2 / 8, 3 / 8, 3 / 8, 0.0]


def test_an_owned_partition_shows_that_a_topic_has_grown() -> None:
    assert share_of(owned("orders", 7), {"orders": 4}) == 1 / 8
    assert share_of(owned("orders", 0), {}) == 1.0
