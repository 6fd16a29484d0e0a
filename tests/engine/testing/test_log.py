"""The log of one partition, against a naive model and by example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.records import Record, TopicPartition
from aioshard.testing import PartitionLog


def make_log(*keys: bytes | None) -> PartitionLog:
    log = PartitionLog(TopicPartition("orders", 0), lambda: None)
    for number, key in enumerate(keys):
        append(log, str(number).encode(), key)
    return log


def append(log: PartitionLog, value: bytes, key: bytes | None = None) -> None:
    log.append(Record("orders", 0, log.end, key, value, (), 0.0))


def offsets(log: PartitionLog) -> list[int]:
    return [record.offset for record in log.records]


def test_offsets_increase_and_skipped_ones_are_never_used() -> None:
    log = make_log(None, None)
    log.skip(3)
    append(log, b"x")

    assert offsets(log) == [0, 1, 5]
    assert (log.start, log.stable_end, log.end) == (0, 6, 6)


def test_compaction_keeps_the_newest_record_of_each_key_and_no_offset_moves() -> None:
    log = make_log(b"a", b"b", b"a", None, b"b")

    log.compact()

    assert offsets(log) == [2, 4]
    assert (log.start, log.end) == (0, 5)


def test_a_deleted_record_leaves_a_hole() -> None:
    log = make_log(None, None, None)

    log.delete(1)

    assert offsets(log) == [0, 2]


def test_retention_never_moves_the_start_back() -> None:
    log = make_log(None, None, None)

    log.truncate_before(2)
    log.truncate_before(1)

    assert log.start == 2
    assert offsets(log) == [2]


def test_an_open_transaction_holds_the_last_stable_offset() -> None:
    log = make_log(None)
    log.begin_transaction()
    append(log, b"open")

    while_open = log.stable_end
    log.end_transaction(commit=True)

    assert while_open == 1
    assert (log.stable_end, log.end) == (3, 3)
    assert offsets(log) == [0, 1]


def test_an_aborted_transaction_is_a_hole_with_its_marker() -> None:
    log = make_log(None)
    log.begin_transaction()
    append(log, b"open")

    log.end_transaction(commit=False)

    assert offsets(log) == [0]
    assert log.stable_end == 3


def test_a_record_beyond_the_end_leaves_a_hole_and_one_before_it_is_refused() -> None:
    log = make_log(None)
    log.append(Record("orders", 0, 4, None, b"x", (), 0.0))

    assert offsets(log) == [0, 4]
    with pytest.raises(ValueError, match="offset 4 cannot be appended"):
        log.append(Record("orders", 0, 4, None, b"x", (), 0.0))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([None, b"a", b"b"])),
        st.tuples(st.just("skip"), st.integers(1, 3)),
        st.tuples(st.just("truncate"), st.integers(0, 30)),
        st.tuples(st.just("compact"), st.none()),
        st.tuples(st.just("transaction"), st.booleans()),
    ),
    max_size=30,
)


@given(STEPS, st.integers(0, 40), st.integers(0, 40))
def test_reading_matches_a_naive_log(steps: list[tuple[str, object]], position: int, below: int) -> None:
    log = make_log()
    naive: dict[int, bytes | None] = {}
    for step, value in steps:
        match step, value:
            case "append", (None | bytes()) as key:
                naive[log.end] = key
                append(log, b"x", key)
            case "skip", int(count):
                log.skip(count)
            case "truncate", int(offset) if offset <= log.end:
                log.truncate_before(offset)
                naive = {o: key for o, key in naive.items() if o >= offset}
            case "compact", _:
                log.compact()
                naive = {o: key for o, key in naive.items() if key and o == max(p for p in naive if naive[p] == key)}
            case "transaction", bool(commit):
                begin = log.end
                log.begin_transaction()
                append(log, b"x", b"a")
                log.end_transaction(commit=commit)
                naive |= {begin: b"a"} if commit else {}
            case _:
                pass

    assert [record.offset for record in log.read(position, below)] == [o for o in naive if position <= o < below]
    assert log.start <= log.stable_end <= log.end
    assert all(log.start <= offset < log.end for offset in naive)
