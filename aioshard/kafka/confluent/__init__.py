"""The second client: a member of a consumer group on confluent-kafka, from the extra `confluent`."""
