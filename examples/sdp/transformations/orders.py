"""Two tables: the outcome of each order, and the total of each customer."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


@dp.table
def order_outcomes() -> DataFrame:
    """One row for each record of the topic. The handlers run while the rows are written, not when they are read."""
    return SparkSession.active().readStream.format("aioshard").option("app", "orders_app:app").load()


@dp.materialized_view
def customers() -> DataFrame:
    """The number and total of each customer's processed orders."""
    result = f.from_json(f.col("result").cast("string"), "customer string, total double")
    processed = SparkSession.active().table("order_outcomes").where("status = 'processed'")
    return (
        processed.select(result.alias("order"))
        .groupBy("order.customer")
        .agg(f.count("*").alias("orders"), f.sum("order.total").alias("total"))
    )
