"""Transactions on our own client: messages and offsets that become visible together, or not at all."""
