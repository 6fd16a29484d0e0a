"""Kafka's protocol: messages, connections and the state of a cluster."""
