"""Analysis of journals and topics on Spark: skew, tail, lag, arrivals, and the reports that show them."""
