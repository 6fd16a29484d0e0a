"""Members of consumer groups, in both group protocols of Kafka."""
