"""Observability of an app: metrics, logs, traces and the event journal."""
