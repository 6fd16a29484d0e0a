"""Handlers that take lists of records."""
