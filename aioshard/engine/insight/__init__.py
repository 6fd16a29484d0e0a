"""Insight into a running engine: statistics, and explanations of partitions that do not advance."""
