"""Kafka clients behind `aioshard.ports.Transport`. Import a client's module only if you use it."""
