"""Explanations: why a record is incomplete, why a partition does not advance, and which problems the app has."""
