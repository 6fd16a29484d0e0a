"""Draining a run: its planned ranges go through the handlers."""
