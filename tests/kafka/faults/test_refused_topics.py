"""Topics that are deleted while their offsets wait: the others are committed (I11)."""

import pytest

from aioshard import App
from aioshard.engine import commits
from tests.kafka.faults.support import Ledger, messages, quick_app, until
from tests.support.brokers import SharedKafka

RECORDS = 5


@pytest.mark.parametrize("manual", [False, True], ids=["member", "manual assignment"])
async def test_a_deleted_topic_does_not_hold_back_the_offsets_of_another(
    kafka: SharedKafka,
    topic: str,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    manual: bool,
) -> None:
    monkeypatch.setattr(commits, "_GRACE", 2.0)
    deleted = f"{topic}-deleted"
    app, ledger = _app(kafka, group, [topic, deleted], manual=manual), Ledger()
    for name in (topic, deleted):
        await kafka.create_topic(name)
        await kafka.produce(name, messages(RECORDS))
        app.consume(name)(ledger.handle)
    ledger.hold()

    async with app:
        await until(lambda: len(ledger.started) == 2 * RECORDS, app.explain)
        await kafka.delete_topic(deleted)
        ledger.release()
        await until(lambda: repr(deleted) in str(app.statistics().trouble), app.explain)
        [committed] = [part.committed for part in app.statistics().partitions if part.topic == topic]
        assert committed == RECORDS, "by the same request"
        assert repr(deleted) in app.explain()
        await until(lambda: "commit_given_up" in {getattr(line, "event", "") for line in caplog.records}, app.explain)


def _app(kafka: SharedKafka, group: str, topics: list[str], *, manual: bool) -> App:
    if not manual:
        return quick_app(kafka, group)
    return App(
        group,
        bootstrap_servers=kafka.bootstrap,
        auto_offset_reset="earliest",
        commit_interval=0.1,
        assign={topic: [0] for topic in topics},
    )
