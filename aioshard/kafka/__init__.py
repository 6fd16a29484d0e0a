"""Kafka clients behind `aioshard.ports.Transport`. Import a client's module only where it is used."""
