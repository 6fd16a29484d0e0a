"""The analysis of a journal on Spark: skew, tail, lag, and what would have been with other numbers."""
