"""The producer behind a transactional id: in which epoch a transaction may begin."""

import pytest

from aioshard.errors import ClientLostError, StateError
from aioshard.kafka.batches import Identity
from aioshard.kafka.transactions.identity import TransactionalId, TransactionalIds, Version
from aioshard.records import TopicPartition

OUT = TopicPartition("out", 0)
FIRST, SECOND = Version.FIRST, Version.SECOND


def ready(version: Version, identity: Identity = Identity(7, 0)) -> TransactionalId:  # noqa: B008 - immutable
    transactional = TransactionalId("group:1")
    transactional.renew(identity, version)
    return transactional


def ending(version: Version) -> TransactionalId:
    transactional = ready(version)
    transactional.begin()
    transactional.count_stored(OUT, 3)
    transactional.request_commit()
    return transactional


def test_nothing_begins_without_an_epoch() -> None:
    transactional = TransactionalId("group:1")

    assert transactional.is_stale
    assert transactional.known is None
    with pytest.raises(StateError):
        transactional.begin()


def test_the_first_protocol_continues_in_its_epoch_with_the_next_numbers() -> None:
    transactional = ending(FIRST)

    transactional.commit(None, is_in_doubt=False)

    assert not transactional.is_stale
    assert transactional.identity == Identity(7, 0)
    assert transactional.sequence(OUT) == 3


def test_after_a_request_in_doubt_the_first_protocol_needs_a_new_epoch() -> None:
    transactional = ending(FIRST)

    transactional.commit(None, is_in_doubt=True)

    assert transactional.is_stale
    assert transactional.known == Identity(7, 0)


@pytest.mark.parametrize("following", [Identity(7, 1), Identity(8, 0)])
@pytest.mark.parametrize("is_in_doubt", [False, True])
def test_the_second_protocol_continues_as_the_answer_says(following: Identity, is_in_doubt: bool) -> None:
    """The id changes too, when its epochs are exhausted."""
    transactional = ending(SECOND)

    transactional.commit(following, is_in_doubt=is_in_doubt)

    assert not transactional.is_stale
    assert transactional.identity == following
    assert transactional.sequence(OUT) == 0


def test_an_end_without_the_next_epoch_is_no_end_of_the_second_protocol() -> None:
    transactional = ending(SECOND)

    transactional.commit(None, is_in_doubt=False)

    assert transactional.is_stale


@pytest.mark.parametrize("version", list(Version))
def test_a_transaction_that_has_failed_needs_a_new_epoch(version: Version) -> None:
    transactional = ready(version)
    transactional.begin()

    transactional.fail()

    assert transactional.is_stale
    transactional.renew(Identity(7, 1), version)
    transactional.begin()
    assert transactional.sequence(OUT) == 0


def test_nothing_is_open_before_a_transaction_begins() -> None:
    transactional = ready(FIRST)

    transactional.fail()

    assert not transactional.is_stale


@pytest.mark.parametrize(("before", "after"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_a_new_epoch_comes_between_two_protocols(before: Version, after: Version) -> None:
    transactional = ready(before)

    transactional.use(before)
    assert not transactional.is_stale
    transactional.use(after)
    assert transactional.is_stale


def test_whoever_is_fenced_begins_nothing() -> None:
    transactional = ready(SECOND)
    transactional.begin()
    transactional.fail()

    transactional.fence()

    assert transactional.is_fenced
    with pytest.raises(StateError):
        transactional.renew(Identity(9, 0), SECOND)
    with pytest.raises(StateError):
        transactional.begin()


def test_an_id_that_the_brokers_have_forgotten_begins_anew() -> None:
    transactional = ready(SECOND)
    transactional.begin()
    transactional.fail()

    transactional.forget()

    assert transactional.known is None
    transactional.renew(Identity(9, 0), SECOND)
    assert transactional.identity == Identity(9, 0)


def test_numbers_begin_again_after_the_last_one() -> None:
    transactional = ready(FIRST)
    transactional.count_stored(OUT, 2**31 - 1)

    transactional.count_stored(OUT, 3)

    assert transactional.sequence(OUT) == 2


def test_a_refused_commit_is_not_repeated_before_the_next_epoch() -> None:
    transactional = ending(FIRST)

    transactional.refuse_commit()

    assert transactional.is_stale
    assert transactional.unfinished is False


def test_no_commit_is_requested_twice_for_different_transactions() -> None:
    transactional = ending(FIRST)

    with pytest.raises(StateError):
        transactional.request_commit()
    with pytest.raises(StateError):
        transactional.begin()


def fenced(transactional: TransactionalId) -> TransactionalId:
    transactional.renew(Identity(7, 0), SECOND)
    transactional.fence()
    return transactional


def test_each_process_has_its_own_id_and_keeps_it() -> None:
    one, two = TransactionalIds("group", None), TransactionalIds("group", None)

    assert one.for_client() is one.for_client()
    assert one.for_client().name != two.for_client().name
    assert one.for_client().name.startswith("group:")


@pytest.mark.parametrize("instance_id", [None, "node-1"])
def test_a_client_that_was_fenced_is_followed_by_one_that_begins_anew(instance_id: str | None) -> None:
    """Its epoch is worth nothing; a new client joins the group again, and reads the committed offsets again."""
    ids = TransactionalIds("group", instance_id)
    first = fenced(ids.for_client())

    assert isinstance(first.end, ClientLostError)
    second = ids.for_client()
    assert second is not first
    assert second.known is None
    assert second.end is None
    assert (second.name == first.name) == (instance_id is not None)


def test_processes_with_one_instance_id_have_one_transactional_id() -> None:
    names = {TransactionalIds("group", "node-1").for_client().name for _ in range(2)}

    assert names == {"group:node-1"}


def test_the_first_protocol_ends_a_transaction_before_it_requests_an_epoch() -> None:
    """Brokers abort an open one in an epoch that they name to nobody, and then refuse the one before."""
    opened = ready(FIRST)
    opened.begin()
    opened.fail()
    in_doubt = ending(FIRST)
    in_doubt.fail()

    assert opened.unfinished is False
    assert in_doubt.unfinished is True, "an abort would not tell whether it was committed"
    in_doubt.finish()
    assert in_doubt.unfinished is None
    assert in_doubt.is_stale


def test_an_epoch_of_the_second_protocol_ends_the_transaction() -> None:
    for transactional in (ending(SECOND), ready(SECOND)):
        transactional.fail()
        assert transactional.unfinished is None


def test_nothing_is_open_before_the_first_transaction_and_after_a_commit() -> None:
    fresh = TransactionalId("group:1")
    fresh.fail()
    committed = ending(FIRST)
    committed.commit(None, is_in_doubt=True)

    assert fresh.unfinished is None
    assert committed.unfinished is None
