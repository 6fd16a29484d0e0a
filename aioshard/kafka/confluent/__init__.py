"""The second client: a consumer group member on confluent-kafka, from the extra `confluent`."""
