"""Uses Spark through Spark Connect, for tests: a process has one session of one kind.

    python -m tests.spark.connecting BOOTSTRAP TOPIC APP DIRECTORY …

Prints as one line of JSON what it found: rows of the topic, outcomes of the app, and what each planned run came to.
"""

import json
import sys
from collections import Counter

from pyspark.sql import SparkSession

import aioshard.spark


def main(bootstrap: str, topic: str, app: str, *directories: str) -> None:
    """Reads, and drains what was planned."""
    spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "4").getOrCreate()
    try:
        aioshard.spark.register(spark)
        options = {"bootstrap_servers": bootstrap, "topics": topic}
        raw = spark.read.format("aioshard").options(**options).load().select("partition", "offset", "value").collect()
        outcomes = spark.read.format("aioshard").options(app=app).load().select("status").collect()
        drained = {directory: dict(aioshard.spark.run(spark, directory).statuses) for directory in directories}
        found = {
            "kind": type(spark).__module__,
            "raw": sorted([row["partition"], row["offset"], bytes(row["value"]).decode()] for row in raw),
            "outcomes": Counter(row["status"] for row in outcomes),
            "drained": drained,
        }
        print(json.dumps(found))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
