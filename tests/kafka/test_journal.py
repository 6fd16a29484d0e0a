"""The event journal of an app on a real broker."""

from pathlib import Path

import pyarrow.dataset

from aioshard import App, DeadLetter, Record, Retry
from aioshard.observe import JournalStatistics
from tests.support.brokers import SharedKafka


async def test_every_record_of_a_real_broker_has_a_row(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path
) -> None:
    await kafka.create_topic(topic, 3)
    await kafka.produce(topic, [(b"k%d" % (number % 11), b"%d" % number) for number in range(900)])
    app = App(group, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", journal=tmp_path, show_keys=True)
    seen: dict[tuple[int, int], tuple[bytes | None, bytes | None, float]] = {}

    @app.consume(topic, retry=Retry(attempts=1), on_failure=DeadLetter(f"{topic}.dlt"))
    async def handle(record: Record) -> bytes | None:
        failed = int(record.value or b"") % 100 == 7
        result = None if failed else record.value
        seen[record.partition, record.offset] = (record.key, result, record.timestamp)
        if failed:
            raise ValueError
        return result

    await kafka.create_topic(f"{topic}.dlt")
    await app.serve(until_caught_up=True)
    everything = pyarrow.dataset.dataset(tmp_path).to_table().to_pylist()
    rows = [row for row in everything if row["status"] != "rebalance"]

    assert {(row["partition"], row["offset"]): (row["key"], row["result"], row["timestamp"]) for row in rows} == seen
    assert len(rows) == 900
    assert [row["status"] for row in rows].count("dead_lettered") == 9
    assert app.statistics().journal == JournalStatistics(written=900, waiting=0, dropped=0, files=1, trouble=None)
