"""Reads the same data with Spark's own Kafka connector and with ours. A new session is needed for its jars.

    python -m tests.spark.comparing JARS BOOTSTRAP TOPIC APP DIRECTORY START END

DIRECTORY has a plan of the offsets between the times START and END, in milliseconds. Prints one line of JSON: for each
way to say what is read, the rows that only one of the two gives, and how many there are in all.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from pyspark.sql import DataFrame

from aioshard.spark import apply_handlers
from aioshard.spark.session import local_session


def main(jars: str, bootstrap: str, topic: str, app: str, directory: str, start: str, end: str) -> None:
    """Compares."""
    spark = local_session("local[2]", settings={"spark.jars": jars})

    def official(isolation: str = "read_committed", **options: str) -> DataFrame:
        reader = spark.read.format("kafka").options(subscribe=topic, includeHeaders="true", **options)
        return reader.options(**{"kafka.bootstrap.servers": bootstrap, "kafka.isolation.level": isolation}).load()

    def ours(**options: str) -> DataFrame:
        return spark.read.format("aioshard").options(bootstrap_servers=bootstrap, topics=topic, **options).load()

    begin, stop = json.dumps({topic: {"0": 3, "1": 5, "2": 0}}), json.dumps({topic: {"0": 9, "1": 11, "2": 12}})
    pairs = {
        "everything": (official(), ours()),
        "uncommitted": (official("read_uncommitted"), ours(isolation_level="read_uncommitted")),
        "offsets": (official(startingOffsets=begin, endingOffsets=stop), ours(start=begin, end=stop)),
        "times": (
            official(startingTimestamp=start, endingTimestamp=end),
            spark.read.format("aioshard").options(plan=directory, app="").load(),
        ),
    }
    try:
        found = {name: compared(*pair) for name, pair in pairs.items()}
        with tempfile.TemporaryDirectory() as out:
            rows = apply_handlers(official(), app, out=Path(out) / "outcomes").select("status", "result").collect()
        handled = Counter(row["status"] for row in rows)
        print(json.dumps({"reads": found, "handled": handled}))
    finally:
        spark.stop()


def compared(official: DataFrame, ours: DataFrame) -> dict[str, object]:
    """The rows that only one of the two has."""
    columns = official.columns
    assert sorted(columns) == sorted(ours.columns)
    assert dict(official.dtypes) == dict(ours.dtypes)
    official, ours = official.cache(), ours.select(columns).cache()
    return {
        "rows": official.count(),
        "only official": [str(row) for row in official.exceptAll(ours).collect()],
        "only ours": [str(row) for row in ours.exceptAll(official).collect()],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
