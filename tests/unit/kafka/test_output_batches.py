"""The batches in which a transaction writes its messages, after brokers have refused some."""

from aioshard.kafka.confluent.output_topics import OutputTopics
from aioshard.ports import Message

A = [Message("a", b"%d" % number) for number in range(4)]
B = [Message("b", b"%d" % number) for number in range(8)]


def test_without_a_refusal_all_messages_are_one_batch() -> None:
    assert OutputTopics().batches([*A, *B]) == [range(12)]


def test_no_batch_has_more_messages_than_any_of_them_allows() -> None:
    topics = OutputTopics()
    assert topics.halve_batch("a", A, 12)
    assert topics.halve_batch("b", B, 12)

    batches = topics.batches([*B[:2], *A, *B[2:]])

    assert batches == [range(2), range(2, 4), range(4, 6), range(6, 10), range(10, 12)]


def test_a_message_that_is_to_blame_limits_no_batch_of_another_topic() -> None:
    topics = OutputTopics()
    topics.halve_batch("a", A[:2], 12)
    topics.halve_batch("b", B, 12)

    assert not topics.halve_batch("a", A[:1], 12)

    assert topics.batches([*A, *B[:4]]) == [range(4), range(4, 8)]
    assert topics.batches(A) == [range(4)]
