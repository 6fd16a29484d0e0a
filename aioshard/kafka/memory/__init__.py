"""Kafka in memory: a broker with topics and groups, and clients of it that implement the ports without a network.

Replaying dead letters and the test kit run handlers on it.
"""
